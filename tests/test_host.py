"""Host: what detection makes of true, missing and absurd /sys and /proc trees."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tvmgemm import host as host_module
from tvmgemm.family.isa import ISAS
from tvmgemm.family.tiles import TILES
from tvmgemm.host import Cache, Host, count_cores, read_affinity, read_caches, read_cpu_quota, read_model

KIB, MIB = 1 << 10, 1 << 20


def write(root, files):
    for path, text in files.items():
        file = root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def cache_index(level, kind, size, ways=8, line=64, shared="0"):
    return {
        "level": level,
        "type": kind,
        "size": size,
        "ways_of_associativity": ways,
        "coherency_line_size": line,
        "shared_cpu_list": shared,
    }


def sysfs(root, indices, cpu=0):
    for number, index in enumerate(indices):
        write(root, {f"cpu{cpu}/cache/index{number}/{name}": f"{value}\n" for name, value in index.items()})
    return str(root)


def host_with(caches=(), features=(), arch="x86_64"):
    return Host(arch, frozenset(features), tuple(caches), cores=2)


def test_caches_of_a_server(tmp_path):
    root = sysfs(
        tmp_path,
        [
            cache_index(1, "Data", "48K", ways=12, shared="0,56"),
            cache_index(1, "Instruction", "32K"),
            cache_index(2, "Unified", "2048K", ways=16, shared="0,56"),
            cache_index(3, "Unified", "107520K", ways=15, shared="0-27,56-83"),
        ],
    )
    assert read_caches(root) == (
        Cache(1, 48 * KIB, 12, 64, 2),
        Cache(2, 2 * MIB, 16, 64, 2),
        Cache(3, 105 * MIB, 15, 64, 56),
    )
    assert read_caches(root)[0].sets == 64


def test_caches_of_another_cpu_and_without_l3(tmp_path):
    root = sysfs(
        tmp_path, [cache_index(1, "Data", "64K", ways=4), cache_index(2, "Unified", "1M", ways=8)], cpu=5
    )
    assert read_caches(root, cpu=0) == ()
    found = host_with(read_caches(root, cpu=5))
    assert [found.cache(level).bytes for level in (1, 2, 3)] == [64 * KIB, 1 * MIB, 8 * MIB]


@pytest.mark.parametrize("size", ["0K", "", "none", "-32K", "999999999M", "1K"])
@pytest.mark.parametrize("level", [1, 2, 3])
def test_absurd_sizes_become_defaults(tmp_path, level, size):
    caches = read_caches(sysfs(tmp_path, [cache_index(level, "Unified", size)]))
    assert caches == ()
    assert host_with(caches).cache(level) == host_module.DEFAULT_CACHES[level]


@pytest.mark.parametrize("ways, line", [(0, 0), (65535, 3), ("", ""), (-1, -64), ("x", 4096)])
def test_absurd_ways_and_lines_become_defaults(tmp_path, ways, line):
    caches = read_caches(
        sysfs(tmp_path, [cache_index(2, "Unified", "512K", ways=ways, line=line, shared="")])
    )
    assert caches == (Cache(2, 512 * KIB, 16, 64, 1),)


def test_l2_no_larger_than_l1_is_not_believed(tmp_path):
    root = sysfs(tmp_path, [cache_index(1, "Data", "128K"), cache_index(2, "Unified", "128K")])
    assert host_with(read_caches(root)).cache(2).bytes == 1 * MIB


@given(st.text(max_size=12), st.text(max_size=12), st.text(max_size=12))
def test_detection_survives_any_text(size, ways, cpus):
    assert host_module._number(size) is not None
    assert isinstance(host_module._number(ways), int)
    assert all(cpu >= 0 for cpu in host_module._cpu_list(cpus))


V2 = "31 23 0:28 / /sys/fs/cgroup rw,relatime shared:4 - cgroup2 cgroup2 rw\n"
V1 = "32 31 0:29 {} /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"


def quota(root, cgroup, mountinfo, files):
    write(root, {"proc/cgroup": cgroup, "proc/mountinfo": mountinfo, **files})
    return read_cpu_quota(str(root / "proc"), str(root))


def test_v2_quota(tmp_path):
    assert quota(tmp_path, "0::/", V2, {"/sys/fs/cgroup/cpu.max": "150000 100000"}) == 1.5


def test_v2_takes_the_least_of_all_levels(tmp_path):
    files = {
        "/sys/fs/cgroup/a/cpu.max": "200000 100000",
        "/sys/fs/cgroup/a/b/cpu.max": "max 100000",
        "/sys/fs/cgroup/a/b/c/cpu.max": "800000 100000",
    }
    assert quota(tmp_path, "0::/a/b/c", V2, files) == 2.0


def test_v2_no_limit(tmp_path):
    assert quota(tmp_path, "0::/a", V2, {"/sys/fs/cgroup/a/cpu.max": "max 100000"}) is None


def test_v1_quota(tmp_path):
    files = {
        "/sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "250000",
        "/sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000",
        "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1",
        "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
    }
    assert quota(tmp_path, "4:memory:/x\n3:cpu,cpuacct:/job\n", V1.format("/"), files) == 2.5


def test_v1_in_a_container_whose_path_is_the_hosts(tmp_path):
    """Without a cgroup namespace the path is given from the host's root, and only its end is mounted."""
    files = {
        "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "100000",
        "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "50000",
    }
    assert quota(tmp_path, "3:cpu,cpuacct:/docker/abc\n", V1.format("/docker/abc"), files) == 2.0


