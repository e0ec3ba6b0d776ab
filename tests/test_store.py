"""The store: what is found, what is refused, and what happens when several processes, or nobody, can
write."""

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

from tvmgemm import log, settings
from tvmgemm.spec import KernelSpec
from tvmgemm.store import KernelKey, Store, kernel_key, open_store, user_folder
from tvmgemm.store import folder as folder_module
from tvmgemm.store.content import temporary_path
from tvmgemm.store.key import PINS, generator_digest, generator_sources

SPEC = KernelSpec("float32", "x86-64-v3", "B3A2C0", 4, 8)
KEY = kernel_key(SPEC)


@pytest.fixture(autouse=True)
def untouched(monkeypatch):
    monkeypatch.setattr(log, "_warned", set())
    monkeypatch.setattr(settings, "_current", settings.Options())
    monkeypatch.setattr(folder_module, "_private", None)


@pytest.fixture
def store(tmp_path):
    (tmp_path / "kernels").mkdir(mode=0o700)
    return Store(str(tmp_path / "kernels"))


def put(store, content=b"machine code", spec=SPEC, key=KEY):
    path = temporary_path(store.build_folder())
    Path(path).write_bytes(content)
    return store.put(spec, key, path)


def files(store):
    return sorted(os.listdir(store.folder))


# --- the key ---


def test_key_names_its_parts():
    told = KEY.explain()
    for part in (
        "schema: 1",
        "kernel abi: ",
        "generator: ",
        "apache-tvm: 0.27",
        "llvm: 22",
        "platform: ",
        "isa features: abm avx avx2",
        "spec mr: 4",
        "spec dtype: float32",
        f"digest: {KEY.digest}",
    ):
        assert part in told
    assert len(KEY.digest) == 16 and set(KEY.digest) <= set("0123456789abcdef")


@pytest.mark.parametrize(
    "field, value",
    [("dtype", "float64"), ("mr", 5), ("nr", 16), ("op", "gemm"), ("packing", "none"), ("parallel", "ic")],
)
def test_every_field_of_the_spec_changes_the_key(field, value):
    other = kernel_key(replace(SPEC, **{field: value}))
    assert other.digest != KEY.digest
    assert KEY.differences(other) == (f"spec {field}",)


def test_the_instruction_set_is_in_the_key_as_features():
    assert KEY.differences(kernel_key(replace(SPEC, isa="x86-64-v2"))) == ("isa features", "spec isa")


def test_key_knows_nothing_of_time_and_place(tmp_path):
    """The same generator somewhere else, with other time stamps, has the same digest; one changed byte
    changes it."""
    package = tmp_path / "elsewhere"
    (package / "family").mkdir(parents=True)
    for source in generator_sources():
        copy = package / ("family" if "family" in source else "") / os.path.basename(source)
        copy.write_bytes(Path(source).read_bytes())
        os.utime(copy, (0, 0))
    copies = generator_sources(str(package))
    assert len(copies) == len(generator_sources()) > 3
    assert generator_digest(copies) == generator_digest()
    (package / "family" / "one_more.py").write_text("")
    assert generator_digest(generator_sources(str(package))) != generator_digest()


def test_keys_do_not_run_together():
    assert KernelKey((("a", "b'), ('c"),)).digest != KernelKey((("a", "b"), ("c", ""))).digest


def test_pins_are_those_that_are_installed():
    pytest.importorskip("tvm", reason="TVM is only needed to build")
    from importlib.metadata import version

    assert {name: version(name) for name in PINS if name != "llvm"} == {
        k: v for k, v in PINS.items() if k != "llvm"
    }


# --- one entry ---


def test_put_and_find(store):
    path = put(store)
    assert store.find(SPEC, KEY) == path
    assert os.path.basename(path).startswith(f"{SPEC.name}-{KEY.digest}-") and path.endswith(".so")
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o700
    assert files(store) == [os.path.basename(path)]
    (entry,) = store.entries()
    assert (entry.path, entry.name, entry.key, entry.bytes) == (path, SPEC.name, KEY.digest, 12)


def test_another_key_or_spec_is_a_miss(store):
    put(store)
    assert store.find(replace(SPEC, mr=5), kernel_key(replace(SPEC, mr=5))) is None
    assert store.find(SPEC, KernelKey((*KEY.parts, ("more", "")))) is None


def test_equal_content_is_one_file(store):
    assert put(store) == put(store)
    assert len(store.entries()) == 1


def test_an_empty_library_is_not_published(store):
    with pytest.raises(ValueError, match="empty"):
        put(store, b"")
    assert store.entries() == []


def spoil_truncated(path):
    os.truncate(path, 5)


def spoil_empty(path):
    os.truncate(path, 0)


def spoil_one_bit(path):
    content = bytearray(Path(path).read_bytes())
    content[3] ^= 0x10
    Path(path).write_bytes(content)


def spoil_longer(path):
    with open(path, "ab") as file:
        file.write(b"x")


def spoil_group_may_write(path):
    os.chmod(path, 0o720)


def spoil_everybody_may_write(path):
    os.chmod(path, 0o702)


def spoil_link_to_itself_elsewhere(path):
    os.rename(path, path + ".elsewhere")
    os.symlink(path + ".elsewhere", path)


def spoil_dangling_link(path):
    os.unlink(path)
    os.symlink("/nonexistent", path)


def spoil_folder(path):
    os.unlink(path)
    os.mkdir(path)


