"""Tuning results to test with, and folders that hold them."""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import replace

import pytest

import tvmgemm
from tvmgemm import dispatch, kernels, log, tuned
from tvmgemm.family.members import member
from tvmgemm.family.tiles import TILES
from tvmgemm.host import host
from tvmgemm.product import Product
from tvmgemm.store import Store
from tvmgemm.tuned import MEMBER, Tuned


def an_isa():
    return host().isa().name


def entry(m=96, n=80, k=64, winner=MEMBER, threads=1, dtype="float32", **problem):
    """A result in favour of the unpacked second tile, which the planner would not choose, with small blocks."""
    isa, asked = an_isa(), replace(Product(dtype, m, n, k).problem(), **problem)
    spec = member("A3B2C0", dtype, isa, TILES[isa, dtype]["C"][2], "ab", op=asked.op) if winner == MEMBER else None
    blocks = (4 * spec.mr, 4 * spec.nr) if spec else (0, 0)
    return Tuned(
        asked, threads, isa, winner, "the planner's", "2026-01-02", (1.2, 1.1, 1.3), spec, *blocks
    )


@pytest.fixture
def store(tmp_path):
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    return Store(str(folder))


@contextmanager
def own_cache(tmp_path):
    """A cache folder of its own that the process uses, with the kernels of the checkout's."""
    log._warned.clear()
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    for name in os.listdir(kernels.store().folder):
        if name.endswith(".so"):
            os.link(os.path.join(kernels.store().folder, name), folder / name)
    with tvmgemm.options(cache_dir=folder, num_threads=1):
        yield Store(str(folder))
    dispatch.look_again()


@pytest.fixture
def cache(tmp_path):
    with own_cache(tmp_path) as store:
        yield store


def use(store, *entries):
    tuned.save(store, host(), entries)
    dispatch.look_again()


def file_of(store):
    return tuned.path(store, host())
