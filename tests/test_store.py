"""The store: what is in a key, what is found, what is refused and set aside, and its size."""

import errno
import os
import stat
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
from stores import KEY, SPEC, files, put, store, untouched  # noqa: F401

from tvmgemm.store import KernelKey, kernel_key
from tvmgemm.store.key import PINS, KernelKey, generator_digest, generator_sources

# -- the key


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


def differences(other: KernelKey) -> list[str]:
    """Names of the parts of the key that differ from those of ``KEY``."""
    return [name for (name, ours), (_, theirs) in zip(KEY.parts, other.parts, strict=True) if ours != theirs]


@pytest.mark.parametrize(
    "field, value",
    [("dtype", "float64"), ("mr", 5), ("nr", 16), ("op", "gemm"), ("packing", "none"), ("parallel", "ic")],
)
def test_every_field_of_the_spec_changes_the_key(field, value):
    other = kernel_key(replace(SPEC, **{field: value}))
    assert other.digest != KEY.digest
    assert differences(other) == [f"spec {field}"]


def test_the_instruction_set_is_in_the_key_as_features():
    assert differences(kernel_key(replace(SPEC, isa="x86-64-v2"))) == ["isa features", "spec isa"]


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


# -- one entry


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
    assert put(store) == path and stat.S_IMODE(os.stat(store.folder).st_mode) == 0o700


# -- size


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
