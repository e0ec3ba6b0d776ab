"""What ``help`` says of the public names: their examples give what they show."""

from __future__ import annotations

import doctest

import pytest

import tvmgemm

#: Public names whose use takes an example; the others are a word.
SHOWN = ("explain", "gemm", "matmul", "options", "patched", "stats")


def examples(name: str, text: str) -> list[doctest.Example]:
    return doctest.DocTestParser().get_examples(text, name)


@pytest.mark.parametrize("name", ["tvmgemm", *SHOWN])
def test_examples(name):
    documented = tvmgemm if name == "tvmgemm" else getattr(tvmgemm, name)
    found = examples(name, documented.__doc__)
    assert found, f"help({name}) has no example"
    runner = doctest.DocTestRunner(verbose=False)
    said: list[str] = []
    runner.run(doctest.DocTest(found, {}, name, None, None, documented.__doc__), out=said.append)
    assert not runner.failures, "".join(said)
