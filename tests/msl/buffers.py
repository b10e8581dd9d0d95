"""The memory behind a kernel's arguments: guarded copies, or far larger reserved memory of which little is touched."""

from __future__ import annotations

import ctypes as c
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from .arrays import InputArray, carrier, filled, untouched
from .compile import runtime
from .gen import Argument
from .options import Options

_VALID, _WRITTEN = 1, 4  # Byte in rt/abi.h
_FAR = 1 << 28  # bytes from end to end of an input, from which on it is not copied

Bytes = np.ndarray[Any, Any]


class BufferStructure(c.Structure):
    """`Buffer` in rt/abi.h."""

    _fields_ = [
        ("base", c.c_void_p),
        ("bytes", c.c_uint64),
        *((name, c.c_uint32) for name in ("item_size", "is_output", "is_whole")),
        ("name", c.c_char_p),
        ("state", c.c_void_p),
        *((name, c.c_uint64) for name in ("loaded", "stored", "unique_loaded", "unique_stored")),
    ]


class Memory:
    """The bytes of one argument.

    Attributes:
        address: of the lowest byte. pointer: what the kernel gets, the address of element 0.
        state: one `Byte` (rt/abi.h) per byte.
        is_whole: whether all of it may be read before anything is written.
    """

    def __init__(
        self, argument: Argument, address: int, state: Bytes, item: int, *, is_whole: bool, offset: int = 0
    ) -> None:
        self.argument, self.address, self.state, self.item, self.is_whole = argument, address, state, item, is_whole
        self.name = argument.name + ("" if argument.kind in ("in", "out") else f"_{argument.kind}")
        self.pointer = address + offset

    def structure(self) -> BufferStructure:
        output = int(self.argument.kind == "out")
        name, state = self.name.encode(), self.state.ctypes.data
        return BufferStructure(self.address, self.state.size, self.item, output, int(self.is_whole), name, state)

    def free(self) -> None:
        """Called once when the kernel has run."""


class Guarded(Memory):
    """A copy, followed by a page that faults when touched.

    It starts aligned for vectors if its size allows that with the end at the guard page, else aligned to an element.
    """

    def __init__(
        self, argument: Argument, contents: Bytes, state: Bytes, item: int, align: int | None = None, **settings: Any
    ) -> None:
        self._mapped_bytes, self._mapped = c.c_uint64(), c.c_void_p()
        start = max(align or (16 if contents.nbytes % 16 == 0 else item), item)
        allocate = runtime().mtl_guarded_alloc
        allocate.restype = c.c_void_p
        mapped = c.byref(self._mapped_bytes), c.byref(self._mapped)
        address: int = allocate(c.c_uint64(contents.nbytes), c.c_uint64(start), *mapped)
        c.memmove(address, contents.ctypes.data, contents.nbytes)
        super().__init__(argument, address, state, item, **settings)

    def free(self) -> None:
        runtime().mtl_guarded_free(self._mapped, self._mapped_bytes)


class Output(Guarded):
    """An output that the kernel has to fill."""

    def __init__(self, argument: Argument, elements: Bytes, options: Options, *, is_initialised: bool) -> None:
        self._shape, self._dtype = elements.shape, elements.dtype
        contents = elements.reshape(-1).view(np.uint8)
        state = np.zeros(contents.nbytes, np.uint8)
        super().__init__(argument, contents, state, elements.itemsize, options.align, is_whole=is_initialised)

    def elements(self) -> Bytes:
        return np.frombuffer(c.string_at(self.address, self.state.size), self._dtype).reshape(self._shape)

    def missing(self) -> Bytes:
        """Which elements were never written."""
        written = (self.state.reshape(-1, self.item) & _WRITTEN).all(axis=1)
        return ~written.reshape(self._shape)


class Placed(Memory):
    """Elements used where they lie: nothing around them is touched, so that neither they nor their state need memory.
    Nothing guards the ends in fast mode."""

    def __init__(self, argument: Argument, elements: Bytes, reach: tuple[int, int]) -> None:
        low, high = reach
        address: int = elements.__array_interface__["data"][0] + low
        is_output, is_dense = argument.kind == "out", high - low == elements.nbytes
        state = np.frombuffer(untouched(high - low), np.uint8)
        if not is_output and not is_dense:
            as_strided(state[-low:], (*elements.shape, elements.itemsize), (*elements.strides, 1))[...] = _VALID
        super().__init__(argument, address, state, elements.itemsize, is_whole=is_dense and not is_output, offset=-low)
        self._elements = elements

    def elements(self) -> Bytes:
        return self._elements


def memory_of_output(
    argument: Argument, shape: Sequence[int], dtype: str, init_value: float | None, options: Options
) -> Output | Placed:
    """Where a kernel writes; with a window of threadgroups only what it touches takes memory."""
    if options.last is None:
        return Output(argument, filled(shape, dtype, init_value), options, is_initialised=init_value is not None)
    nbytes = int(np.prod(shape, dtype=np.int64)) * carrier(dtype).itemsize
    return Placed(argument, np.frombuffer(untouched(nbytes), carrier(dtype)).reshape(shape), (0, nbytes))


def memory_of_input(argument: Argument, array: InputArray, options: Options) -> Memory:
    """What a kernel reads: an input, or its shape, strides or number of dimensions."""
    low, high = array.reach
    item = array.elements.itemsize
    if argument.kind == "in" and high - low > _FAR:
        return Placed(argument, array.elements, array.reach)
    if argument.kind == "in":
        contents, belongs, offset = array.memory()
        state = belongs.astype(np.uint8) * np.uint8(_VALID)
        return Guarded(argument, contents, state, item, options.align, is_whole=False, offset=offset)
    values = {
        "shape": np.array(array.shape, np.int32),
        "strides": np.array(array.strides, np.int64),
        "ndim": np.array([len(array.shape)], np.int32),
    }[argument.kind]
    contents = values.view(np.uint8)
    return Guarded(argument, contents, np.zeros(contents.nbytes, np.uint8), values.itemsize, is_whole=True)