def test_hybrid_reads_both_versions(tmp_path):
    mountinfo = V1.format("/") + V2.replace("/sys/fs/cgroup ", "/sys/fs/cgroup/unified ")
    files = {
        "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "300000",
        "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
        "/sys/fs/cgroup/unified/cpu.max": "max 100000",
    }
    assert quota(tmp_path, "1:cpu,cpuacct:/\n0::/\n", mountinfo, files) == 3.0


@pytest.mark.parametrize("text", ["", "max", "0 0", "100000 0", "-5 100000", "what is this"])
def test_unreadable_limits_do_not_limit(tmp_path, text):
    assert quota(tmp_path, "0::/../..", V2, {"/sys/fs/cgroup/cpu.max": text}) is None


def test_no_proc_at_all(tmp_path):
    assert read_cpu_quota(str(tmp_path / "nothing"), str(tmp_path)) is None


@pytest.mark.parametrize(
    "cpus, limit, cores", [(48, 2.0, 2), (48, 1.5, 2), (2, 16.0, 2), (4, 0.1, 1), (3, None, 3), (0, None, 1)]
)
def test_cores_are_affinity_and_quota_rounded_up(cpus, limit, cores):
    assert count_cores(range(cpus), limit) == cores


def test_affinity_of_this_process():
    assert read_affinity() == os.sched_getaffinity(0)


X86 = [isa for isa in ISAS.values() if isa.arch == "x86_64" and (isa.name, "float32") in TILES]
ALL_X86 = frozenset().union(*(isa.requires for isa in X86))
WIDEST_X86 = X86[-1].name


@pytest.mark.parametrize(
    "arch, features, cap, name",
    [
        ("x86_64", ALL_X86, None, WIDEST_X86),
        ("x86_64", ALL_X86 | {"another"}, "x86-64-v3", "x86-64-v3"),
        ("x86_64", ALL_X86, "x86-64-v2", "x86-64-v2"),
        ("x86_64", ALL_X86 - {"fma"}, None, "x86-64-v2"),
        ("x86_64", ISAS["x86-64-v3"].requires, "x86-64-v4", "x86-64-v3"),
        ("x86_64", ALL_X86, "armv8-neon", WIDEST_X86),
        ("x86_64", frozenset(), None, None),
        ("aarch64", frozenset({"asimd", "sve"}), None, "armv8-neon"),
        ("aarch64", frozenset({"asimd"}), "x86-64-v2", "armv8-neon"),
        ("aarch64", frozenset({"asimd", "asimddp"}), None, "armv8-neon"),
        ("riscv64", frozenset({"v"}), None, None),
    ],
)
def test_widest_isa_that_all_allow(arch, features, cap, name):
    isa = host_with(features=features, arch=arch).isa(cap)
    assert (isa and isa.name) == name


def test_the_level_is_the_widest_with_kernels_of_the_dtype():
    everything = host_with(features=frozenset().union(*(isa.requires for isa in ISAS.values())), arch="x86_64")
    assert everything.isa(None, "int8").name == "x86-64-v4-amx" and everything.isa(None, "float32").name == "x86-64-v4"
    assert everything.isa("x86-64-v4-bf16", "int8").name == "x86-64-v4-vnni"
    assert everything.isa("x86-64-v4-bf16", "bfloat16").name == "x86-64-v4-bf16"
    assert everything.isa("x86-64-v4", "int8").name == "x86-64-v4"
    arm = host_with(features=ISAS["armv8-dotprod"].requires, arch="aarch64")
    assert arm.isa(None, "int8-int32").name == "armv8-dotprod" and arm.isa(None, "int16").name == "armv8-neon"
    assert everything.isa("x86-64-v3-vnni", "int8").name == "x86-64-v3-vnni"
    assert everything.isa("x86-64-v2", "float16") is None and everything.isa(None, "no such dtype") is None


def test_model_is_read_from_the_first_page(tmp_path):
    file = tmp_path / "cpuinfo"
    file.write_text("processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\n" + "flags: x\n" * 100000)
    assert read_model(str(file)) == "Some CPU @ 2 GHz"
    assert read_model(str(tmp_path / "missing")) == ""


def test_this_machine():
    pytest.importorskip("tvmgemm._native")
    here = host_module.host()
    assert here is host_module.host()
    assert 1 <= here.cores <= len(os.sched_getaffinity(0))
    assert here.cache(1).bytes < here.cache(2).bytes
    if here.arch == "x86_64":
        assert "sse4_2" in here.features
