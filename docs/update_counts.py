"""Rewrite the tables of counts in ``family.md`` with what ``python -m tvmgemm emit`` says now.

python docs/update_counts.py            # from the checkout; takes a minute
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).with_name("family.md")

#: A table stands between a comment that names its target and dtype and the next comment.
TABLE = re.compile(r"(?<=<!-- counts: )([\w-]+) ([\w-]+)( -->\n).*?(?=<!-- -->)", re.DOTALL)


def table(target: str, dtype: str) -> str:
    """The default kernels of ``target`` for ``dtype`` and what is in their inner loops, as Markdown."""
    arguments = ["--show", "counts", "--variant", "all", "--dtype", dtype, "--target", target]
    command = [sys.executable, "-m", "tvmgemm", "emit", *arguments]
    said = subprocess.run(command, cwd=PAGE.parent.parent, check=True, stdout=subprocess.PIPE, text=True)
    _, _, rows = said.stdout.partition("\n\n")
    return rows


def updated(page: str) -> str:
    """``page`` with all its tables as they are now."""
    return TABLE.sub(lambda found: f"{found[1]} {found[2]}{found[3]}{table(found[1], found[2])}", page)


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text()))
