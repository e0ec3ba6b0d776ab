"""The variants of the family as rows: loop order, what is packed where, which operand rests in registers.

A name ``XiYjZ0`` reads: X is packed for level i of the cache hierarchy, Y for level j, Z stays in registers
(Castello, Igual, Quintana-Orti, "Algorithm 1039", ACM TOMS 50(1), 2024, section 2; the original of the family is
Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication", ACM TOMS 34(3), 2008).
"""

from __future__ import annotations

from dataclasses import dataclass

#: The dimension of the problem that each loop runs over, outer (cache blocks) and inner (micro-tiles).
LOOP_DIMENSION = {"ic": "m", "jc": "n", "pc": "k", "ir": "m", "jr": "n", "pr": "k"}


@dataclass(frozen=True)
class Variant:
    """One member of the family.

    ``outer``: the cache-block loops, outermost first. ``packed``: (operand, loop) in the order in which they happen;
    the operand's block is packed inside that loop, before the next one starts. ``inner``: the loops over micro-tiles.
    ``resident``: the operand whose micro-tile rests in registers while the micro-kernel runs.
    """

    name: str
    outer: tuple[str, str, str]
    packed: tuple[tuple[str, str], ...]
    inner: tuple[str, str]
    resident: str

    @property
    def parallel_loops(self) -> tuple[str, ...]:
        """Outer loops whose iterations write disjoint parts of C, so that tasks may share them out.

        Iterations of ``pc`` add into the same C: sharing those out needs a reduction, which is another algorithm.
        """
        return tuple(loop for loop in self.outer if loop != "pc")


# fmt: off
VARIANTS: dict[str, Variant] = {variant.name: variant for variant in (
    #       name      outer loops         packed in                     inner         resident
    Variant("B3A2C0", ("jc", "pc", "ic"), (("B", "pc"), ("A", "ic")),   ("jr", "ir"), "C"),
)}
# fmt: on
