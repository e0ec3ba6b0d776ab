"""The variants of the family as rows: loop order, what is packed where, which operand stays in registers.

A name ``XiYjZ0`` reads: X is packed for level i of the cache hierarchy, Y for level j, Z stays in registers
(Castello, Igual, Quintana-Orti, "Algorithm 1039", ACM TOMS 50(1), 2024, section 2; the original of the family is
Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication", ACM TOMS 34(3), 2008).
"""

from __future__ import annotations

from dataclasses import dataclass

#: The dimension of the problem that each loop runs over, outer (cache blocks) and inner (micro-tiles).
LOOP_DIMENSION = {"ic": "m", "jc": "n", "pc": "k", "ir": "m", "jr": "n", "pr": "k"}

#: The dimensions of each operand, rows first.
OPERAND_DIMENSIONS = {"A": ("m", "k"), "B": ("k", "n"), "C": ("m", "n")}

#: resident operand -> operand -> (dimension that micro-panels cut up, dimension that runs along a panel). The resident
#: operand's own row says how its micro-tile is laid out while it is loaded into registers.
PANELS = {
    "C": {"A": ("m", "k"), "B": ("n", "k")},
    "A": {"B": ("k", "n"), "C": ("m", "n"), "A": ("m", "k")},
    "B": {"A": ("k", "m"), "C": ("n", "m"), "B": ("n", "k")},
}


@dataclass(frozen=True)
class Variant:
    """One member of the family.

    ``outer``: the cache-block loops, outermost first. ``packed``: (operand, loop) in the order in which they happen;
    the operand's block is packed inside that loop, before the next one starts (C: cleared there, brought back when
    the inner loops are done). ``inner``: the loops over micro-tiles. ``resident``: the operand whose micro-tile stays
    in registers while the micro-kernel runs.
    """

    name: str
    outer: tuple[str, str, str]
    packed: tuple[tuple[str, str], tuple[str, str]]
    inner: tuple[str, str]
    resident: str

    def parallel_loops(self, packing: str) -> tuple[str, ...]:
        """Outer loops that tasks may share out when that is packed.

        Iterations of ``ic`` and ``jc`` write disjoint parts of C. Those of ``pc`` add to the same C, so the sums of
        each are kept apart and added in the order of k; a C that is updated in place has no such sums, but one chain of
        additions through all of k.
        """
        in_place = "c" in self.packable and "c" not in packing
        return tuple(loop for loop in self.outer if loop != "pc" or not in_place)

    @property
    def packable(self) -> str:
        """The operands that it packs, as in a spec's ``packing``: ``"ab"``, ``"bc"`` or ``"ac"``."""
        return "".join(sorted(operand.lower() for operand, _ in self.packed))

    @property
    def packings(self) -> tuple[str, ...]:
        """The choices of what is packed. Resident A moves down columns of C, whose rows are what is contiguous: there C
        is always packed."""
        choices = (self.packable, *self.packable, "none")
        return tuple(c for c in choices if self.resident != "A" or "c" in c)

    @property
    def stream(self) -> str:
        """The dimension that the micro-kernel loops over."""
        return {"C": "k", "A": "n", "B": "m"}[self.resident]

    @property
    def tile_dimensions(self) -> tuple[str, str]:
        """The dimensions of the micro-tile, rows first."""
        return OPERAND_DIMENSIONS[self.resident]


# fmt: off
VARIANTS: dict[str, Variant] = {variant.name: variant for variant in (
    #       name      outer loops         packed in                     inner         resident
    Variant("B3A2C0", ("jc", "pc", "ic"), (("B", "pc"), ("A", "ic")),   ("jr", "ir"), "C"),
    Variant("A3B2C0", ("ic", "pc", "jc"), (("A", "pc"), ("B", "jc")),   ("ir", "jr"), "C"),
    Variant("B3C2A0", ("jc", "pc", "ic"), (("B", "pc"), ("C", "ic")),   ("pr", "ir"), "A"),
    Variant("A3C2B0", ("ic", "pc", "jc"), (("A", "pc"), ("C", "jc")),   ("pr", "jr"), "B"),
    Variant("C3B2A0", ("jc", "ic", "pc"), (("C", "ic"), ("B", "pc")),   ("pr", "ir"), "A"),
    Variant("C3A2B0", ("ic", "jc", "pc"), (("C", "jc"), ("A", "pc")),   ("pr", "jr"), "B"),
)}
# fmt: on
