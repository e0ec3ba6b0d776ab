"""The command line: ``python -m tvmgemm run | info | demo | emit | tune``.

Each command is a module of this package with ``main(argv) -> exit status``; only that one is imported.
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module

#: name -> what it does, for ``--help``.
COMMANDS = {
    "run": "run a Python program, unmodified, with NumPy's matmul served by tvmgemm",
    "info": "versions, this machine, the kernel cache and the settings in force",
    "demo": "build kernels, check them against NumPy and compare the speed, in under a minute",
    "emit": "a kernel's loops, code and instruction counts, for this machine or another",
    "tune": "measure which kernels serve products of given shapes best, and keep the answers",
}

_USAGE = "usage: python -m tvmgemm {run,info,demo,emit,tune} ..."


def main(argv: list[str] | None = None) -> int:
    """Run the command named by ``argv[0]`` (default: the process's arguments); returns its exit status, 130 if it is
    interrupted."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["run"]:  # whose output and exceptions are the program's
        return _main(argv)
    try:
        try:
            return _main(argv)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:  # piped into head, less ...: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130


def positive_seconds(text: str) -> float:
    """The value of an option ``--seconds``, for argparse."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return seconds


def _main(argv: list[str]) -> int:
    command = argv[0] if argv else None
    if command in COMMANDS:
        return import_module(f"tvmgemm.cli.{command}").main(argv[1:])
    if command in ("-h", "--help"):
        print(_USAGE, "", *(f"  {name:<6}{what}" for name, what in COMMANDS.items()), sep="\n")
        print("\npython -m tvmgemm COMMAND --help tells more.")
        return 0
    if command == "--version":
        from tvmgemm import __version__

        print(f"tvmgemm {__version__}")
        return 0
    problem = "a command is missing" if command is None else f"{command!r} is not a command"
    print(f"{_USAGE}\ntvmgemm: {problem}: pass one of {', '.join(COMMANDS)}", file=sys.stderr)
    return 2
