"""Memory of kernels as arrays with strides: single elements and vectors of them, addresses, prefetches."""

from __future__ import annotations

import math
from copy import copy

from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from .arithmetic import bits
from .emit import ON_STACK, const, let, opaque


class View:
    """Memory seen as an array of ``dtype`` with these strides and this offset, all in elements.

    It is aligned to one element only, for NumPy promises no more.

    The last index of a vector access runs over consecutive elements, so the last stride must be 1 there. Indices are
    flattened here and not by TVM, whose flattened vector indices only its slowest passes turn back into one access.
    """

    def __init__(self, name: str, pointer, dtype: str, strides, offset=None):
        self._buffer = T.decl_buffer((const(1 << 40),), dtype, data=pointer, align=bits(dtype) // 8)
        IRBuilder.name(name, self._buffer)
        self.dtype = dtype
        self._strides = strides
        self._offset = offset

    @classmethod
    def on_stack(cls, name: str, dtype: str, shape: tuple[int, int]) -> View:
        """A small array on the function's stack. LLVM knows that no other pointer reaches it."""
        view = cls.__new__(cls)
        view._buffer = T.alloc_buffer((math.prod(shape),), dtype, scope="local", annotations=ON_STACK)
        IRBuilder.name(name, view._buffer)
        view.dtype, view._strides, view._offset = dtype, (const(shape[1]), 1), None
        return view

    def kept(self) -> View:
        """The same memory, its strides in registers from here on.

        LLVM leaves strides that many loops use on the stack and loads them again in the innermost one, with registers
        to spare; what is new to it right before that loop stays in a register there.
        """
        view = copy(self)
        view._strides = tuple(
            stride if isinstance(stride, int) else opaque("stride", stride) for stride in self._strides
        )
        return view

    def stride(self, position: int):
        """Elements from one index at that position to the next."""
        return self._strides[position]

    def in_line(self) -> View:
        """The same memory with one more index, the last: elements from there on."""
        view = copy(self)
        view._strides = (*self._strides, 1)
        return view

    def sliced(self, position: int, index) -> View:
        """The part of the memory where the index at that position is fixed, without that index."""
        view = copy(self)
        strides = list(self._strides)
        part = strides.pop(position) * index
        view._strides, view._offset = tuple(strides), part if self._offset is None else self._offset + part
        return view

    def moved(self, *indices) -> View:
        """The same memory, where these indices become the origin: one sum, made here and kept in a register."""
        view = self.kept()
        view._offset = opaque("origin", view._flat(indices))
        return view

    def started(self, name: str) -> View:
        """The same memory, its start in a register from here on, and not that of the memory it is part of, which LLVM
        may have on the stack."""
        start = self.address(*(const(0) for _ in self._strides))
        return View(f"{name}_memory", let(name, T.call_extern("handle", "tvmgemm_kept_pointer", start)), self.dtype, self._strides)

    def _flat(self, indices):
        terms = [] if self._offset is None else [self._offset]
        for index, stride in zip(indices, self._strides, strict=True):
            terms.append(index if isinstance(stride, int) and stride == 1 else index * stride)
        total = terms[0]
        for term in terms[1:]:
            total = total + term
        return total

    def get(self, *indices):
        """One element."""
        return self._buffer[self._flat(indices)]

    def get_vector(self, lanes: int, *indices):
        """``lanes`` consecutive elements from there."""
        return self._buffer[T.ramp(self._flat(indices), const(1), lanes)]

    def set(self, value, *indices) -> None:
        """Store one element."""
        T.buffer_store(self._buffer, value, [self._flat(indices)])

    def set_vector(self, value, lanes: int, *indices) -> None:
        """Store ``lanes`` consecutive elements there."""
        T.buffer_store(self._buffer, value, [T.ramp(self._flat(indices), const(1), lanes)])

    def address(self, *indices):
        """The address of an element."""
        return T.address_of(self.get(*indices))

    def prefetch(self, *indices, into: int = 1) -> None:
        """Ask for the cache line of an element, which need not exist: a prefetch never faults. ``into``: the nearest
        level of the caches that gets it."""
        T.evaluate(T.call_llvm_intrin("void", "llvm.prefetch.p0", self.address(*indices), 0, 4 - into, 1))


def pointer(name: str, base, dtype: str, offset):
    """The pointer ``offset`` elements behind ``base``."""
    return let(name, View(name + "_base", base, dtype, (1,)).address(offset))
