"""State: everything a model remembers of the tokens it has read, as a value.

A layer's part is either named arrays of fixed size (the recurrent matrix `S`, a normaliser `Z`, the last inputs of a
convolution `conv`, a token shift `shift`) or the keys and values of an attention layer. A model never changes a state;
it returns a new one, so keeping an old state is a fork and costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from mlxlin.backend import mx
from mlxlin.errors import InputError, SessionError
from mlxlin.keys_values import KeysValues

LayerState = Mapping[str, mx.array] | KeysValues


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A point on a state's way that can be returned to: recurrent arrays by value, keys and values by length."""

    recurrent: tuple[Mapping[str, mx.array] | None, ...]
    positions: mx.array
    kv_length: int

    @property
    def nbytes(self) -> int:
        """Bytes kept alive by this checkpoint alone."""
        return sum(array.nbytes for layer in self.recurrent if layer for array in layer.values())


@dataclass(frozen=True, eq=False)
class State:
    """What a model carries from token to token.

    Attributes:
        layers: one entry per layer, two where it has two mixers: named arrays or KeysValues. Recurrent matrices are
            float32 [B, HV, V, K].
        positions: tokens read so far in each row, [B] int32.
        slots: position held by each key slot, [B, kv_length] int32, -1 for padding; None while slot and position agree
            in every row, that is until the first call with unequal `lengths`.
    """

    layers: tuple[LayerState, ...]
    positions: mx.array
    slots: mx.array | None = None

    @property
    def batch(self) -> int:
        """Number of rows."""
        return int(self.positions.shape[0])

    @property
    def kv_length(self) -> int:
        """Key slots in use in every attention layer; 0 without attention layers."""
        return next((layer.length for layer in self.keys_values()), 0)

    @property
    def recurrent_nbytes(self) -> int:
        """Bytes of the part that does not grow with the context."""
        return sum(array.nbytes for layer in self._recurrent() for array in layer.values())

    @property
    def kv_nbytes(self) -> int:
        """Bytes of the keys and values in use."""
        return sum(layer.nbytes for layer in self.keys_values())

    @property
    def kv_capacity_nbytes(self) -> int:
        """Bytes allocated for keys and values, including room to grow."""
        return sum(layer.capacity_nbytes for layer in self.keys_values())

    @property
    def nbytes(self) -> int:
        """Bytes in use: the fixed part and the keys and values."""
        return self.recurrent_nbytes + self.kv_nbytes

    def rows(self, indices: Sequence[int] | mx.array) -> State:
        """The batch rows `indices`, in that order, repeats allowed; shares nothing with this state."""
        picked = indices if isinstance(indices, mx.array) else mx.array(list(indices), dtype=mx.int32)
        if picked.ndim != 1:
            raise InputError(f"Row indices must be one-dimensional, got shape {tuple(picked.shape)}.")
        layers = tuple(
            layer.select(picked) if isinstance(layer, KeysValues) else {n: a[picked] for n, a in layer.items()}
            for layer in self.layers
        )
        return State(layers, self.positions[picked], None if self.slots is None else self.slots[picked])

    def checkpoint(self) -> Checkpoint:
        """Remember this point. Keeps the recurrent arrays alive, not the keys and values."""
        recurrent = tuple(None if isinstance(layer, KeysValues) else layer for layer in self.layers)
        return Checkpoint(recurrent, self.positions, self.kv_length)

    def restore(self, checkpoint: Checkpoint) -> State:
        """The state at `checkpoint`, which must have been taken on the way to this state (or be this state).

        Keys and values are cut to the checkpoint's length, everything else comes from the checkpoint, so that all
        layers are at one position.
        """
        if len(checkpoint.recurrent) != len(self.layers) or checkpoint.kv_length > self.kv_length:
            raise SessionError("This checkpoint does not lie on the way to this state.")
        layers: list[LayerState] = []
        for layer, saved in zip(self.layers, checkpoint.recurrent, strict=True):
            if isinstance(layer, KeysValues) != (saved is None):
                raise SessionError("This checkpoint belongs to another model.")
            layers.append(layer.truncate(checkpoint.kv_length) if isinstance(layer, KeysValues) else saved or {})
        slots = None if self.slots is None else self.slots[:, : checkpoint.kv_length]
        return State(tuple(layers), checkpoint.positions, slots)

    def leaves(self) -> list[mx.array]:
        """The arrays to hand to `mx.eval`: whole buffers, so that evaluating them costs and copies nothing extra."""
        leaves = [self.positions] if self.slots is None else [self.positions, self.slots]
        for layer in self.layers:
            leaves.extend(layer.storage.buffers if isinstance(layer, KeysValues) else layer.values())
        return leaves

    def arrays(self) -> dict[str, mx.array]:
        """Flat named arrays for saving; keys and values cut to their length. Read back with `from_arrays`."""
        named = {"positions": self.positions}
        if self.slots is not None:
            named["slots"] = self.slots
        for index, layer in enumerate(self.layers):
            arrays = layer.arrays() if isinstance(layer, KeysValues) else layer
            named.update({f"layers.{index}.{name}": array for name, array in arrays.items()})
        return named

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, mx.array], like: State) -> State:
        """The state saved by `arrays()`; `like` is a fresh state of the same model and says what must be there.

        Raises:
            SessionError: an array is missing, left over, or of another shape or dtype.
        """
        left = dict(arrays)
        positions = _take(left, "positions", like.positions, free_axes=(0,))
        slots = left.pop("slots", None)
        layers: list[LayerState] = []
        for index, layer in enumerate(like.layers):
            wanted = layer.arrays() if isinstance(layer, KeysValues) else layer
            free = (0, 2) if isinstance(layer, KeysValues) else (0,)
            found = {name: _take(left, f"layers.{index}.{name}", array, free) for name, array in wanted.items()}
            layers.append(KeysValues.of(found) if isinstance(layer, KeysValues) else found)
        if left:
            raise SessionError(f"The saved state holds '{min(left)}', which this model does not have.")
        state = cls(tuple(layers), positions, slots)
        state._check_consistency()
        return state

    def _check_consistency(self) -> None:
        lengths = {layer.length for layer in self.keys_values()}
        batches = {array.shape[0] for array in self.arrays().values()}
        if len(lengths) > 1 or len(batches) != 1:
            raise SessionError("The layers of the saved state are not at one position.")
        if self.slots is not None and self.slots.shape[1] != self.kv_length:
            raise SessionError("The saved state's slots do not fit its keys and values.")

    def keys_values(self) -> Iterator[KeysValues]:
        """The growing part: one entry for each attention layer."""
        return (layer for layer in self.layers if isinstance(layer, KeysValues))

    def _recurrent(self) -> Iterator[Mapping[str, mx.array]]:
        return (layer for layer in self.layers if not isinstance(layer, KeysValues))


def _take(left: dict[str, mx.array], name: str, like: mx.array, free_axes: tuple[int, ...]) -> mx.array:
    if name not in left:
        raise SessionError(f"The saved state lacks '{name}'.")
    array = left.pop(name)
    fits = array.ndim == like.ndim and all(
        axis in free_axes or array.shape[axis] == size for axis, size in enumerate(like.shape)
    )
    if not fits or array.dtype != like.dtype:
        raise SessionError(
            f"'{name}' of the saved state is {array.dtype} {tuple(array.shape)}, "
            f"expected {like.dtype} {tuple(like.shape)}."
        )
    return array
