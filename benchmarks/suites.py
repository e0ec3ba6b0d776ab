"""The suites, one row of a table each. A new one needs no more than a row here."""

from __future__ import annotations

from collections.abc import Iterator

from . import family, ladder, shapes, startup
from .suite import Case, Suite, product


def _squares(dtype: str, extent: str) -> Iterator[Case]:
    for n in (256, 512, 1024) if extent == "quick" else shapes.SQUARES:
        yield product(n, n, n)


def _small(dtype: str, extent: str) -> Iterator[Case]:
    for n in (1, 4, 8, 16, 32, 64, 100, 128) if extent == "quick" else shapes.SMALL:
        yield product(n, n, n)


def _calls(dtype: str, extent: str) -> Iterator[Case]:
    for n in (2, 4, 8, 16):
        yield product(n, n, n)


def _layers(dtype: str, extent: str) -> Iterator[Case]:
    step = {"quick": 8, "usual": 3, "full": 1}[extent]
    for network, layers in (("ResNet-50", shapes.RESNET50), ("VGG-16", shapes.VGG16)):
        for m, n, k in layers[::step]:
            yield product(m, n, k, network)


# fmt: off
SUITES: dict[str, Suite] = {suite.name: suite for suite in (
    Suite("squares", "square products, 256 to 2048", _squares),
    Suite("small", "single products of small square matrices, 1 to 128", _small, threads=(1,)),
    Suite("calls", "what a call costs: 2, 4, 8 and 16, as a function and as the patched operator", _calls,
          entries=("matmul", "patched"), threads=(1,), into_out=False, unit="us"),
    Suite("layers", "convolution layers of ResNet-50 and VGG-16 as products (im2row)", _layers),
    Suite("startup", "import and first call, in processes of their own", startup.cases, dtypes=("float32",),
          threads=(1,), unit="ms", measure=startup.measure, view=startup.VIEW),
    Suite("family", "every member of the family by classes of shapes, and the planner's choice among them",
          family.cases, threads=(1,), measure=family.measure, view=family.VIEW),
    Suite("ladder", "the generator's five steps, and its last one without each fine-grain optimisation",
          ladder.cases, threads=(1,), measure=ladder.measure, view=ladder.VIEW),
)}
# fmt: on
