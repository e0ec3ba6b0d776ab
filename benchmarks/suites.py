"""The suites, one row of a table each. A new one needs no more than a row here and a list of its cases."""

from __future__ import annotations

from collections.abc import Iterator

from . import dtypes, family, ladder, shapes, startup, stream
from .suite import Case, Suite, product

#: The library that serves a large product of float32 or float64 best is one of these.
BLAS = {"numpy": 1.0, "mkl": 1.0}

#: What a square of this size has to reach of the measured peak.
PEAK = {2048: 0.92}


def _every(extent: str, items: tuple, quick: int) -> tuple:
    """All items; in a quick run every so many."""
    return items[::quick] if extent == "quick" else items


def _squares(dtype: str, extent: str) -> Iterator[Case]:
    for n in (256, 512, 1024, 2048) if extent == "quick" else shapes.SQUARES:
        yield product(n, n, n, peak=PEAK.get(n))


def _odd(dtype: str, extent: str) -> Iterator[Case]:
    for n in _every(extent, shapes.ODD, 2):
        yield product(n, n, n)


def _small(dtype: str, extent: str) -> Iterator[Case]:
    for n in (1, 4, 8, 16, 32, 64, 100, 128) if extent == "quick" else shapes.SMALL:
        yield product(n, n, n)


def _calls(dtype: str, extent: str) -> Iterator[Case]:
    for n in (2, 4, 8, 16):
        yield product(n, n, n)


def _stacks(dtype: str, extent: str) -> Iterator[Case]:
    for a, b, target in shapes.STACKS:
        yield Case(a, b, targets={"numpy": target}, note="one B" if len(b) == 2 else "")


def _layers(dtype: str, extent: str) -> Iterator[Case]:
    for network, layers in (("ResNet-50", shapes.RESNET50), ("VGG-16", shapes.VGG16)):
        for m, n, k in _every(extent, layers, 4):
            yield product(m, n, k, network)


def _transformer(dtype: str, extent: str) -> Iterator[Case]:
    for hidden in shapes.HIDDEN:
        for tokens in _every(extent, shapes.TOKENS, 2):
            yield product(tokens, hidden, hidden, "projection")
            if extent != "quick":
                yield Case((tokens, hidden), (hidden, hidden), b_layout="F", note="projection, weights as in PyTorch")
            if hidden < 4096:
                yield product(tokens, 4 * hidden, hidden, "to the feed-forward layer")
                if extent != "quick":
                    yield product(tokens, hidden, 4 * hidden, "from the feed-forward layer")
    for heads, tokens, width in _every(extent, shapes.ATTENTION, 2):
        yield Case((heads, tokens, width), (heads, width, tokens), b_layout="F", note="attention, scores")
        yield Case((heads, tokens, tokens), (heads, tokens, width), note="attention, values")


