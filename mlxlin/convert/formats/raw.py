"""Any byte range of a file as an array, read straight into MLX's memory (no second copy beside it)."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

from mlxlin.backend import mx

from .tensor import DTYPES


class _Window(io.RawIOBase):
    """A byte range dressed as a safetensors file of one tensor, which MLX reads without an intermediate buffer."""

    def __init__(self, path: Path, offset: int, dtype: str, count: int) -> None:
        size = count * DTYPES[dtype][0]
        header = json.dumps({"x": {"dtype": dtype, "shape": [count], "data_offsets": [0, size]}}).encode()
        self._head = len(header).to_bytes(8, "little") + header
        self._file = path.open("rb", buffering=0)
        self._offset, self._size, self._position = offset, size, 0
        self.name = path.name

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = offset + (0, self._position, len(self._head) + self._size)[whence]
        return self._position

    def readinto(self, buffer: bytearray) -> int:  # type: ignore[override]
        view = memoryview(buffer).cast("B")
        if self._position < len(self._head):
            part = self._head[self._position : self._position + len(view)]
            view[: len(part)] = part
            count = len(part)
        else:
            self._file.seek(self._offset + self._position - len(self._head))
            count = self._file.readinto(view) or 0
        self._position += count
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def read_range(path: Path, offset: int, dtype: str, shape: tuple[int, ...]) -> mx.array:
    """`shape` values of `dtype` (a safetensors name) stored from byte `offset` of `path`.

    float64 becomes float32 and float8 stays bytes: MLX has neither.
    """
    count = math.prod(shape)
    if count == 0:
        return mx.zeros(shape, DTYPES[dtype][1] or mx.float32)
    if dtype == "F64":
        return mx.array(np.fromfile(path, "<f8", count, offset=offset).astype(np.float32)).reshape(shape)
    with _Window(path, offset, "U8" if DTYPES[dtype][1] is None else dtype, count) as window:
        loaded = mx.load(cast(BinaryIO, window), format="safetensors")
    assert isinstance(loaded, dict)
    return loaded["x"].reshape(shape)
