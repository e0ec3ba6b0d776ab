"""The algorithm of a kernel as its figure in a paper would show it: loops, packings, buffers, the micro-kernel.

Here are the loops over cache blocks; what they have inside, the loops over tiles, is in ``outline_tiles``.

Written from the spec alone, without TVM, in the order in which ``generator`` emits it. ``x:+s`` are the s
elements from x on; what lies past the edge of the matrix is left out, as the code leaves it out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..spec import STEPS, KernelSpec
from . import outline_tiles, placement
from .figure import INDEX, Figure
from .validity import check
from .variants import LOOP_DIMENSION


def outline(spec: KernelSpec) -> str:
    """The text for ``spec``; ValueError for a spec that describes no kernel."""
    check(spec)
    f = Figure(spec)
    if spec.step == "basic":
        outline_tiles.triple_loop(f, {d: ("0", d) for d in "mnk"})
    elif not spec.blocked:
        outline_tiles.unblocked(f)
    else:
        _outer(f, list(f.variant.outer))
    return f.text()


def _outer(f: Figure, loops: list[str]) -> None:
    """These loops over cache blocks, outermost first, with what is packed in them, and all that is inside."""
    if not loops:
        _block_product(f)
        return
    name, rest = loops[0], loops[1:]
    dimension = LOOP_DIMENSION[name]
    shared = f"parallel: each task has {_share(f, name)}" if f.spec.parallel == name else ""
    start = "jc" if f.spec.symmetric and name == "ic" else "0"
    with f.loop(name, dimension, dimension + "c", shared, start):
        for operand in (operand for operand, at in f.packed.items() if at == name and operand != "C"):
            _pack(f, operand, name)
        with _sums(f, name):
            _outer(f, rest)
    if shared and name == "pc":
        _add_slots(f)


def _share(f: Figure, name: str) -> str:
    """What of a shared loop falls to a task (``partition``, ``triangle``)."""
    if f.spec.symmetric:
        return "rows, with equal areas below the diagonal"
    if f.variant.resident == "C" and f.spec.step == STEPS[-1] and name == f.variant.outer[-1] != "pc":
        return f"a contiguous share of {name} x {f.variant.inner[0]}"
    return "a contiguous share of the iterations"


def _add_slots(f: Figure) -> None:
    """What follows a loop over blocks of k whose iterations have sums of their own."""
    outer = f.variant.outer
    outside = [LOOP_DIMENSION[loop] for loop in outer[: outer.index("pc")]]
    what = f.panels("C") if f.collects else " x ".join(d + "c" * (d in outside) for d in "mn")
    f.buffer("Sc", what, False, "one per block of k, as many as 4 MiB hold, but one per task")
    with f.loop("pc", "k", "kc", "tasks share out C and keep to the order of k"):
        if f.collects:
            f.line("Cc = Sc[pc]", "in the first block of k; in later ones += Sc[pc]")
        else:
            f.bring(f"C[{', '.join(f'{INDEX[d]}c:+{d}c' if d in outside else ':' for d in 'mn')}]", "Sc[pc]", slot=False)


def _pack(f: Figure, operand: str, at: str) -> None:
    """The packing of A or B in loop ``at``."""
    private = placement.private(f.spec, at)
    how = "" if f.spec.step == STEPS[-1] and "vector-packing" not in f.spec.without else "element by element"
    who = "all tasks pack their shares" if f.spec.parallel and not private else ""
    comment = "; ".join(filter(None, (f"panels of {f.panels(operand).split(' of ')[1]}", who, how)))
    f.line(f"{operand}c = pack {f.block(operand)}", comment)
    f.buffer(operand + "c", f.panels(operand), private)


@contextmanager
def _sums(f: Figure, name: str) -> Iterator[None]:
    """What happens to a packed C around the inner loops of outer loop ``name``."""
    at, collects = f.packed.get("C"), f.collects
    if name == "pc" and collects and f.spec.parallel == "pc":
        f.line("S = Sc[pc]")
        f.line("S = 0")
        yield
    elif name == "pc" and collects:
        f.buffer("Pc", f.panels("C"), placement.private(f.spec, f.packed["C"]))
        f.line("S = Cc if pc == 0 else Pc")
        f.line("S = 0")
        yield
        f.line("if pc > 0: Cc += Pc")
    elif name == at:
        f.buffer("Cc", f.panels("C"), placement.private(f.spec, at))
        if not collects:
            f.line("Cc = 0")
        yield
        f.bring(f.block("C"), "Cc", every=collects)
    else:
        yield


def _block_product(f: Figure) -> None:
    step = f.spec.step
    if step == "blocked":
        outline_tiles.triple_loop(f, {d: (f"{INDEX[d]}c", f"{d}c") for d in "mnk"})
    elif step in ("packed", "microkernel"):
        outline_tiles.packed_loops(f, in_tile=step == "microkernel")
    elif f.variant.resident == "C":
        outline_tiles.resident_c(f)
    else:
        outline_tiles.resident_operand(f)
