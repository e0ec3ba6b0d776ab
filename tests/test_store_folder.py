"""The store's folder, trusted or not, and what happens when nobody can write; locks between processes."""

import errno
import multiprocessing
import os
import stat
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
from stores import KEY, SPEC, files, put, store, untouched  # noqa: F401

from tvmgemm import settings
from tvmgemm.store import Store, kernel_key, open_store, user_folder
from tvmgemm.store import folder as folder_module

# -- locks


def test_a_lock_is_exclusive_and_released(store):
    with store.lock(KEY) as first:
        assert first.held
        start = time.monotonic()
        assert not store.lock(KEY, timeout=0.1).held
        assert 0.1 <= time.monotonic() - start < 5
        assert store.lock(kernel_key(replace(SPEC, mr=5))).held
    assert store.lock(KEY).held


def test_waiting_ends_when_the_entry_is_there(store):
    with store.lock(KEY):
        put(store)
        start = time.monotonic()
        assert not store.lock(KEY, timeout=30, until=lambda: store.find(SPEC, KEY)).held
        assert time.monotonic() - start < 5


def test_a_killed_owner_leaves_no_lock(store):
    code = (
        "import fcntl, sys, time; file = open(sys.argv[1], 'w'); fcntl.flock(file, fcntl.LOCK_EX)\n"
        "print('held', flush=True); time.sleep(60)"
    )
    path = os.path.join(store.folder, f".lock-{KEY.digest}")
    with subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE) as owner:
        assert owner.stdout.readline() == b"held\n"
        assert not store.lock(KEY).held
        owner.kill()
        owner.wait()
        assert store.lock(KEY, timeout=5).held


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_without_locks_everybody_builds(store, monkeypatch, code):
    import fcntl

    def no_locks(*arguments):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with store.lock(KEY, timeout=30) as first, store.lock(KEY, timeout=30) as second:
        assert first.held and second.held


def race(folder, number, start):
    """One of several processes that find or put the same cold key, with content that differs as little as it
    can."""
    store = Store(folder)
    start.wait(10)
    for _ in range(20):
        path = store.find(SPEC, KEY)
        if path is None or number % 2:
            path = put(store, b"machine code" + bytes([number % 2]) * 50000)
        if not store.verified(path):
            os._exit(1)
    os._exit(0)


def test_eight_processes_on_one_cold_key(store):
    context = multiprocessing.get_context("fork")
    start = context.Barrier(8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork beside the threads of other tests
        workers = [context.Process(target=race, args=(store.folder, number, start)) for number in range(8)]
        for worker in workers:
            worker.start()
    for worker in workers:
        worker.join(30)
    assert [worker.exitcode for worker in workers] == [0] * 8
    assert store.verify() == [] and 1 <= len(store.entries()) <= 2
    assert not [name for name in files(store) if name.startswith(".")]


# -- folders


def test_the_folder_is_made_for_its_owner_only(tmp_path):
    store = open_store(str(tmp_path / "a" / "b"))
    assert store.folder == str(tmp_path / "a" / "b")
    assert stat.S_IMODE(os.stat(store.folder).st_mode) == 0o700
    assert store.build_folder() == store.folder
    assert os.listdir(store.folder) == []


def distrusted(tmp_path, kind):
    folder = tmp_path / "kernels"
    if kind == "file":
        folder.write_text("")
    elif kind == "link":
        (tmp_path / "real").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "real")
    elif kind == "everybody":
        folder.mkdir()
        folder.chmod(0o777)
    elif kind == "sticky":
        folder.mkdir()
        folder.chmod(0o1777)
    elif kind == "group":
        folder.mkdir()
        folder.chmod(0o770)
        if os.geteuid() == 0:
            os.chown(folder, -1, 54321)
    elif kind == "foreign":
        folder.mkdir(mode=0o700)
        os.chown(folder, 54321, -1)
    elif kind == "proc":
        return "/proc/tvmgemm"
    elif kind == "below a file":
        folder.write_text("")
        return str(folder / "deeper")
    return str(folder)


TOLD = {
    "file": "it is not a folder",
    "link": "it is a symbolic link",
    "everybody": "everybody may write it",
    "sticky": "everybody may write it",
    "group": "its group",
    "foreign": "it belongs to user 54321",
    "proc": "it cannot be made",
    "below a file": "it cannot be made",
}


