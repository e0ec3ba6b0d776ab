"""What ``python -m tvmgemm tune`` found out about this machine: a file that people can read, and that the planner uses.

One file per kind of machine (``machine_key``) and version of the generator lies in the kernel cache's folder,
``tuned-<machine>-<generator>.json``. Each of its entries is one product that was measured: its sizes and layouts, the
number of threads, who won, by how much. An entry holds for the products in a box around the measured one: the same
operation, layouts, dtype and number of threads, m, n and k within a sixteenth of what was measured, stacks of half to
twice as many matrices (and no stack if none was measured).

A file that cannot be trusted or understood is set aside with one warning: the planner then decides as if it were not
there. Nothing here raises on the path of a call.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from typing import TYPE_CHECKING

from . import log
from .blocking import BlockSizes, blocks_of
from .boxes import Box
from .family.isa import ISAS
from .family.validity import check, unsuitable
from .forks import once
from .host import Host
from .problem import DTYPES, LAYOUT_NAMES, OPS, Problem
from .spec import STEPS, KernelSpec
from .store.content import rename_as_bad, sound_content, write_whole
from .store.key import KERNEL_ABI, KernelKey, generator_digest

if TYPE_CHECKING:
    from .store import Store

#: Version of the file's format.
FORMAT = 2

PREFIX = "tuned-"

#: An entry holds for sizes within this fraction of those measured.
REACH = 16

#: Nobody measures so much; a larger file is not one of ours.
_LIMIT = 4 << 20

#: Blocks may be so many times those of the model, which bounds a thread's scratch memory.
_BLOCK_FACTOR = 8

#: Who can win: a kernel of ours that the planner would not have chosen, NumPy's own loop, or the planner's choice.
MEMBER, NUMPY, PLANNER = "member", "numpy", "planner"


@dataclass(frozen=True)
class Tuned:
    """One measured product.

    ``problem`` is what the inner loop made of a call. ``winner`` is ``MEMBER`` (then ``spec``, ``mc``, ``nc``, ``tasks``,
    ``shares_stack`` say which, as in a ``Plan``), ``NUMPY`` or ``PLANNER``. ``ratio`` is the
    planner's choice's time over the winner's, median and quartiles; ``over`` names the planner's choice, ``measured``
    the day (ISO 8601). ``threads`` is the number that products may use, ``isa`` the instruction set of the kernels.
    """

    problem: Problem
    threads: int
    isa: str
    winner: str
    over: str
    measured: str
    ratio: tuple[float, float, float] = (1.0, 1.0, 1.0)
    spec: KernelSpec | None = None
    mc: int = 0
    nc: int = 0
    tasks: int = 1
    shares_stack: bool = False

    # A miss in the table of plans asks all entries, so what it asks for is computed once.

    @once
    def point(self) -> Box:
        """The sizes that were measured."""
        return self._around(0)

    @once
    def box(self) -> Box:
        """The sizes that the entry decides where nothing nearer was measured."""
        return self._around(1)

    def _around(self, steps: int) -> Box:
        sides = ((side, getattr(self.problem, side)) for side in ("m", "n", "k"))
        bounds = {side: (size - steps * (size // REACH), size + steps * (size // REACH)) for side, size in sides}
        batch = self.problem.batch
        stacks = (max(2, batch // 2), 2 * batch) if steps and batch > 1 else (batch, batch)
        return Box(batch=stacks, **bounds)

    @property
    def subject(self) -> tuple:
        """What was measured: a later measurement of the same replaces this one."""
        return subject_of(self.problem, self.threads, self.isa)

    def applies(self, problem: Problem, isa: str, threads: int) -> bool:
        """Whether it has something to say about problems of this kind, whatever their sizes."""
        return (self.isa, self.threads) == (isa, threads) and self.problem.kind == problem.kind and self.winner != PLANNER

    def blocks(self, host: Host) -> BlockSizes | None:
        """The block sizes of the winner. kc is the host's, which decides the order of summation."""
        return None if self.spec is None else BlockSizes(self.mc, self.nc, blocks_of(self.spec, host).kc)

    @property
    def reason(self) -> str:
        """Why the planner takes it, in words."""
        p, (median, low, high) = self.problem, self.ratio
        size = f"{p.batch}x" * (p.batch > 1) + f"{p.m}x{p.n}x{p.k}"
        return f"tuned: {median:.2f} [{low:.2f}..{high:.2f}] times as fast as {self.over} at {size}, measured {self.measured}"


