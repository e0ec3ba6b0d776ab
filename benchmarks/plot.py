"""The plot of speed against size: square products, ours and the peers', with the measured peak as a line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .report import Results, groups, threads_text
from .runner import Row

#: The suites whose cases are squares.
SUITES = ("odd", "squares")

#: By library; tvmgemm first and on top.
_STYLES = {
    "tvmgemm": {"color": "#1f4e9c", "marker": "o", "linewidth": 1.8, "zorder": 3},
    "numpy": {"color": "#c8641e", "marker": "s", "linewidth": 1.2},
    "mkl": {"color": "#3a8a4d", "marker": "^", "linewidth": 1.2},
}


def speed_against_size(results: Results, path: Path) -> None:
    """Write the image (PNG), a panel per dtype and number of threads; does nothing without rows of ``SUITES``."""
    from matplotlib.figure import Figure

    panels = groups((row for row in results.rows if row.suite in SUITES and row.flops), "dtype", "threads")
    if not panels:
        return
    columns = min(2, len(panels))
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(5.2 * columns, 3.4 * lines), layout="constrained")
    for axes, ((dtype, threads), rows) in zip(figure.subplots(lines, columns, squeeze=False).flat, panels.items()):
        for name, points in speeds(rows).items():
            axes.plot(*zip(*sorted(points.items())), label=name, markersize=3, **_STYLES.get(name, {}))
        if threads in results.peak.get(dtype, {}):
            axes.axhline(results.peak[dtype][threads], color="black", linestyle="--", linewidth=1, label="FMA peak")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda size, position: f"{size:g}")
        axes.set_ylim(bottom=0)
        axes.set_xlabel("m = n = k")
        axes.set_title(f"{dtype}, {threads_text(threads)}", fontsize=10)
        axes.grid(alpha=0.3)
        axes.set_ylabel("GFLOP/s")
    figure.axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=80)


def speeds(rows: Sequence[Row]) -> dict[str, dict[int, float]]:
    """GFLOP/s by library and size."""
    found: dict[str, dict[int, float]] = {"tvmgemm": {}}
    for row in rows:
        size = int(row.case.partition("x")[0])
        found["tvmgemm"][size] = row.gflops
        if row.peer_gflops is not None:
            found.setdefault(row.peer, {})[size] = row.peer_gflops
    return found
