"""Settings: the table, what is accepted, who wins, and how changes end."""

import logging
import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest

from tvmgemm import log, settings
from tvmgemm.family.arithmetic import ARITHMETICS
from tvmgemm.family.isa import ISAS
from tvmgemm.settings import (
    SETTINGS,
    Options,
    current,
    environment_name,
    on_change,
    options,
    read_environment,
)

ROOT = str(Path(settings.__file__).parents[1])


@pytest.fixture(autouse=True)
def untouched(monkeypatch):
    """No setting from the environment or from another test; what a test sets ends with it."""
    for name, value in (("_environment", {}), ("_in_code", {}), ("_entered", []), ("_callbacks", [])):
        monkeypatch.setattr(settings, name, value)
    monkeypatch.setattr(settings, "_current", Options())
    monkeypatch.setattr(log, "_warned", set())
    yield
    log.set_level(None)


def test_defaults():
    given = {"variant": "auto", "jit": "sync", "tuned": "on", "specialise": "on"}
    assert current() == Options(**given)
    assert all(value is None for name, value in vars(current()).items() if name not in given)
    assert [environment_name(name) for name in SETTINGS] == [
        "TVMGEMM_VARIANT",
        "TVMGEMM_MAX_ISA",
        "TVMGEMM_NUM_THREADS",
        "TVMGEMM_JIT",
        "TVMGEMM_SPECIALISE",
        "TVMGEMM_CACHE_DIR",
        "TVMGEMM_MICROKERNEL",
        "TVMGEMM_PACKING",
        "TVMGEMM_PARALLEL_LOOP",
        "TVMGEMM_ARITHMETIC",
        "TVMGEMM_TUNED",
        "TVMGEMM_LOG",
    ]


def test_type_checkers_know_every_keyword():
    from tvmgemm.keywords import Keywords

    assert list(Keywords.__annotations__) == list(SETTINGS)


GOOD = [
    ("variant", "numpy", "numpy"),
    ("variant", "B3A2C0", "B3A2C0"),
    ("max_isa", "x86-64-v2", "x86-64-v2"),
    ("specialise", "off", "off"),
    ("arithmetic", "madd16", "madd16"),
    ("num_threads", 3, 3),
    ("num_threads", np.int64(3), 3),
    ("jit", "background", "background"),
    ("cache_dir", "/somewhere/x/../y", "/somewhere/y"),
    ("cache_dir", Path("/somewhere"), "/somewhere"),
    ("log", "error", "error"),
]


@pytest.mark.parametrize("name, value, kept", GOOD)
def test_accepted_in_code_and_in_the_environment(name, value, kept):
    with options(**{name: value}):
        assert getattr(current(), name) == kept
    assert current() == Options()
    assert read_environment({environment_name(name): f" {value} "}) == {name: kept}


BAD = [
    ("variant", "B3A2", "not one of auto, numpy, B3A2C0"),
    ("arithmetic", "dot9", f"not one of {', '.join(ARITHMETICS)}"),
    ("max_isa", "avx2", f"not one of {', '.join(ISAS)}"),
    ("num_threads", 0, "not a whole number from 1 to 1024"),
    ("num_threads", 1025, "not a whole number from 1 to 1024"),
    ("jit", "on", "not one of sync, background, off"),
    ("log", "loud", "not one of debug, info, warning, error"),
]


@pytest.mark.parametrize("name, value, told", BAD)
def test_bad_value_raises_in_code_and_changes_nothing(name, value, told):
    with pytest.raises(ValueError, match=f"^{name}={value!r} is {told}"):
        options(**{"cache_dir": "/elsewhere", name: value})
    assert current() == Options()


