"""Which loop of a kernel, or the products of a stack, tasks share out, and to how many, for each rule of the planner."""

from __future__ import annotations

import math
from dataclasses import replace

from .blocking import steps_of
from .boxes import STACK, Rule, possible
from .family.arithmetic import arithmetic_of, lanes_of, rounds_once
from .family.tiles import IN_PLACE, PACKED, TINY, UNBLOCKED
from .family.variants import VARIANTS
from .kinds import Kind

#: m.n.k from which a product is worth sharing out to two tasks whose threads are awake, half of it for each further one.
#: (The pool does not wake them for so little: native/pool.c.)
PARALLEL_WORK = 1 << 18

#: m.n.k of one product -> length of the stack from which sharing it out pays, as above. A product of less than the first
#: bound takes as long as one of the bound; from the last on, what matters is that the shares come out even.
STACK_LENGTHS = ((0.0, 512), (16.0**3, 64), (4 * 16.0**3, 16), (16 * 16.0**3, 8))

#: Micro-tiles of rows per task from which A3B2C0 shares out rows: each task then packs blocks of its own, and none waits
#: for another.
TALL = 16

#: m up to which a B that no cache holds is read for too few products: each element of it once, into registers.
FLAT = 64


def shared_out(rule: Rule, kind: Kind) -> list[Rule]:
    """The rule as it is, and before it the rules for problems that are worth sharing out."""
    loop = kind.options.parallel_loop
    if loop is not None:
        parallel = "" if loop == "none" else loop
        tasks = kind.threads if parallel else 1
        return [replace(rule, parallel=parallel, tasks=tasks, reason=f"{rule.reason}; parallel loop {loop} is forced")]
    found = stack_shared_out(rule, kind.threads)
    for tasks in task_counts(kind.threads):
        heavy = replace(rule, box=rule.box.clipped("work", tasks * PARALLEL_WORK / 2, math.inf), tasks=tasks)
        found += [each for each in _shares(heavy, kind) if possible(each.box)]
    return [*found, rule]


def stack_shared_out(rule: Rule, threads: int) -> list[Rule]:
    """The rule for stacks of which each task has enough products."""
    if threads == 1:
        return []
    found = []
    for (low, length), (above, _) in zip(STACK_LENGTHS, (*STACK_LENGTHS[1:], (math.inf, 0))):
        length = max(length, 4 * threads)
        box = rule.box.clipped("work", low, math.nextafter(above, 0.0)).clipped("batch", length, math.inf)
        why = f"{rule.reason}; stacks of at least {length} are shared out"
        found.append(replace(rule, box=box, parallel=STACK, tasks=threads, reason=why))
    return found


def task_counts(threads: int) -> list[int]:
    """How many tasks a product may have: one per thread, or a fourth, ... of that if there is not enough for all to do."""
    counts = []
    while threads > 1:
        counts.append(threads)
        threads //= 4
    return counts


def _shares(rule: Rule, kind: Kind) -> list[Rule]:
    """The rule with a loop whose iterations the tasks can share, first choice first: each box has a share for everybody."""
    assert rule.variant is not None  # of what is left to NumPy nothing is shared out
    variant, tasks, (mr, nr) = VARIANTS[rule.variant], rule.tasks, kind.tiles[PACKED]

    def at_least(of: Rule, side: str, low: float, loop: str, what: str) -> Rule:
        box = of.box.clipped(side, low, math.inf)
        return replace(of, box=box, parallel=loop, reason=f"{of.reason}; {what} are shared out")

    rows = at_least(rule, "m", tasks * mr, "ic", "rows")
    columns = at_least(rule, "n", tasks * nr, "jc", "columns")
    if variant.resident != "C":
        return [columns, rows]
    if rule.tile is UNBLOCKED:
        low = replace(rule, box=rule.box.clipped("m", 0, FLAT))  # B is most of what is read, and should be read once
        first = at_least(low, "n", tasks * nr, "jc", "columns")
        if rule.packing == "b":  # a copy of its own for each task that shares rows, so each should have enough of them
            first = at_least(rule, "m", tasks * FLAT, "ic", "rows")
        found = [first, columns, rows] if rule.packing == "b" else [first, rows, columns]
    else:
        found = [at_least(rule, "m", TALL * tasks * mr, "ic", "rows")] if variant.outer[0] == "ic" else []
        found.append(at_least(rule, "mn", float(tasks * mr * nr), variant.outer[-1], "tiles"))
    # Few elements of C, each a long sum: blocks of k, by a kernel that has loops over blocks.
    # Sums that are not complete have nowhere to be added up where they are rounded once.
    isa, dtype = kind.isa.name, kind.problem.dtype
    if rounds_once(dtype):
        return found
    how, lanes = arithmetic_of(isa, dtype, "ab"), lanes_of(isa, dtype, "none")
    kc = steps_of(isa, dtype, how, kind.host) * how.group
    for tile, widest in ((TINY, lanes), (IN_PLACE, math.inf)) if rule.tile is UNBLOCKED else ((rule.tile, math.inf),):
        deep = replace(rule, tile=tile, box=rule.box.clipped("n", 0, widest))
        found.append(at_least(deep, "k", tasks * kc, "pc", "blocks of k"))
    return found
