"""The store between processes: warm, moved, corrupted, in folders that cannot be used or written."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from pathlib import Path

import pytest
from equivalence import RUNNABLE
from processes import LINUX_WITH_KERNELS, WAIT, WITHOUT_TVM, built, entries, run, start, store  # noqa: F401

pytestmark = LINUX_WITH_KERNELS


def test_a_cold_process_builds(built):
    folder, first = built
    assert first["builds"] >= 1 and first["failed"] == 0 and first["hits"] == 0 and not first["tvm"]
    assert first["served"]["float32"] == 1 and first["declined"]["float32"] == 0
    assert len(entries(folder)) == first["builds"]
    assert not list(folder.glob(".tmp-*")) and stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_second_process_finds_it(built):
    folder, first = built
    again = run(
        "seen(value=product(), warned=caught, threads=threading.active_count())", TVMGEMM_CACHE_DIR=folder
    )
    assert again["value"] == first["value"], "not the same bits"
    assert again["builds"] == 0 and again["hits"] > 0 and not again["tvm"]
    assert again["served"]["float32"] == 1 and again["kernels"].keys() == first["kernels"].keys()
    assert again["warned"] == [] and again["threads"] == 1


def test_a_second_process_needs_no_compiler_and_no_writing(store):
    """No TVM, no linker, no permission to write: a hit needs none of them."""
    store.chmod(0o500)
    again = run(
        WITHOUT_TVM + "seen(value=product(), warned=caught)",
        TVMGEMM_CACHE_DIR=store,
        PATH="/nonexistent",
        CC=None,
    )
    assert again["served"]["float32"] == 1 and again["builds"] == 0 and again["warned"] == []


def test_touched_sources_and_moved_stores_still_hit(store, tmp_path):
    """Neither paths nor time stamps are in the key (numba/numba#10776)."""
    moved = tmp_path / "elsewhere"
    store.rename(moved)
    for entry in entries(moved):
        os.utime(entry, (1, 1))
    again = run("seen(value=product())", TVMGEMM_CACHE_DIR=moved)
    assert again["builds"] == 0 and again["hits"] > 0


def test_another_instruction_set_is_another_kernel(store):
    """A store that machines share never gives one the code of another (SIGILL:
    adoptium/adoptium-support#1507).
    """
    if len(RUNNABLE) < 2:
        pytest.skip("this CPU runs one instruction set only")
    again = run(
        "seen(value=product())", TVMGEMM_CACHE_DIR=store, TVMGEMM_MAX_ISA=RUNNABLE[1], TVMGEMM_JIT="off"
    )
    assert again["hits"] == 0 and again["declined"]["float32"] == 1


# -- folders that cannot be used


def unusable(kind: str, folder: Path) -> Path:
    """A cache folder that cannot be used, or must not be."""
    if kind == "a file":
        folder.write_text("")
    elif kind == "below a file":
        folder.write_text("")
        return folder / "kernels"
    elif kind == "everybody's":
        folder.mkdir()
        folder.chmod(0o777)
    elif kind == "a link":
        (folder.parent / "real").mkdir()
        folder.symlink_to(folder.parent / "real")
    return folder


@pytest.mark.parametrize("kind", ["a file", "below a file", "everybody's", "a link"])
def test_unusable_cache_folder(tmp_path, kind):
    """Reported once; kernels are built for this process alone, in a folder that goes with it."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    folder = unusable(kind, tmp_path / "kernels")
    said = run(
        "values = [product(), product(1)]; seen(warned=caught)", TVMGEMM_CACHE_DIR=folder, TMPDIR=temporary
    )
    assert said["served"]["float32"] == 2 and said["builds"] >= 1
    assert (
        len(said["warned"]) == 1
        and str(folder) in said["warned"][0]
        and "TVMGEMM_CACHE_DIR" in said["warned"][0]
    )
    assert list(temporary.iterdir()) == [] and not entries(tmp_path / "real")


@pytest.mark.parametrize("how", ["by its mode", "by its file system"])
def test_read_only_cache_folder(tmp_path, how):
    """An empty store that cannot be written: one warning, a private folder, right results."""
    folder = tmp_path / "kernels"
    folder.mkdir(mode=0o500)
    read_only = ""
    if how == "by its mode":
        if os.geteuid() == 0:
            pytest.skip("root may write everywhere")
    else:
        read_only = (
            "import errno; from tvmgemm.store import files\n"
            "def refuse(folder): raise OSError(errno.EROFS, os.strerror(errno.EROFS))\n"
            "files.try_writing = refuse\n"
        )
    said = run(
        read_only + "product(); product(1); seen(warned=caught)", TVMGEMM_CACHE_DIR=folder, TMPDIR=tmp_path
    )
    assert said["served"]["float32"] == 2 and said["builds"] >= 1
    assert len(said["warned"]) == 1 and str(folder) in said["warned"][0] and "written" in said["warned"][0]
    assert list(folder.iterdir()) == []


def test_no_home(tmp_path):
    """No cache folder is named and HOME is nonsense (numba/numba#1771)."""
    said = run(
        "product(); seen(warned=caught)",
        TVMGEMM_CACHE_DIR=None,
        XDG_CACHE_HOME=None,
        HOME="/proc/nothing",
        TMPDIR=tmp_path,
    )
    assert (
        said["served"]["float32"] == 1 and len(said["warned"]) == 1 and "/proc/nothing" in said["warned"][0]
    )


# -- entries that cannot be used


def corrupt(entry: Path, how: str) -> None:
    entry.chmod(0o700)
    content = entry.read_bytes()
    if how == "truncated":
        entry.write_bytes(content[: len(content) // 2])
    elif how == "empty":
        entry.write_bytes(b"")
    elif how == "one byte changed":
        middle = len(content) // 2
        entry.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    elif how == "others may write it":
        entry.chmod(0o777)
    elif how == "a link":
        (entry.parent / "target").write_bytes(content)
        entry.unlink()
        entry.symlink_to(entry.parent / "target")
    elif how == "a folder":
        entry.unlink()
        entry.mkdir()


HOW_CORRUPT = ["truncated", "empty", "one byte changed", "others may write it", "a link", "a folder"]


@pytest.mark.parametrize("how", HOW_CORRUPT)
def test_corrupted_entry_is_rebuilt(built, store, how):
    """A miss, logged once; it is rebuilt, and the same bits come out (numba/numba#10434)."""
    for entry in entries(store):
        corrupt(entry, how)
    program = f"first = product(); {WAIT}; product(1); seen(value=first)"
    process = start(program, TVMGEMM_CACHE_DIR=store, TVMGEMM_LOG="warning")
    printed, log = process.communicate(timeout=120)
    assert process.returncode == 0, log
    said = json.loads(printed.splitlines()[-1])
    assert said["value"] == built[1]["value"] and said["served"]["float32"] == 2
    assert said["builds"] >= 1 and said["hits"] == 0 and said["failed"] == 0
    lines = [line for line in log.splitlines() if "set aside" in line]
    assert lines and len(lines) == len(set(lines)) and all(".so" in line for line in lines)
    again = run("seen(value=product(), warned=caught)", TVMGEMM_CACHE_DIR=store)
    assert again["builds"] == 0 and again["hits"] > 0 and again["warned"] == [], (
        "the bad entry is still in the way"
    )


def test_entry_that_cannot_be_loaded(built, store):
    """Sound as a file, but no library of ours: it goes, and is built again."""
    for entry in entries(store):
        junk = b"this is no library"
        name = entry.name.rsplit("-", 1)[0] + f"-{hashlib.sha256(junk).hexdigest()[:16]}.so"
        entry.unlink()
        (store / name).write_bytes(junk)
        (store / name).chmod(0o700)
    said = run("seen(value=product(), warned=caught)", TVMGEMM_CACHE_DIR=store)
    assert said["value"] == built[1]["value"] and said["served"]["float32"] == 1 and said["builds"] == 1
    again = run("product(); seen(warned=caught)", TVMGEMM_CACHE_DIR=store)
    assert again["hits"] == 1 and again["builds"] == 0 and again["warned"] == []
