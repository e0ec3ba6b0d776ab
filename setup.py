"""The only thing that pyproject.toml can't say: the extension is made by cffi."""

from setuptools import setup

setup(cffi_modules=["tvmgemm/native/build_native.py:ffi"])
