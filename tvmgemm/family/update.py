"""What C becomes when the sum of a block of k is there: the sum, or added to what is there, with alpha and beta for
gemm."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm import tirx

from . import emit
from .emit import const, let
from .vectors import lanes_of

if TYPE_CHECKING:
    from .generator import Generator


def update_c(g: Generator, first, write) -> None:
    """Emit ``write(update)`` for each way of bringing a finished sum of one block of k to C.

    ``update(sum, load, splat)`` is C's new value; it calls ``load()`` only where it needs the old one. C = sum in the
    first block of k, C += sum in later ones; with alpha and beta for gemm. A slot of ``split_k`` takes the sum as it
    is.
    """
    if g.slot is not None:
        write(lambda x, c, s: x)
        return
    elements = g.elements
    if g.spec.op == "matmul":
        emit.branch(
            first,
            lambda: write(lambda x, c, s: elements.result(x, lanes_of(x))),
            lambda: write(lambda x, c, s: elements.joined(c(), x, lanes_of(x))),
        )
        return
    if elements.parts > 1:
        _update_complex(g, first, write)
        return
    alpha, beta = let("alpha", g.scale.get(const(0))), let("beta", g.scale.get(const(1)))

    def scaled(kept):
        """alpha.x, and what ``kept(load, splat, lanes)`` makes of the old C."""
        return lambda: write(
            lambda x, c, s: elements.scaled(s(alpha), x, kept and kept(c, s, lanes_of(x)), lanes_of(x))
        )

    times_beta = scaled(lambda c, s, lanes: s(beta) * elements.wide(c(), lanes))
    # beta == 0: C is not read, so a NaN in it vanishes, as in BLAS.
    no_beta = beta == tirx.const(0, elements.scale)
    emit.branch(
        first,
        lambda: emit.branch(no_beta, scaled(None), times_beta),
        scaled(lambda c, s, lanes: elements.wide(c(), lanes)),
    )


def _update_complex(g: Generator, first, write) -> None:
    """``update_c`` for gemm of complex numbers: vectors of pairs, alpha and beta pairs."""
    elements = g.elements
    alpha, beta = ([let(f"{name}{q}", g.scale.get(const(at + q))) for q in (0, 1)] for name, at in (("alpha", 0), ("beta", 2)))

    def times(pair, x, s):
        return elements.complex_product(tuple(map(s, pair)), x)

    def scaled(kept):
        return lambda: write(lambda x, c, s: times(alpha, x, s) if kept is None else times(alpha, x, s) + kept(c, s))

    zero = tirx.const(0, elements.scale)
    no_beta = emit.both(beta[0] == zero, beta[1] == zero)
    times_beta = scaled(lambda c, s: times(beta, c(), s))
    emit.branch(first, lambda: emit.branch(no_beta, scaled(None), times_beta), scaled(lambda c, s: c()))
