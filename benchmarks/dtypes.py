"""The cases of the ``dtypes`` suite: what each element type has to reach, and against whom."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tvmgemm.host import host

from .suite import Case, product

#: Kernels for plain AVX2, without the units for bytes and half precision that later CPUs have.
AVX2 = "x86-64-v3"

#: Single calls of these sizes are to be no slower than NumPy's.
SMALL = (1, 2, 3, 4, 8, 16)


@dataclass(frozen=True)
class Goal:
    """The ratio to reach on a CPU without AMX, and with it; None: none is set, the peer is only shown."""

    without: float | None
    amx: float | None

    @property
    def here(self) -> float:
        """The one for this machine; 0, which every ratio reaches, where none is set."""
        return (self.amx if "amx_tile" in host().features else self.without) or 0.0


@dataclass(frozen=True)
class Row:
    """Sizes (m, n, k), and by peer what they have to reach; ``density``: of bool operands."""

    shapes: tuple[tuple[int, int, int], ...]
    goals: Mapping[str, Goal]
    density: float = 0.5


def _cubes(*sizes: int) -> tuple[tuple[int, int, int], ...]:
    return tuple((n, n, n) for n in sizes)


def _integers(without: float, amx: float) -> tuple[Row, ...]:
    return (Row(_cubes(512, 1000), {"numpy": Goal(without, amx)}),)


def _complex() -> tuple[Row, ...]:
    return (Row(_cubes(64, 128, 256, 512, 1024), {"numpy": Goal(1.0, 1.0), "mkl": Goal(1.0, 1.0)}),)


def _mixed(numpy: Goal, torch: Goal) -> tuple[Row, ...]:
    return (Row((*_cubes(256, 1024), (4096, 1024, 1024)), {"numpy": numpy, "torch": torch}),)


# fmt: off
#: By element types (``elements``).
ROWS: dict[str, tuple[Row, ...]] = {
    "int8": _integers(100, 500), "uint8": _integers(100, 500),
    "int16": _integers(60, 200), "uint16": _integers(60, 200),
    "int32": _integers(35, 100), "uint32": _integers(35, 100),
    "int64": _integers(10, 30), "uint64": _integers(10, 30),
    "float16": (
        Row(_cubes(512, 1024), {"numpy": Goal(300, 1000)}),
        Row(_cubes(1024), {"torch": Goal(1.0, 2.5)}),
    ),
    "int8-int32": _mixed(Goal(None, 500), Goal(None, 1.3)),
    "uint8-int8-int32": (Row(_cubes(256, 1024), {"numpy": Goal(None, 500)}),),
    "bfloat16-float32": (Row(_cubes(256, 1024, 2048), {"numpy": Goal(1.0, 8.0)}),),
    "bfloat16": (Row(_cubes(256, 1024, 2048), {"torch": Goal(None, 1.2)}),),
    "complex64": _complex(), "complex128": _complex(),
    "bool": (
        Row(_cubes(512), {"numpy": Goal(20, 20)}, density=0.01),
        Row(_cubes(512), {"numpy": Goal(1.0, 1.0)}, density=0.5),
    ),
}

#: What kernels for AVX2 have to reach over NumPy at 512.
CAPPED = {
    **dict.fromkeys(("int8", "uint8", "int16", "uint16", "int32", "uint32"), 10.0), "int64": 3.0, "uint64": 3.0,
    "float16": 100.0,
}
# fmt: on

NAMES = tuple(ROWS)

#: Multiply-adds from which NumPy takes a second and more, for elements that it has no BLAS for.
_LONG = 600**3


def cases(dtype: str, extent: str) -> Iterator[Case]:
    """A quick run leaves out what takes NumPy long, and most small sizes."""
    for row in ROWS[dtype]:
        for m, n, k in row.shapes:
            goals = row.goals
            if extent == "quick" and m * n * k > _LONG and not dtype.startswith(("complex", "bfloat16")):
                goals = {peer: goal for peer, goal in goals.items() if peer != "numpy"}
            if goals:
                note = f"{100 * row.density:g} % true" if dtype == "bool" else ""
                targets = {peer: goal.here for peer, goal in goals.items()}
                yield product(m, n, k, note, targets=targets, density=row.density)
    for n in SMALL[::3] if extent == "quick" else SMALL:
        yield product(n, n, n, targets={"numpy": 1.0})
    if dtype in CAPPED:
        yield product(512, 512, 512, f"capped to {AVX2}", targets={"numpy": CAPPED[dtype]}, max_isa=AVX2)