def subject_of(problem: Problem, threads: int, isa: str) -> tuple:
    """What entries that say the same thing have in common. The planner makes no difference between a product and the
    exchanged form of another."""
    return replace(problem, transposed=False), threads, isa


def load(store: Store, host: Host) -> tuple[Tuned, ...]:
    """The entries of this machine's file in the store's folder, () where there is none. Never raises."""
    for folder in store.folders:
        file = os.path.join(folder, _name(host))
        try:
            return _parsed(sound_content(file, _LIMIT), host)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                log.warn_once(file, f"the tuning results in {file} cannot be read ({error.strerror})")
        except Exception as error:  # a file may hold anything, and a call must not fail for it
            what = f"{error} is missing or unknown" if isinstance(error, KeyError) else str(error)
            log.warn_once(
                file,
                f"the tuning results in {file} are set aside, and the planner decides without them: {what}. "
                "Run python -m tvmgemm tune to make new ones.",
            )
            rename_as_bad(file)
    return ()


def save(store: Store, host: Host, entries: Iterable[Tuned]) -> None:
    """Add ``entries`` to this machine's file, in place of earlier ones about the same.

    What another process wrote meanwhile stays. Files of this machine that an earlier generator left are removed. OSError
    when it cannot be written.
    """
    folder = store.folder
    if folder is None:
        raise OSError(errno.EACCES, "the kernel cache's folder can't be used (see the warning)")
    with store.lock(machine_key(host), timeout=10.0):
        merged = {entry.subject: entry for entry in (*load(store, host), *entries)}
        write_whole(path(store, host), _text(merged.values(), host).encode())
    own = _name(host)
    for name in os.listdir(folder):
        if name.startswith(own.rpartition("-")[0] + "-") and name != own and name.endswith(".json"):
            os.unlink(os.path.join(folder, name))


@cache
def machine_key(host: Host) -> KernelKey:
    """What makes two machines equal to the tuner: the CPU, its instruction sets and caches."""
    usable = [isa.name for isa in ISAS.values() if isa.arch == host.arch and isa.requires <= host.features]
    caches = (host.cache(level) for level in (1, 2, 3))
    return KernelKey(
        (
            ("cpu", host.model or host.arch),
            ("isas", " ".join(usable)),
            ("caches", ", ".join(f"L{c.level} {c.bytes} bytes {c.ways} ways" for c in caches)),
        )
    )


def path(store: Store, host: Host) -> str:
    """Where ``save`` keeps this machine's entries."""
    return os.path.join(store.folder or "", _name(host))


def _name(host: Host) -> str:
    return f"{PREFIX}{machine_key(host).digest}-{_generator()}.json"


def _generator() -> str:
    return f"{KERNEL_ABI}.{generator_digest()[:16]}"


def _text(entries: Iterable[Tuned], host: Host) -> str:
    lines = [json.dumps(_to_json(entry)) for entry in sorted(entries, key=_order)]
    head = {"format": FORMAT, "machine": dict(machine_key(host).parts), "generator": _generator()}
    start = json.dumps(head, indent=1)[:-2]  # one line per entry: a file that can be read, and compared by line
    return start + ',\n "entries": [\n  ' + ",\n  ".join(lines) + "\n ]\n}\n"


def _order(entry: Tuned) -> tuple:
    p = entry.problem
    return p.dtype, p.op, entry.isa, entry.threads, p.a_layout, p.b_layout, p.c_layout, p.batch, p.m, p.n, p.k


def _to_json(entry: Tuned) -> dict:
    defaults = {field.name: field.default for field in fields(KernelSpec)}
    problem = {name: value for name, value in asdict(entry.problem).items() if value != getattr(_PLAIN, name)}
    result = {"problem": problem, "threads": entry.threads, "isa": entry.isa, "winner": entry.winner}
    if entry.spec is not None:
        result["kernel"] = {name: value for name, value in entry.spec.to_dict().items() if value != defaults[name]}
        result |= {"mc": entry.mc, "nc": entry.nc, "tasks": entry.tasks, "shares_stack": entry.shares_stack}
    return result | {"ratio": [round(x, 3) for x in entry.ratio], "over": entry.over, "measured": entry.measured}


_PLAIN = Problem("", 0, 0, 0)


