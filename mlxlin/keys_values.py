"""Keys and values of attention layers: append-only storage shared by states, each of which only knows a length.

Writing into a buffer is free only while nothing else refers to it, so one mutable `Storage` owns the only reference to
each buffer, and a `KeysValues` is a pair (storage, length). Appending at the storage's end writes in place, whatever
older values are still held; appending below the end of a longer living value copies the prefix once.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from mlxlin.backend import mx
from mlxlin.errors import InputError, SessionError

_SMALLEST_GROWTH = 256  # rows; above four times this the buffers grow by a quarter


class Storage:
    """Named buffers [B, H, capacity, D] and how many of their rows are in use. Mutable; owned by KeysValues."""

    def __init__(self, names: tuple[str, ...], buffers: list[mx.array], used: int) -> None:
        self.names = names
        self.buffers = buffers
        self.used = used
        self.growths = 0
        self.holders: weakref.WeakSet[KeysValues] = weakref.WeakSet()

    @property
    def capacity(self) -> int:
        """Rows that fit without growing."""
        return int(self.buffers[0].shape[2])

    def claimed(self) -> int:
        """Rows that some living value still reads."""
        return max((holder.length for holder in self.holders), default=0)

    def write(self, start: int, rows: Sequence[mx.array]) -> None:
        """Put `rows` at [start, start + T) and end there; grows by steps when they do not fit."""
        end = start + rows[0].shape[2]
        if end > self.capacity:
            self._grow(start, end)
        for buffer, row in zip(self.buffers, rows, strict=True):
            buffer[:, :, start:end] = row
        self.used = end

    def _grow(self, kept: int, needed: int) -> None:
        extra = max(_SMALLEST_GROWTH, kept // 4, needed - kept)
        extra = -(-extra // _SMALLEST_GROWTH) * _SMALLEST_GROWTH
        for index, buffer in enumerate(self.buffers):
            batch, heads, _, width = buffer.shape
            room = mx.zeros((batch, heads, extra, width), dtype=buffer.dtype)
            self.buffers[index] = mx.concatenate([buffer[:, :, :kept], room], axis=2)
        self.growths += 1


class KeysValues:
    """What one attention layer remembers: the first `length` rows of a storage. A value; never changes."""

    __slots__ = ("__weakref__", "length", "storage")

    def __init__(self, storage: Storage, length: int) -> None:
        self.storage = storage
        self.length = length
        storage.holders.add(self)

    @classmethod
    def empty(cls, shapes: dict[str, tuple[int, int]], batch: int, dtype: mx.Dtype) -> KeysValues:
        """No rows yet. `shapes` maps each buffer's name to (heads, width)."""
        buffers = [mx.zeros((batch, heads, 0, width), dtype=dtype) for heads, width in shapes.values()]
        return cls(Storage(tuple(shapes), buffers, 0), 0)

    @classmethod
    def of(cls, arrays: dict[str, mx.array]) -> KeysValues:
        """The rows of `arrays` ([B, H, S, D] each, one S), in storage of their own."""
        lengths = {array.shape[2] for array in arrays.values()}
        if len(lengths) != 1:
            raise SessionError(f"Keys and values of one layer have different lengths {sorted(lengths)}.")
        # A buffer is written in place, so it must not be the caller's array object.
        buffers = [mx.array(array) for array in arrays.values()]
        return cls(Storage(tuple(arrays), buffers, lengths.pop()), buffers[0].shape[2])

    def append(self, *rows: mx.array) -> KeysValues:
        """The value with `rows` ([B, H, T, D] for each buffer) behind it; this one stays valid."""
        storage = self.storage
        if storage.used != self.length and storage.claimed() > self.length:
            storage = Storage(storage.names, list(self.view()), self.length)
        storage.write(self.length, rows)
        return KeysValues(storage, storage.used)

    def view(self) -> tuple[mx.array, ...]:
        """The rows in use of each buffer, [B, H, length, D]."""
        return tuple(buffer[:, :, : self.length] for buffer in self.storage.buffers)

    def truncate(self, length: int) -> KeysValues:
        """The first `length` rows, without a copy."""
        if not 0 <= length <= self.length:
            raise InputError(f"Cannot truncate {self.length} rows of keys and values to {length}.")
        return KeysValues(self.storage, length)

    def select(self, indices: mx.array) -> KeysValues:
        """The batch rows `indices` [N], in storage of their own."""
        return KeysValues.of({name: array[indices] for name, array in self.arrays().items()})

    def arrays(self) -> dict[str, mx.array]:
        """Name -> rows in use [B, H, length, D]."""
        return dict(zip(self.storage.names, self.view(), strict=True))

    @property
    def row_nbytes(self) -> int:
        """Bytes that one more token takes, over the whole batch."""
        return sum(
            buffer.shape[0] * buffer.shape[1] * buffer.shape[3] * buffer.dtype.size for buffer in self.storage.buffers
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the rows in use."""
        return self.length * self.row_nbytes

    @property
    def capacity_nbytes(self) -> int:
        """Bytes allocated, including room to grow; shared by all values of one storage."""
        return self.storage.capacity * self.row_nbytes
