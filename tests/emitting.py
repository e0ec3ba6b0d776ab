"""Fixtures for tests of ``python -m tvmgemm emit``."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tvmgemm.cli import emit

needs_tvm = pytest.mark.skipif(find_spec("tvm") is None, reason="needs the compiler")


@pytest.fixture
def shown(capsys):
    """``shown("--dtype float64 ...")``: what the command prints."""

    def run(arguments: str) -> str:
        assert emit.main(arguments.split()) == 0
        captured = capsys.readouterr()
        assert captured.err == ""
        return captured.out

    return run


@pytest.fixture
def refused(capsys):
    """``refused("--dtype int8 ...")``: (exit status, the message), which is one line."""

    def run(arguments: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as exit:
            emit.main(arguments.split())
        captured = capsys.readouterr()
        assert captured.out == ""
        return exit.value.code, captured.err.splitlines()[-1]

    return run