def _parsed(content: bytes, host: Host) -> tuple[Tuned, ...]:
    """The entries of a file; raises ValueError, TypeError, KeyError and the like for what is not one of ours."""
    data = json.loads(content)
    if data["format"] != FORMAT:
        raise ValueError(f"its format is {data['format']!r}, this version reads {FORMAT}")
    if data["machine"] != dict(machine_key(host).parts) or data["generator"] != _generator():
        raise ValueError("it is about another machine or another version of the generator than its name says")
    return tuple(_entry(fields, host) for fields in data["entries"])


def _entry(data: Mapping, host: Host) -> Tuned:
    problem = Problem(**data["problem"])
    entry = Tuned(
        problem,
        threads=_whole(data["threads"], 1),
        isa=str(data["isa"]),
        winner=data["winner"],
        over=str(data["over"]),
        measured=str(data["measured"]),
        ratio=_ratio(data["ratio"]),
        spec=KernelSpec.from_dict(data["kernel"]) if "kernel" in data else None,
        mc=_whole(data.get("mc", 0), 0),
        nc=_whole(data.get("nc", 0), 0),
        tasks=_whole(data.get("tasks", 1), 1),
        shares_stack=_flag(data.get("shares_stack", False)),
    )
    for name in ("m", "n", "k", "batch"):
        _whole(getattr(problem, name), 1)
    for name in ("transposed", "symmetric", "gemv", "small_gemm"):
        _flag(getattr(problem, name))
    known = all(getattr(problem, f"{x}_layout") in LAYOUT_NAMES for x in "abc")
    if problem.dtype not in DTYPES or problem.op not in OPS or (problem.op == "gemm" and problem.batch > 1) or not known:
        raise ValueError(f"an entry is about no product of a kind that is tuned: {data['problem']}")
    if entry.winner not in (MEMBER, NUMPY, PLANNER) or (entry.winner == MEMBER) != (entry.spec is not None):
        raise ValueError(f"an entry has no winner: {entry.winner!r}")
    if entry.spec is not None:
        _check_member(entry, entry.spec, host)
    return entry


def _check_member(entry: Tuned, spec: KernelSpec, host: Host) -> None:
    """Raise ValueError for a kernel that does not exist here, serves another problem, or would need too much memory."""
    if (spec.dtype, spec.isa, spec.op) != (entry.problem.dtype, entry.isa, entry.problem.op) or spec.isa not in ISAS:
        raise ValueError(f"an entry's kernel is of another kind than its problem: {spec}")
    if (spec.step, spec.without, spec.shape) != (STEPS[-1], (), None) or spec.symmetric > entry.problem.symmetric:
        raise ValueError(f"an entry's kernel is none that the planner uses for its problem: {spec}")
    check(spec)
    if objection := unsuitable(spec, entry.problem):
        raise ValueError(f"an entry's kernel cannot take its problem: {objection}")
    if entry.shares_stack and (spec.parallel or entry.problem.batch == 1):
        raise ValueError(f"an entry shares out a stack of {entry.problem.batch} and the loop {spec.parallel!r}")
    if entry.tasks > (entry.threads if spec.parallel or entry.shares_stack else 1):
        raise ValueError(f"an entry has {entry.tasks} tasks for {entry.threads} threads and the loop {spec.parallel!r}")
    model = blocks_of(spec, host)
    for name, size, tile in (("mc", entry.mc, spec.mr or 1), ("nc", entry.nc, spec.nr or 1)):
        if size < 1 or size % tile or size > _BLOCK_FACTOR * getattr(model, name):
            raise ValueError(f"an entry has {name}={size}: a positive multiple of {tile} is needed, of at most "
                             f"{_BLOCK_FACTOR} times {getattr(model, name)}")  # fmt: skip


def _whole(value: object, low: int) -> int:
    if type(value) is not int or not low <= value < 2**62:
        raise ValueError(f"an entry has {value!r} where a whole number from {low} on is needed")
    return value


def _flag(value: object) -> bool:
    if type(value) is not bool:
        raise ValueError(f"an entry has {value!r} where true or false is needed")
    return value


def _ratio(values: Sequence) -> tuple[float, float, float]:
    if len(values) != 3:
        raise ValueError(f"an entry's ratio is {values!r}: a median and two quartiles are needed")
    median, low, high = map(float, values)
    return median, low, high