@pytest.mark.parametrize("kind", TOLD)
def test_a_folder_that_cannot_be_trusted_is_reported_once_and_not_read(tmp_path, kind, monkeypatch):
    if kind in ("foreign", "group") and os.geteuid() != 0:
        pytest.skip("giving a folder away takes root")
    folder = distrusted(tmp_path, kind)
    with pytest.warns(RuntimeWarning, match=TOLD[kind]) as caught:
        store = open_store(folder)
        open_store(folder)
    assert len(caught) == 1 and "Set TVMGEMM_CACHE_DIR" in str(caught[0].message)
    path = put(store)
    assert store.find(SPEC, KEY) == path
    assert not path.startswith(folder)
    private = os.path.dirname(path)
    assert stat.S_IMODE(os.stat(private).st_mode) == 0o700 and os.stat(private).st_uid == os.geteuid()


def test_a_users_own_group_may_write(tmp_path, monkeypatch):
    """With one group per user the umask is 002, and a checkout's folder has mode 775."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels").chmod(0o775)
    monkeypatch.setattr(folder_module, "_is_own_group", lambda group: True)
    assert open_store(str(tmp_path / "kernels")).folder == str(tmp_path / "kernels")


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EDQUOT])
def test_a_folder_that_cannot_be_written_is_read_and_builds_go_elsewhere(store, monkeypatch, code):
    there = put(store)
    read_only = open_store(store.folder)
    really_open = os.open

    def failing_open(name, flags, *arguments, **keywords):
        if flags & os.O_CREAT and str(name).startswith(store.folder):
            raise OSError(code, os.strerror(code), name)
        return really_open(name, flags, *arguments, **keywords)

    monkeypatch.setattr(os, "open", failing_open)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_only.find(SPEC, KEY) == there  # all that is needed is there: nothing to report
    spec = replace(SPEC, mr=5)
    with pytest.warns(RuntimeWarning, match=f"cannot be written \\({os.strerror(code)}\\)") as caught:
        path = put(read_only, spec=spec, key=kernel_key(spec))
        put(read_only, spec=spec, key=kernel_key(spec))
    assert len(caught) == 1
    assert not path.startswith(store.folder)
    assert read_only.find(spec, kernel_key(spec)) == path
    assert read_only.lock(KEY).held


def test_a_noexec_file_system_is_not_used(tmp_path, monkeypatch):
    class Status:
        f_flag = os.ST_NOEXEC

    really = os.statvfs
    monkeypatch.setattr(
        os, "statvfs", lambda path: Status if str(path).startswith(str(tmp_path)) else really(path)
    )
    with pytest.warns(RuntimeWarning, match="noexec"):
        assert open_store(str(tmp_path / "kernels")).folder is None


def test_nowhere_to_write_is_one_clear_error(monkeypatch):
    def no_place(path, mode):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "mkdir", no_place)
    with pytest.raises(OSError, match="no private folder.*Set TVMGEMM_CACHE_DIR or TMPDIR"):
        Store(None).build_folder()
    assert Store(None).find(SPEC, KEY) is None


def test_the_private_folder_ends_with_its_process(tmp_path):
    code = (
        "import os, sys; from tvmgemm.store import Store; s = Store(None); print(s.build_folder())\n"
        "if os.fork() == 0: sys.exit(0)\n"
        "os.wait(); print(os.path.isdir(s.build_folder()))"
    )
    root = str(Path(settings.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": root, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    folder, alive = done.stdout.split()
    assert alive == "True", done.stderr
    assert folder.startswith(str(tmp_path)) and not os.path.exists(folder)


def test_user_folder_is_what_platformdirs_says(monkeypatch, tmp_path):
    platformdirs = pytest.importorskip("platformdirs")
    for value in (None, str(tmp_path), "", "relative"):
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        if value is not None:
            monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert user_folder() == platformdirs.user_cache_dir("tvmgemm", appauthor=False)


def test_without_a_home_folder_there_is_a_private_one(monkeypatch):
    monkeypatch.setenv("HOME", "~")  # what expanduser returns for a user that the system does not know
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    with pytest.warns(RuntimeWarning, match="not an absolute path"):
        assert open_store().folder is None


def test_settings_choose_the_folder(tmp_path):
    with settings.options(cache_dir=tmp_path / "chosen"):
        assert open_store().folder == str(tmp_path / "chosen")