@pytest.mark.parametrize(
    "name, value, told", [*BAD, ("num_threads", "two", "not a whole number from 1 to 1024")]
)
def test_bad_value_in_the_environment_warns_once_and_is_ignored(name, value, told):
    environ = {environment_name(name): str(value), "TVMGEMM_CACHE_DIR": "/kept"}
    with pytest.warns(RuntimeWarning, match=f"{environment_name(name)}='{value}' is {told}.* ignored"):
        assert read_environment(environ) == {"cache_dir": "/kept"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_environment(environ)


@pytest.mark.parametrize(
    "name, value",
    [
        ("variant", 3),
        ("num_threads", 2.0),
        ("num_threads", "2"),
        ("num_threads", True),
        ("cache_dir", 5),
        ("jit", False),
    ],
)
def test_wrong_type_is_a_type_error_that_lists_what_is_accepted(name, value):
    with pytest.raises(TypeError, match=f"{name}=.* is of type {type(value).__name__}; accepted: "):
        options(**{name: value})


@pytest.mark.parametrize("value", ["", "a\0b"])
def test_a_folder_that_cannot_be_one(value):
    with pytest.raises(ValueError, match="the path of a folder"):
        options(cache_dir=value)


def test_folder_is_absolute_and_knows_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    with options(cache_dir="kernels"):
        assert current().cache_dir == str(tmp_path / "kernels")
    with options(cache_dir="~/kernels"):
        assert current().cache_dir == "/home/somebody/kernels"


def test_relative_folder_where_the_current_one_is_gone(monkeypatch, tmp_path):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(ValueError, match="no current folder"):
        options(cache_dir="kernels")


def test_unknown_keyword_names_the_accepted_ones():
    with pytest.raises(TypeError, match="no keyword 'threads'; accepted: variant, max_isa, num_threads, jit"):
        options(threads=2)


def test_empty_environment_variable_is_unset():
    assert read_environment({"TVMGEMM_JIT": "", "TVMGEMM_VARIANT": "  "}) == {}


def test_setter_holds_and_none_goes_back_to_the_environment(monkeypatch):
    monkeypatch.setattr(settings, "_environment", {"jit": "off"})
    options(jit="background", num_threads=2)
    assert (current().jit, current().num_threads) == ("background", 2)
    options(jit=None)
    assert (current().jit, current().num_threads) == ("off", 2)
    options(num_threads=None)
    assert current() == Options(jit="off")


def test_block_restores_only_what_it_set():
    options(jit="off", variant="numpy")
    with options(jit="background"):
        options(variant="B3A2C0", num_threads=4)
    assert current() == Options(jit="off", variant="B3A2C0", num_threads=4)


def test_blocks_nest_and_end_on_exceptions():
    with pytest.raises(KeyError), options(num_threads=1):
        with options(num_threads=2, jit="off"):
            assert current() == Options(num_threads=2, jit="off")
            with options(num_threads=None):
                assert current().num_threads is None
            assert current().num_threads == 2
        assert current() == Options(num_threads=1)
        raise KeyError
    assert current() == Options()


@pytest.mark.parametrize("first_to_end", ["outer", "inner"])
def test_blocks_of_two_threads_may_end_in_any_order(first_to_end):
    outer = options(num_threads=1).__enter__()
    inner = options(num_threads=2).__enter__()
    order = [outer, inner] if first_to_end == "outer" else [inner, outer]
    order[0].__exit__()
    assert current().num_threads == (2 if first_to_end == "outer" else 1)
    order[1].__exit__()
    assert current() == Options()


def test_a_block_ends_while_another_thread_is_about_to_enter_its_own():
    """``with options(...)`` makes the object first, and enters it then."""
    made = []
    with options(jit="background"):
        other = threading.Thread(target=lambda: made.append(options(jit="off")))
        other.start()
        other.join()
    assert current().jit == "off"
    with made.pop():
        assert current().jit == "off"
    assert current() == Options()


def test_one_object_can_be_used_again_but_not_inside_itself():
    block = options(jit="off")
    for _ in range(2):
        with block:
            assert current().jit == "off"
            with pytest.raises(RuntimeError, match="already entered"):
                block.__enter__()
        assert current().jit == "sync"


def test_many_threads_leave_nothing_behind():
    def change(number):
        for _ in range(200):
            with options(num_threads=number), options(jit="off"):
                assert current().jit == "off"

    threads = [threading.Thread(target=change, args=(number,)) for number in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert current() == Options()


def test_callbacks_hear_of_changes_only():
    heard = []
    on_change(heard.append)
    with options(num_threads=2):
        options(num_threads=2)
    assert heard == [Options(num_threads=2), Options()]


def test_printing_shows_where_each_value_comes_from(monkeypatch):
    monkeypatch.setattr(settings, "_environment", {"jit": "off"})
    with options(num_threads=2):
        shown = repr(options())
    assert "num_threads=2  # code; threads of one product" in shown
    assert "jit='off'  # TVMGEMM_JIT" in shown
    assert "variant='auto'  # default" in shown


def test_threads_defaults_to_the_cores(monkeypatch):
    from tvmgemm import host

    monkeypatch.setattr(host, "host", lambda: host.Host("x86_64", frozenset(), (), cores=7))
    assert Options().threads == 7
    assert Options(num_threads=3).threads == 3


def test_log_level_prints_on_stderr(capfd):
    with options(log="info"):
        log.info("kernel %s", "found")
        log.debug("not shown")
    log.info("not shown")
    assert "INFO: kernel found" in (err := capfd.readouterr().err) and "not shown" not in err


def test_warn_once_names_the_callers_line_and_never_raises(caplog):
    with pytest.warns(RuntimeWarning, match="trouble") as caught:
        log.warn_once("a", "trouble")
        log.warn_once("a", "trouble")
    assert len(caught) == 1 and caught[0].filename == __file__
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING, "tvmgemm"):
        warnings.simplefilter("error")
        log.warn_once("b", "other trouble")
    assert "other trouble" in caplog.text


def test_in_a_real_process():
    """The environment is read at import, a bad value warns once, and neither host nor logging is loaded for
    it."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TVMGEMM_")}
    code = (
        "import sys, types\n"
        "package = types.ModuleType('tvmgemm'); package.__path__ = [sys.argv[1]]\n"
        "sys.modules['tvmgemm'] = package\n"
        "from tvmgemm.settings import current\n"
        "print(current().num_threads, current().jit, 'tvmgemm.host' in sys.modules, 'logging' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, os.path.join(ROOT, "tvmgemm")],
        env={**environ, "TVMGEMM_NUM_THREADS": "2", "TVMGEMM_JIT": "on"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.split() == ["2", "sync", "False", "False"], done.stderr
    assert done.stderr.count("RuntimeWarning: TVMGEMM_JIT='on' is not one of sync, background, off") == 1