def _vectors(dtype: str, extent: str) -> Iterator[Case]:
    sizes = (16, 128, 1024, 4096) if extent == "quick" else (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
    for n in sizes:
        yield Case((n, n), (n,), note="matrix x vector")
        yield Case((n,), (n, n), note="vector x matrix")
        yield Case((n,), (n,), note="dot")
        yield Case((n, 1), (1, n), note="outer")
    for n in sizes[1:3]:
        yield Case((n, n), (n,), a_layout="F", note="matrix x vector")
        yield Case((n, n), (n,), b_layout="[:,::2]", note="matrix x vector")
        yield Case((n,), (n, n), b_layout="F", note="vector x matrix")
        yield Case((n,), (n,), a_layout="[:,::-1]", note="dot")
    if extent != "quick":
        for n, k in shapes.ROWS:
            yield Case((k,), (k, n), note="vector x matrix")


def _skinny(dtype: str, extent: str) -> Iterator[Case]:
    for m, n, k in _every(extent, shapes.SKINNY, 2):
        yield product(m, n, k)


def _strided(dtype: str, extent: str) -> Iterator[Case]:
    for n in (128,) if extent == "quick" else (32, 128, 512):
        for a_layout, b_layout, out_layout in shapes.STRIDED:
            yield Case((n, n), (n, n), a_layout, b_layout, out_layout)


def _symmetric(dtype: str, extent: str) -> Iterator[Case]:
    for n in (64, 256, 1024) if extent == "quick" else (16, 64, 128, 256, 512, 1024, 2048):
        yield Case((n, n), (n, n), mirrored=True)
        yield Case((n, n), (n, n), a_layout="F", mirrored=True)
    for m, k in ((100, 2000), (1000, 50)):
        yield Case((m, k), (k, m), mirrored=True)
        yield Case((m, k), (k, m), a_layout="F", mirrored=True)


def _choices(dtype: str, extent: str) -> Iterator[Case]:
    """All of them in each extent: they are short."""
    kind = next(kind for kind in reversed(shapes.CHOICES) if kind in dtype)
    densities = (0.33, 0.75, 1.0) if kind == "bool" else (0.5,)
    for (m, n, k), a_layout, b_layout in shapes.CHOICES[kind]:
        for density in densities:
            note = f"{100 * density:g} % true" if kind == "bool" else ""
            yield Case((m, k), (k, n), a_layout, b_layout, note=note, density=density)


# fmt: off
SUITES: dict[str, Suite] = {suite.name: suite for suite in (
    Suite("squares", "square products, 256 to 4096", _squares, BLAS, mean=1.05),
    Suite("odd", "square products of odd sizes, 97 to 1021", _odd, mean=1.1),
    Suite("small", "single products of small square matrices, 1 to 128", _small, mean=1.2, into_out=False),
    Suite("calls", "what a call costs: 2, 4, 8 and 16, as a function and as the patched operator", _calls,
          entries=("matmul", "patched"), threads=(1,), into_out=False, unit="us"),
    Suite("stacks", "stacks of small matrices, when small shapes have kernels of their own", _stacks, mean=2.0, hot=True),
    Suite("layers", "convolution layers of ResNet-50 and VGG-16 as products (im2row)", _layers, BLAS, mean=1.2),
    Suite("transformer", "layers and attention of transformers, 1 to 512 tokens", _transformer, mean=1.2),
    Suite("vectors", "matrix x vector, vector x matrix, dot and outer products, 16 to 8192", _vectors, mean=1.3),
    Suite("skinny", "one or two of m, n, k in 2 to 16, the others 1,000 to 100,000", _skinny, mean=1.5),
    Suite("strided", "transposed, stepped, reversed and repeated operands, results in other layouts", _strided, mean=1.5),
    Suite("symmetric", "A @ A.T, and A.T @ A (A=F)", _symmetric, mean=1.1),
    Suite("stream", "a thousand random shapes in 1 to 200, none seen before: the total time", stream.cases,
          unit="ms", measure=stream.measure),
    Suite("dtypes", "other element types, by themselves and in mixtures", dtypes.cases,
          {"numpy": 1.0, "mkl": 1.0, "torch": 1.0}, dtypes=dtypes.NAMES, threads=(1,)),
    Suite("choices", "what decided single rules of the planner, and products known to be behind", _choices,
          dtypes=("float32", "float64", "complex64", "complex128", "int8", "int32", "int64", "bool", "bfloat16-float32"), threads=(1,)),
    Suite("startup", "import and first call, in processes of their own", startup.cases, dtypes=("float32",),
          threads=(1,), unit="ms", measure=startup.measure, view=startup.VIEW),
    Suite("family", "every member of the family by classes of shapes, and the planner's choice among them",
          family.cases, threads=(1,), measure=family.measure, view=family.VIEW),
    Suite("ladder", "the generator's five steps, and its last one without each fine-grain optimisation",
          ladder.cases, threads=(1,), measure=ladder.measure, view=ladder.VIEW),
)}
# fmt: on
