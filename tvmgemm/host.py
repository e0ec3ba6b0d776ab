"""What this machine offers to this process: instruction sets, caches, cores.

Instruction sets come from CPUID and the operating system's state, caches from sysfs, cores from the affinity
mask and the cgroup quota; never from a CPU's model name, which virtual machines make up. Every detection
function takes the folders it reads as arguments.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .family.isa import Isa

_KIB, _MIB, _GIB = 1 << 10, 1 << 20, 1 << 30
_ARCH_NAMES = {"amd64": "x86_64", "AMD64": "x86_64", "arm64": "aarch64"}


@dataclass(frozen=True)
class Cache:
    """One level of the data cache as one core sees it.

    ``bytes`` in all, ``ways`` of associativity, bytes of a ``line``, ``shared_by`` so many logical CPUs.
    """

    level: int
    bytes: int
    ways: int
    line: int = 64
    shared_by: int = 1

    @property
    def sets(self) -> int:
        """Number of sets: bytes / (ways * line)."""
        return max(1, self.bytes // (self.ways * self.line))


#: What is assumed of a level that the system hides or misstates: small enough to be harmless on any machine.
DEFAULT_CACHES = {1: Cache(1, 32 * _KIB, 8), 2: Cache(2, 1 * _MIB, 16), 3: Cache(3, 8 * _MIB, 16)}

#: Sizes that exist, per level, from the smallest to the largest, with room. Anything else is a hypervisor's
#: fiction.
_CREDIBLE_BYTES = {1: (8 * _KIB, 512 * _KIB), 2: (64 * _KIB, 64 * _MIB), 3: (256 * _KIB, 4 * _GIB)}
_CREDIBLE_WAYS = 32
_CREDIBLE_LINES = (16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Host:
    """The machine as this process may use it.

    ``arch``: ``"x86_64"`` or ``"aarch64"`` (others have no kernels). ``features``: names as in Linux's
    cpuinfo that the CPU and the operating system both allow. ``caches``: what was found and is credible; ask
    ``cache(level)``. ``cores``: how many may run at once. ``model``: the CPU's marketing name, for people
    only.
    """

    arch: str
    features: frozenset[str]
    caches: tuple[Cache, ...]
    cores: int
    model: str = ""

    def isa(self, cap: str | None = None, dtype: str = "float32", arithmetic: str | None = None) -> Isa | None:
        """The widest instruction set with kernels for ``dtype`` whose features are all present and which is not wider
        than ``cap``; of levels whose kernels are the same, unless another arithmetic is forced, the narrowest, so that
        machines share them. ``arithmetic``: the widest with such kernels that sum products in that way.

        ``cap`` is a name of ``family.isa.ISAS``; one of another architecture says nothing about this one and
        caps nothing. None when this machine has no such instruction set.
        """
        from .family.arithmetic import WAYS, adds_nothing
        from .family.isa import ISAS
        from .family.tiles import TILES

        ours = [isa for isa in ISAS.values() if isa.arch == self.arch]  # narrow to wide
        if cap is not None and ISAS[cap].arch == self.arch:
            ours = ours[: ours.index(ISAS[cap]) + 1]
        usable = [isa for isa in ours if isa.requires <= self.features and (isa.name, dtype) in TILES]
        usable = [isa for isa in usable if arithmetic is None or arithmetic in WAYS[isa.name][dtype]]
        while arithmetic is None and len(usable) > 1 and adds_nothing(usable[-2], usable[-1], dtype):
            usable.pop()
        return usable[-1] if usable else None

    def cache(self, level: int) -> Cache:
        """The cache of ``level`` 1, 2 or 3; a safe default where the system shows none that is credible."""
        for cache in self.caches:
            if cache.level == level:
                return cache
        return DEFAULT_CACHES[level]


@lru_cache
def host() -> Host:
    """This machine, read once per process."""
    affinity = read_affinity()
    return Host(
        arch=_ARCH_NAMES.get(os.uname().machine, os.uname().machine),
        features=read_features(),
        caches=read_caches(cpu=min(affinity)),
        cores=count_cores(affinity, read_cpu_quota()),
        model=read_model(),
    )


def read_features() -> frozenset[str]:
    """What CPUID (aarch64: the auxiliary vector) shows and the operating system's saved state allows."""
    from ._native import ffi, lib

    size = 4096
    text = ffi.new("char[]", size)
    lib.tg_cpu_features(text, size)
    return frozenset(ffi.string(text).decode("ascii").split())


def read_caches(sysfs: str = "/sys/devices/system/cpu", cpu: int = 0) -> tuple[Cache, ...]:
    """The credible data and unified caches of ``cpu``, levels 1 to 3, in order; () where sysfs shows none."""
    folder = f"{sysfs}/cpu{cpu}/cache"
    try:
        indices = [name for name in os.listdir(folder) if name.startswith("index")]
    except OSError:
        return ()
    found: dict[int, Cache] = {}
    for index in sorted(indices):
        cache = _read_cache(f"{folder}/{index}")
        if cache is not None:
            found.setdefault(cache.level, cache)
    if 1 in found and 2 in found and found[2].bytes <= found[1].bytes:
        del found[2]  # no L2 is smaller than the L1 in front of it
    return tuple(found[level] for level in sorted(found))