def spoil_pipe(path):
    os.unlink(path)
    os.mkfifo(path)


SPOILS = [value for name, value in sorted(globals().items()) if name.startswith("spoil_")]


@pytest.mark.parametrize("spoil", SPOILS, ids=lambda spoil: spoil.__name__.removeprefix("spoil_"))
def test_a_bad_entry_is_set_aside_and_built_again(store, spoil, caplog):
    path = put(store)
    spoil(path)
    with caplog.at_level("WARNING", "tvmgemm"), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.find(SPEC, KEY) is None
    assert f"{path} is set aside" in caplog.text
    assert ".bad-" + os.path.basename(path) in files(store) and os.path.basename(path) not in files(store)
    assert put(store) == path
    assert store.find(SPEC, KEY) == path


def test_an_entry_that_cannot_be_loaded_can_be_set_aside(store):
    path = put(store)
    store.set_aside(path, "undefined symbol")
    store.set_aside(path, "it is gone already")
    assert store.find(SPEC, KEY) is None and files(store) == [".bad-" + os.path.basename(path)]


def test_a_foreign_owner_is_refused(store, monkeypatch):
    path = put(store)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    if os.stat(path).st_uid == 0:  # root's files are trusted by everybody
        assert store.find(SPEC, KEY) == path
        os.chown(path, 54321, -1)
    assert store.find(SPEC, KEY) is None


def test_foreign_names_are_left_alone(store):
    for name in ("README.md", f"{SPEC.name}.so", f"{SPEC.name}-{KEY.digest}-xyz.so", "a-b-c.so"):
        (Path(store.folder) / name).write_text("not a kernel")
    put(store)
    assert len(store.entries()) == 1
    assert store.verify() == []
    assert store.clear() == 1
    assert files(store) == sorted(
        ["README.md", f"{SPEC.name}.so", f"{SPEC.name}-{KEY.digest}-xyz.so", "a-b-c.so"]
    )


def test_what_is_not_an_entry_of_the_store_is_never_touched(store, tmp_path):
    elsewhere = tmp_path / os.path.basename(put(store))
    elsewhere.write_text("changed")
    link = Path(store.folder) / "other.so"
    link.symlink_to(elsewhere)
    for path in (elsewhere, link, "/nonexistent", ""):
        assert not store.verified(str(path))
        store.set_aside(str(path), "no reason")
    assert elsewhere.read_text() == "changed" and link.is_symlink()


def test_a_copy_under_the_wrong_digest_is_refused(store):
    """An entry of this key whose name promises other content: what a file swapped by hand looks like."""
    path = put(store)
    liar = path.replace(path[-19:-3], "0" * 16)
    os.rename(path, liar)
    assert store.verify() == [liar]
    assert store.find(SPEC, KEY) is None


@pytest.mark.parametrize("code", [errno.ENOENT, errno.ESTALE, errno.EMFILE, errno.ENOMEM])
def test_what_vanishes_while_it_is_read_is_a_miss_and_nothing_more(store, monkeypatch, code):
    path = put(store)
    really_open = os.open

    def failing_open(name, *arguments, **keywords):
        if name == path:
            raise OSError(code, os.strerror(code), name)
        return really_open(name, *arguments, **keywords)

    monkeypatch.setattr(os, "open", failing_open)
    assert store.find(SPEC, KEY) is None
    monkeypatch.undo()
    assert store.find(SPEC, KEY) == path


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO])
def test_what_cannot_be_read_is_set_aside(store, monkeypatch, code):
    path = put(store)

    def failing_open(name, *arguments, **keywords):
        raise OSError(code, os.strerror(code), name)

    monkeypatch.setattr(os, "open", failing_open)
    assert store.find(SPEC, KEY) is None
    assert not os.path.exists(path)


def test_the_whole_folder_vanishes(store):
    path = put(store)
    os.unlink(path)
    os.rmdir(store.folder)
    assert store.find(SPEC, KEY) is None
    assert store.entries() == [] and store.verify() == [] and store.clear() == 0


# --- size ---


def test_the_least_recently_used_go_first(store):
    store.limit = 250
    paths = []
    for number in range(4):
        spec = replace(SPEC, mr=number + 1)
        paths.append(put(store, bytes(100), spec, kernel_key(spec)))
        os.utime(paths[-1], (1000 + number, 1000 + number))
    assert [os.path.exists(path) for path in paths] == [False, False, True, True]
    spec = replace(SPEC, mr=3)
    assert store.find(spec, kernel_key(spec)) == paths[2]  # used: now the younger one
    spec = replace(SPEC, mr=9)
    put(store, bytes(100), spec, kernel_key(spec))
    assert [os.path.exists(path) for path in paths] == [False, False, True, False]


def test_an_entry_larger_than_the_limit_is_kept_while_it_is_new(store):
    store.limit = 10
    path = put(store, bytes(100))
    assert store.find(SPEC, KEY) == path


def test_leftovers_are_removed_when_they_are_old(store):
    old, new = (os.path.join(store.folder, f".tmp-{name}") for name in ("old", "new"))
    for path in (old, new):
        Path(path).write_bytes(b"half a kernel")
    os.utime(old, (1000, 1000))
    put(store)
    assert not os.path.exists(old) and os.path.exists(new)


def test_hits_seldom_write(store):
    path = put(store)
    before = os.stat(path).st_mtime_ns
    store.find(SPEC, KEY)
    assert os.stat(path).st_mtime_ns == before


# --- locks ---


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


# --- folders ---


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
