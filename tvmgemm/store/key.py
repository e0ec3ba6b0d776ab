"""The key of a kernel: everything that decides its machine code, in named parts, so that a miss can be
explained.

In the key: what generates the code, what it is generated for and what it must fit. Not in the key: time
stamps, paths, thread counts, block sizes (run-time arguments), the CPU's model and LLVM's tuning hints. Those
would make equal machines miss, or change nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from ..family.isa import ISAS
from ..forks import once
from ..spec import KernelSpec

try:  # hashlib loads OpenSSL, which takes 4 ms of a program's first product; these modules take none
    from _sha2 import sha256
except ImportError:
    try:
        from _sha256 import sha256
    except ImportError:
        from hashlib import sha256

#: Version of the file format and of the way names and digests are formed.
SCHEMA = 1

#: Version of the C signature of kernels (native/tvmgemm.h, ``tg_kernel_fn``) and of the meaning of its
#: arguments.
KERNEL_ABI = 2

#: What kernels are built with. The build process refuses anything else: TVM's interfaces change with every
#: release.
TVM_VERSION = "0.27.0.post1"
TVM_FFI_VERSION = "0.1.14.post1"
LLVM_MAJOR = 22
PINS = {"apache-tvm": TVM_VERSION, "apache-tvm-ffi": TVM_FFI_VERSION, "llvm": str(LLVM_MAJOR)}

#: What to do when it is missing or another.
INSTALL = f"pip install 'apache-tvm=={TVM_VERSION}' 'apache-tvm-ffi=={TVM_FFI_VERSION}'"

#: Hexadecimal digits of a digest in a file name.
DIGITS = 16

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def digest(content: bytes) -> str:
    """The first ``DIGITS`` hexadecimal digits of the SHA-256 of ``content``."""
    return sha256(content).hexdigest()[:DIGITS]


@dataclass(frozen=True)
class KernelKey:
    """An ordered list of ``(name, value)``. Equal keys mean interchangeable machine code."""

    parts: tuple[tuple[str, str], ...]

    @once
    def digest(self) -> str:
        """Sixteen hexadecimal digits of the SHA-256 of the parts."""
        return digest(repr(self.parts).encode())

    def explain(self) -> str:
        """One ``name: value`` line per part, and the digest."""
        return "\n".join([*(f"{name}: {value}" for name, value in self.parts), f"digest: {self.digest}"])


def kernel_key(spec: KernelSpec) -> KernelKey:
    """The key of ``spec`` with this package's generator and pins, on this operating system."""
    isa = ISAS[spec.isa]
    return KernelKey(
        (
            ("schema", str(SCHEMA)),
            ("kernel abi", str(KERNEL_ABI)),
            ("generator", generator_digest()),
            *PINS.items(),
            ("platform", f"{sys.platform}-{isa.arch}"),
            ("isa features", " ".join(sorted(isa.requires))),
            *((f"spec {name}", str(value)) for name, value in spec.to_dict().items()),
        )
    )


def generator_sources(package: str = _PACKAGE) -> tuple[str, ...]:
    """Paths of the files that define kernels: all of ``family/``, and ``spec.py``. Found rather than listed:
    a file that somebody forgot to list would let old kernels pass for new ones."""
    family = os.path.join(package, "family")
    names = sorted(name for name in os.listdir(family) if name.endswith(".py"))
    return (os.path.join(package, "spec.py"), *(os.path.join(family, name) for name in names))


@cache
def generator_digest(sources: Iterable[str] | None = None) -> str:
    """SHA-256 of the names and contents of ``sources`` (a tuple of paths; None: this package's generator)."""
    hashed = sha256()
    for path in generator_sources() if sources is None else sources:
        with open(path, "rb") as file:
            content = file.read()
        hashed.update(f"{os.path.basename(path)} {len(content)}\n".encode())
        hashed.update(content)
    return hashed.hexdigest()
