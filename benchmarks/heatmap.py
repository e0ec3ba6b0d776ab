"""The heat map of the ``family`` suite: members by cases, coloured by speed relative to the best member of the case."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from .family import order_of_members
from .members import MemberRow
from .report import threads_text

#: Inches per column and per row of cells, and for what stands around them.
_CELL = (0.8, 0.19)
_MARGIN = (3.2, 2.2)


def missing() -> str | None:
    """Why no heat map can be drawn and what to do, or None if one can."""
    if importlib.util.find_spec("matplotlib") is None:
        return "--heat-map needs matplotlib, which is not installed: pip install 'tvmgemm[benchmarks]' or leave it out"
    return None


def draw(rows: Sequence[MemberRow], path: Path) -> None:
    """Write the image, in the format that the suffix of ``path`` names; one panel per dtype and number of threads.

    A cell is the member's speed in % of the best member of its case. A white frame marks the best, a black one the
    planner's choice. Does nothing without rows.
    """
    from matplotlib.figure import Figure

    panels: dict[tuple[str, int], list[MemberRow]] = {}
    for row in rows:
        panels.setdefault((row.dtype, row.threads), []).append(row)
    if not panels:
        return
    most_cases = max(len({row.case for row in group}) for group in panels.values())
    most_members = max(len({row.entry for row in group}) for group in panels.values())
    size = (len(panels) * (_CELL[0] * most_cases + _MARGIN[0]), _CELL[1] * most_members + _MARGIN[1])
    figure = Figure(figsize=size, layout="constrained")
    for axes, ((dtype, threads), group) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items()):
        image = _panel(axes, group)
        axes.set_title(f"{dtype}, {threads_text(threads)}")
    figure.colorbar(image, ax=figure.axes, label="speed relative to the best member of the case", shrink=0.5)
    figure.suptitle("Members of the family; white frame: the best, black frame: the planner's choice")
    figure.savefig(path, dpi=130)


def _panel(axes, rows: Sequence[MemberRow]):
    """One panel's cells, numbers, frames and labels; the image, which the colour bar explains."""
    import numpy as np
    from matplotlib.patches import Rectangle

    members, cases = order_of_members(rows), list(dict.fromkeys(row.case for row in rows))
    speeds = np.full((len(members), len(cases)), np.nan)
    for row in rows:
        y, x = members.index(row.entry), cases.index(row.case)
        speeds[y, x] = row.relative.median
        axes.text(x, y, f"{100 * row.relative.median:.0f}", ha="center", va="center", fontsize=7,
                  color="white" if row.relative.median < 0.6 else "black")  # fmt: skip
        frames = [(color, inset) for is_it, color, inset in ((row.best, "white", 0.0), (row.chosen, "black", 0.09)) if is_it]
        for color, inset in frames:
            corner = (x - 0.5 + inset, y - 0.5 + inset)
            axes.add_patch(Rectangle(corner, 1 - 2 * inset, 1 - 2 * inset, fill=False, edgecolor=color, linewidth=1.6))
    image = axes.imshow(speeds, vmin=0.0, vmax=1.0, cmap="viridis", aspect="auto")
    axes.set_xticks(range(len(cases)), cases, rotation=35, ha="right", fontsize=8)
    axes.set_yticks(range(len(members)), members, fontsize=7, family="monospace")
    return image
