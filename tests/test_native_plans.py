"""The native table of plans: boxes, exact plans, what is counted, what is forgotten."""

from __future__ import annotations

import numpy as np
import pytest
from arrays import whole_numbers
from plain_kernels import native  # noqa: F401

from tvmgemm import frontend
from tvmgemm.frontend import matmul
from tvmgemm.problem import COL, ROW


def test_exact_plans_come_first(native):
    """Two of one shape, for short and long stacks; other shapes and layouts are not theirs."""
    general = native.publish(native.kernel("plain_float32"))
    here = {"m_lo": 4, "m_hi": 4, "n_lo": 5, "n_hi": 5, "k_lo": 6, "k_hi": 6, "exact": 1, "b_layout": ROW}
    short = native.publish(native.kernel("packing_float32"), batch_hi=9, **here)
    assert native.publish(native.kernel("packing_float32"), batch_hi=9, id=short, **here) == short  # takes no second place
    long = native.publish(native.kernel("packing_float32"), batch_lo=10, **here)

    def serving(m, n, k, **more):
        return native.lib.tg_lookup(native.problem(m=m, n=n, k=k, **more))

    assert [serving(4, 5, 6, batch=b) for b in (1, 9, 10)] == [short, short, long]
    assert {serving(4, 5, 7), serving(4, 5, 0), serving(20, 5, 6), serving(4, 5, 6, b_layout=COL)} == {general}
    assert serving(4, 5, 6, dtype=1) == serving(4, 5, 6, op=1) == -1
    native.lib.tg_clear_plans()
    assert serving(4, 5, 6) == -1
    for wrong in ({"m_lo": 17}, {"k_lo": 0}, {"op": 1}):
        made = native.plan(native.kernel("plain_float32"), **{**here, "m_lo": 4, **wrong})
        assert native.lib.tg_publish(made) == -1
    assert native.lib.tg_set_served(0, 17, 1, 1, 5) == native.lib.tg_set_served(99, 1, 1, 1, 5) == -1


def test_products_of_a_small_shape_are_counted(native, monkeypatch):
    asked = []
    monkeypatch.setattr(frontend, "on_hot", lambda p: asked.append((p.m, p.n, p.k)) or False)
    native.publish(native.kernel("plain_float32"), hot_at=100)
    a = np.ones((30, 4, 4), "f")
    for calls in range(1, 7):
        assert (matmul(a, a) == 4).all() and (matmul(a[:, :3], a) == 4).all()
        matmul(np.ones((99, 17, 4), "f"), np.ones((99, 4, 4), "f"))  # too large to be counted
        assert asked == ([(4, 4, 4), (3, 4, 4)] if calls >= 4 else [])
    assert native.lib.tg_set_served(0, 4, 4, 4, 99) == 0
    matmul(a[0], a[0])
    assert asked[2:] == [(4, 4, 4)]


def test_no_plan_and_declining_plan_run_numpy(native):
    a, b = whole_numbers((5, 7), "f", 1), whole_numbers((7, 6), "f", 2)
    native.lib.tg_reset_counters()
    np.testing.assert_array_equal(matmul(a, b), np.matmul(a, b))
    native.publish(None, dtype=0)
    frontend.on_miss = None  # must not be reached: the plan says what to do
    np.testing.assert_array_equal(matmul(a, b), np.matmul(a, b))
    assert (native.lib.tg_served(0), native.lib.tg_declined(0)) == (0, 2)


BOX = dict(a_layout=0, b_layout=0, c_layout=0, symmetric=0, m_lo=4, m_hi=8, n_lo=5, n_hi=9, k_lo=6, k_hi=10,
           batch_lo=2, batch_hi=3, work_lo=200.0, work_hi=500.0)

INSIDE = dict(m=6, n=7, k=8, batch=2)


@pytest.mark.parametrize(
    "change, inside",
    [({}, True), (dict(m=4), True), (dict(m=3), False), (dict(m=9), False), (dict(n=9, m=4), True),
     (dict(n=10), False), (dict(n=4), False), (dict(k=10), True), (dict(k=11), False), (dict(k=5), False),
     (dict(batch=3), True),
     (dict(batch=1), False), (dict(batch=4), False), (dict(m=8, n=9), False), (dict(m=4, n=5, k=6), False),
     (dict(a_layout=1), False), (dict(b_layout=2), False), (dict(c_layout=2), False),
     (dict(symmetric=1), False), (dict(dtype=1), False), (dict(op=1), False), (dict(transposed=1), True)],
)
def test_plan_serves_what_is_inside_its_box(native, change, inside):
    identity = native.publish(None, **BOX)
    assert native.lib.tg_lookup(native.problem(**{**INSIDE, **change})) == (identity if inside else -1)


def test_any_layout(native):
    identity = native.publish(None, **{**BOX, "b_layout": -1, "symmetric": -1})
    assert native.lib.tg_lookup(native.problem(**INSIDE, b_layout=2, symmetric=1)) == identity
    assert native.lib.tg_lookup(native.problem(**INSIDE, a_layout=1)) == -1


def test_work_bounds_do_not_overflow(native):
    identity = native.publish(None, work_lo=1e30)
    assert native.lib.tg_lookup(native.problem(m=2**40, n=2**40, k=2**40)) == identity
    assert native.lib.tg_lookup(native.problem(m=2**10, n=2**10, k=2**10)) == -1


def test_bad_plans_and_problems_are_refused(native):
    assert native.lib.tg_publish(native.plan(None, dtype=native.lib.TG_NDTYPES)) == -1
    assert native.lib.tg_publish(native.plan(None, op=-1)) == -1
    assert native.lib.tg_lookup(native.problem(dtype=native.lib.TG_NDTYPES)) == -1
    assert native.lib.tg_served(99) == native.lib.tg_declined(99) == 0


def test_unpublish_and_clear(native):
    ids = [native.publish(None, m_lo=m, m_hi=m) for m in range(5)]
    find = [lambda m=m: native.lib.tg_lookup(native.problem(m=m)) for m in range(5)]
    native.lib.tg_unpublish(ids[1])
    native.lib.tg_unpublish(12345)
    assert [f() for f in find] == [ids[0], -1, *ids[2:]]
    again = native.publish(None, m_lo=1, m_hi=1)
    assert find[1]() == again and find[4]() == ids[4]
    native.lib.tg_clear_plans()
    assert [f() for f in find] == [-1] * 5


def test_full_table_forgets_the_oldest(native):
    ids = [native.publish(None, m_lo=m, m_hi=m) for m in range(262)]
    found = [native.lib.tg_lookup(native.problem(m=m)) for m in range(262)]
    assert found == [-1] * 6 + ids[6:]
    again = native.publish(None, m_lo=0, m_hi=0)
    assert native.lib.tg_lookup(native.problem(m=0)) == again
    assert native.lib.tg_lookup(native.problem(m=6)) == -1


def test_publishing_again_takes_no_second_slot(native):
    for _ in range(100):
        native.publish(None, m_lo=1, m_hi=1, id=7)
    others = [native.publish(None, m_lo=m, m_hi=m) for m in range(2, 257)]
    assert native.lib.tg_lookup(native.problem(m=1)) == 7
    assert [native.lib.tg_lookup(native.problem(m=m)) for m in range(2, 257)] == others
