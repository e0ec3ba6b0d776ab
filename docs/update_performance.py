"""Measure, and rewrite the tables and the plot of ``performance.md``.

python docs/update_performance.py                    # every suite in full: about 40 minutes on a quiet machine
python docs/update_performance.py --quick            # every suite, fewer cases and less time for each: about 12
python docs/update_performance.py squares dtypes     # these suites
python docs/update_performance.py run.json           # no measuring: results that python -m benchmarks --json wrote

Each suite runs in a process of its own, and the page is written after each, so an interrupt loses one suite at most. With
``--json FOLDER`` the results are kept there, a file per suite; with files as arguments, pass those of all suites of the plot.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

PAGE = Path(__file__).with_name("performance.md")
IMAGE = Path(__file__).with_name("performance.png")
ROOT = PAGE.parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import page, plot, report, suites  # noqa: E402


def measured(names: list[str], options: list[str], folder: Path) -> Iterator[Path]:
    """The results of each suite, as they come."""
    for name in names:
        file = folder / f"{name}.json"
        subprocess.run([sys.executable, "-m", "benchmarks", name, *options, "--json", file], cwd=ROOT, check=True)
        yield file


def main(argv: list[str] | None = None) -> int:
    """Update the page; 2 for arguments that are neither suites of the page nor files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", metavar="suite or file.json", help=f"default: {' '.join(page.SUITES)}")
    parser.add_argument("--quick", action="store_true", help="as in python -m benchmarks")
    parser.add_argument("--seconds", metavar="S", help="as in python -m benchmarks")
    parser.add_argument("--json", type=Path, metavar="FOLDER", help="keep the results there")
    arguments = parser.parse_args(argv)
    files = [Path(name) for name in arguments.what if name.endswith(".json")]
    names = [name for name in arguments.what if not name.endswith(".json")]
    if unknown := [name for name in names if name not in page.SUITES]:
        parser.error(f"{', '.join(unknown)}: neither a file nor one of {', '.join(page.SUITES)}")
    options = ["--quick"] if arguments.quick else []
    options += ["--seconds", arguments.seconds] if arguments.seconds else []

    squares = None
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.json or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        wanted = names if names or files else list(page.SUITES)
        for file in itertools.chain(files, measured(wanted, options, folder)):
            results = report.from_json(json.loads(file.read_text()))
            PAGE.write_text(page.updated(PAGE.read_text(), results, [suites.SUITES[name] for name in page.SUITES]))
            if any(row.suite in plot.SUITES for row in results.rows):
                squares = results if squares is None else report.joined(squares, results)
    if squares is not None and "squares" in {row.suite for row in squares.rows}:
        plot.speed_against_size(squares, IMAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
