"""Which linker is taken, and what is told of one that fails."""

import ctypes
import os
import shutil

import pytest
from builds import (
    STARTS_FROM_C,
    object_file,  # noqa: F401
)

from tvmgemm.build import link as link_module
from tvmgemm.build.link import Linker, LinkError, find_linker, link

pytestmark = STARTS_FROM_C


def tools(folder, *names):
    for name in names:
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)
    return str(folder)


@pytest.mark.parametrize(
    "present, chosen, found",
    [
        (["cc", "gcc", "ld"], None, ("cc", True)),
        (["gcc", "clang"], None, ("gcc", True)),
        (["clang", "ld"], None, ("clang", True)),
        (["ld", "ld.lld"], None, ("ld", False)),
        (["ld.lld"], None, ("ld.lld", False)),
        (["cc", "other"], "other -m64", ("other", True)),
        (["cc", "ld"], "ld", ("ld", False)),
        (["cc"], "missing", ("cc", True)),
        (["cc"], "unbalanced '", ("cc", True)),
        ([], None, None),
    ],
)
def test_find_linker(tmp_path, present, chosen, found):
    environ = {"PATH": tools(tmp_path, *present), **({"CC": chosen} if chosen else {})}
    linker = find_linker(environ)
    assert (linker and (os.path.basename(linker.command[0]), linker.driver)) == found
    if chosen == "other -m64":
        assert linker.command[1:] == ("-m64",)


@pytest.mark.parametrize("name", ["cc", "ld", "ld.lld"])
def test_link_with_what_is_here(tmp_path, object_file, name):
    if shutil.which(name) is None:
        pytest.skip(f"no {name} here")
    library = str(tmp_path / "answer.so")
    link(Linker((shutil.which(name),), driver=name == "cc"), str(object_file), library)
    assert ctypes.CDLL(library).answer() == 42


def test_a_driver_that_refuses_nostdlib_is_asked_again(tmp_path, object_file):
    driver = tmp_path / "fussy"
    driver.write_text('#!/bin/sh\ncase "$*" in *nostdlib*) echo no >&2; exit 1;; esac\nexec cc "$@"\n')
    driver.chmod(0o755)
    link(Linker((str(driver),), driver=True), str(object_file), str(tmp_path / "answer.so"))
    assert ctypes.CDLL(str(tmp_path / "answer.so")).answer() == 42


@pytest.mark.parametrize(
    "text, told",
    [
        (
            "echo first; echo 'cannot find crt1.o' >&2; exit 1",
            "failed with exit status 1: first\ncannot find crt1.o",
        ),
        ("exit 0", "wrote no library"),
        ("exit 5", "it printed nothing"),
        ("touch \"$(echo $* | sed 's/.*-o //; s/ .*//')\"", "wrote no library"),
    ],
)
def test_a_linker_that_fails_is_quoted(tmp_path, object_file, text, told):
    linker = tmp_path / "bad-ld"
    linker.write_text(f"#!/bin/sh\n{text}\n")
    linker.chmod(0o755)
    library = tmp_path / "answer.so"
    with pytest.raises(LinkError) as caught:
        link(Linker((str(linker),), driver=False), str(object_file), str(library))
    assert told in str(caught.value) and "bad-ld" in str(caught.value)
    assert not library.exists()


def test_a_linker_that_hangs_is_stopped(tmp_path, object_file, monkeypatch):
    linker = tmp_path / "slow-ld"
    linker.write_text("#!/bin/sh\nexec sleep 60\n")
    linker.chmod(0o755)
    monkeypatch.setattr(link_module, "_TIMEOUT", 0.2)
    with pytest.raises(LinkError, match="did not finish"):
        link(Linker((str(linker),), driver=False), str(object_file), str(tmp_path / "answer.so"))


def test_macos_links_a_dylib():
    assert link_module._attempts(True, "darwin") == [["-dynamiclib", "-Wl,-undefined,dynamic_lookup"]]
    assert link_module._attempts(False, "darwin")[0][0] == "-dylib"