def _read_cache(folder: str) -> Cache | None:
    if _read(f"{folder}/type").lower() not in ("data", "unified"):
        return None
    level, size = _number(_read(f"{folder}/level")), _number(_read(f"{folder}/size"))
    low, high = _CREDIBLE_BYTES.get(level, (1, 0))
    if not low <= size <= high:
        return None
    line = _number(_read(f"{folder}/coherency_line_size"))
    if line not in _CREDIBLE_LINES:
        line = 64
    ways = _number(_read(f"{folder}/ways_of_associativity"))
    if not 1 <= ways <= _CREDIBLE_WAYS:
        ways = DEFAULT_CACHES[level].ways
    return Cache(level, size, ways, line, max(1, len(_cpu_list(_read(f"{folder}/shared_cpu_list")))))


def read_affinity() -> frozenset[int]:
    """The logical CPUs that this process may run on; never empty."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0)) or frozenset({0})
    return frozenset(range(os.cpu_count() or 1))


def count_cores(affinity: Collection[int], quota: float | None) -> int:
    """Threads that can run at once: the affinity mask, and no more than the quota rounded up; at least 1."""
    if quota is None:
        return max(1, len(affinity))
    return max(1, min(len(affinity), int(-(-quota // 1))))


def read_cpu_quota(proc: str = "/proc/self", root: str = "") -> float | None:
    """CPUs that the cgroups of this process grant, the least of all levels, as quota / period; None: no
    limit.

    ``proc`` holds ``cgroup`` and ``mountinfo``; ``root`` is put before every mount point. Both versions are
    read, because a machine may mount both and only one of them limits.
    """
    limits = []
    mounts = _cgroup_mounts(_read(f"{proc}/mountinfo"))
    for line in _read(f"{proc}/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            mount, limit = mounts.get("v2"), _v2_limit
        elif "cpu" in controllers.split(","):
            mount, limit = mounts.get("v1"), _v1_limit
        else:
            continue
        if mount is not None:
            limits += [limit(root + folder) for folder in _levels(*mount, path)]
    return min((limit for limit in limits if limit is not None), default=None)


def _cgroup_mounts(mountinfo: str) -> dict[str, tuple[str, str]]:
    """``{"v1" or "v2": (mount point, the cgroup that is mounted there)}``; see proc(5), mountinfo."""
    mounts: dict[str, tuple[str, str]] = {}
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        columns, kinds = left.split(), right.split()
        if len(columns) < 5 or len(kinds) < 3:
            continue
        if kinds[0] == "cgroup2":
            version = "v2"
        elif kinds[0] == "cgroup" and "cpu" in kinds[2].split(","):
            version = "v1"
        else:
            continue
        mounts.setdefault(version, (columns[4].replace("\\040", " "), columns[3].replace("\\040", " ")))
    return mounts


def _levels(mount_point: str, mounted: str, path: str) -> list[str]:
    """The folders of a cgroup and of all above it. In a container, ``path`` may be given from the host's root
    or lie outside what is mounted; the mount point itself is always the container's own group."""
    inside = path.removeprefix(mounted) if mounted != "/" else path
    names = [name for name in inside.split("/") if name and name != ".."]
    return ["/".join([mount_point, *names[:depth]]) for depth in range(len(names) + 1)]


def _v2_limit(folder: str) -> float | None:
    quota, _, period = _read(f"{folder}/cpu.max").partition(" ")  # "max 100000" or "150000 100000"
    return _ratio(quota, period)


def _v1_limit(folder: str) -> float | None:
    return _ratio(_read(f"{folder}/cpu.cfs_quota_us"), _read(f"{folder}/cpu.cfs_period_us"))  # quota -1: none


def _ratio(quota: str, period: str) -> float | None:
    numerator, denominator = _number(quota), _number(period)
    return numerator / denominator if numerator > 0 and denominator > 0 else None


def read_model(cpuinfo: str = "/proc/cpuinfo") -> str:
    """The CPU's name, or "". Reads the first page only: the whole file takes long where there are many
    CPUs."""
    for line in _read(cpuinfo, 4096).splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model", "cpu model"):
            return value.strip()
    return ""


def _read(path: str, limit: int = 1 << 20) -> str:
    """The text of a file of /proc or /sys, "" when it cannot be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        chunks = []
        while limit > 0 and (chunk := os.read(descriptor, min(limit, 1 << 16))):
            chunks.append(chunk)
            limit -= len(chunk)
        return b"".join(chunks).decode("utf-8", "replace").strip()
    except OSError:
        return ""
    finally:
        os.close(descriptor)


def _number(text: str) -> int:
    """``"32K"`` -> 32768; 0 for what is not a number."""
    unit = {"K": _KIB, "M": _MIB, "G": _GIB}.get(text[-1:].upper(), 1)
    digits = text if unit == 1 else text[:-1]
    try:
        return int(digits) * unit
    except ValueError:
        return 0


def _cpu_list(text: str) -> set[int]:
    """``"0-3,8"`` -> {0, 1, 2, 3, 8}; what is not understood is left out."""
    cpus: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if first.isdecimal() and (last or first).isdecimal() and int(last or first) < 1 << 16:
            cpus.update(range(int(first), int(last or first) + 1))
    return cpus
