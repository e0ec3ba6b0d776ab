"""Commands in processes of their own: what a user types and what comes back."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def python(*arguments, cwd, **environment):
    """Run this Python; its stdout, stderr and exit status. tvmgemm is found whatever ``cwd`` is."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", **environment}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=120)


def tvmgemm(*arguments, cwd, **environment):
    """``python -m tvmgemm``."""
    return python("-m", "tvmgemm", *arguments, cwd=cwd, **environment)


def program(folder, text, name="program.py"):
    """A file with that text."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path
