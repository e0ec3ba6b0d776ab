"""A store of its own for each test, and how an entry gets into it."""

import os
from pathlib import Path

import pytest

from tvmgemm import log, settings
from tvmgemm.spec import KernelSpec
from tvmgemm.store import Store, kernel_key
from tvmgemm.store import folder as folder_module
from tvmgemm.store.content import temporary_path

SPEC = KernelSpec("float32", "x86-64-v3", "B3A2C0", 4, 8)
KEY = kernel_key(SPEC)


@pytest.fixture(autouse=True)
def untouched(monkeypatch):
    """No warning was given, no option set and no private folder made before."""
    monkeypatch.setattr(log, "_warned", set())
    monkeypatch.setattr(settings, "_current", settings.Options())
    monkeypatch.setattr(folder_module, "_private", None)


@pytest.fixture
def store(tmp_path):
    (tmp_path / "kernels").mkdir(mode=0o700)
    return Store(str(tmp_path / "kernels"))


def put(store, content=b"machine code", spec=SPEC, key=KEY):
    """Publish ``content`` as the library of a kernel; its path."""
    path = temporary_path(store.build_folder())
    Path(path).write_bytes(content)
    return store.put(spec, key, path)


def files(store):
    """The names of all files of the store, in order."""
    return sorted(os.listdir(store.folder))
