"""Arrays of the caller as raw memory, and back. Inputs may be MLX or numpy arrays or Python scalars."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlxlin.backend import mx

from .gen import dtype_name

_MAP_NORESERVE = 0x4000  # Linux; the emulator runs nowhere else

# element types numpy lacks, by the integers that carry their bits
_CARRIER = {"bfloat16": np.dtype(np.uint16)}


def carrier(dtype: str) -> np.dtype[Any]:
    return _CARRIER.get(dtype) or np.dtype(dtype)


@dataclass(frozen=True)
class InputArray:
    """One input: an elements view (bfloat16 as uint16) with the strides the kernel will see."""

    elements: np.ndarray[Any, Any]
    dtype: str
    is_mlx: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return self.elements.shape

    @property
    def strides(self) -> tuple[int, ...]:
        """In elements, as MLX passes them."""
        return tuple(stride // self.elements.itemsize for stride in self.elements.strides)

    @property
    def reach(self) -> tuple[int, int]:
        """From the first byte of element 0: that of the lowest element, and the one behind the highest."""
        if self.elements.size == 0:
            return 0, 0
        ends = [(n - 1) * stride for n, stride in zip(self.shape, self.elements.strides, strict=True)]
        return sum(end for end in ends if end < 0), sum(end for end in ends if end > 0) + self.elements.itemsize

    def memory(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], int]:
        """(all bytes from the lowest to the highest element, which of them belong to elements, byte of element 0)."""
        size, item = self.elements.size, self.elements.itemsize
        if size == 0 or self.elements.flags.c_contiguous:
            return self.elements.reshape(-1).view(np.uint8), np.ones(size * item, bool), 0
        low, high = self.reach
        distinct = self.elements[tuple(slice(None if stride else 1) for stride in self.elements.strides)]
        offsets = np.zeros(distinct.shape, np.int64) - low
        for axis, (n, stride) in enumerate(zip(distinct.shape, distinct.strides, strict=True)):
            offsets += (np.arange(n) * stride).reshape([-1 if a == axis else 1 for a in range(distinct.ndim)])
        bytes_ = (offsets.reshape(-1, 1) + np.arange(item)).reshape(-1)
        span = high - low
        memory, belongs = np.full(span, 0xFF, np.uint8), np.zeros(span, bool)
        memory[bytes_] = np.ascontiguousarray(distinct).reshape(-1).view(np.uint8)
        belongs[bytes_] = True
        return memory, belongs, -low


def untouched(nbytes: int) -> mmap.mmap:
    """So many bytes of zeros, of which only those that are touched take memory."""
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)


def as_input(value: Any, *, row_contiguous: bool) -> InputArray:
    is_mlx = isinstance(value, mx.array)
    if is_mlx:
        dtype = dtype_name(value.dtype)
        raw = value.view(mx.uint16) if dtype in _CARRIER else value
        mx.eval(raw)
        elements = np.asarray(memoryview(raw))
    else:
        # MLX makes 0-d arrays of Python scalars: int32, float32, bool
        scalars = {bool: np.bool_, int: np.int32, float: np.float32}
        elements = np.asarray(value, scalars.get(type(value)))
        dtype = elements.dtype.name
    if row_contiguous and not elements.flags.c_contiguous:
        elements = np.ascontiguousarray(elements)
    return InputArray(elements, dtype, is_mlx)


def filled(shape: Sequence[int], dtype: str, value: float | None) -> np.ndarray[Any, Any]:
    """A fresh output: all ones bits (NaN) unless an initial value is given."""
    if value is None:
        count = int(np.prod(shape, dtype=np.int64))
        return np.frombuffer(bytearray(b"\xff" * (count * carrier(dtype).itemsize)), carrier(dtype)).reshape(shape)
    if dtype in _CARRIER:
        return np.full(shape, np.array(mx.array(value, mx.bfloat16).view(mx.uint16)), carrier(dtype))
    return np.full(shape, value, np.float32).astype(carrier(dtype))


def to_mlx(elements: np.ndarray[Any, Any], dtype: str) -> mx.array:
    array = mx.array(elements)
    return array.view(mx.bfloat16) if dtype == "bfloat16" else array
