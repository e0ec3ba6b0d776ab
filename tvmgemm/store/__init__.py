"""The on-disk store of built kernels: one verified file per kernel. ``cache/README.md`` describes the format."""

from .files import Entry, Store
from .folder import open_store, user_folder
from .key import KernelKey, kernel_key

__all__ = ["Entry", "KernelKey", "Store", "kernel_key", "open_store", "user_folder"]
