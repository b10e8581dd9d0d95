"""What all layers of one forward pass share: which tokens are real and where they stand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from mlxlin.backend import mx
from mlxlin.models.rotary import Rotary
from mlxlin.state import KeysValues, LayerState


@dataclass(eq=False)
class Step:
    """One call of a model on tokens [B, T].

    Attributes:
        length: T.
        positions: tokens read before, [B] int32.
        lengths: real tokens of each row, [B] int32; None when all T are real.
        slots: position of every key slot including the new ones, [B, S] int32, -1 for padding; None while slot and
            position agree.
        first_value: values of the first layer, where later ones use them, [B, T, D].
    """

    length: int
    positions: mx.array
    lengths: mx.array | None = None
    slots: mx.array | None = None
    first_value: mx.array | None = None
    _masks: dict[int | None, mx.array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rotate = Rotary(self.positions, self.length)

    def ragged_mask(self, window: int | None) -> mx.array:
        """Which key slot each query may read, [B, 1, T, S] bool; needs `slots`. Made once for all layers."""
        if window not in self._masks:
            assert self.slots is not None
            self._masks[window] = _ragged_mask(self.positions, self.slots, self.length, window)
        return self._masks[window]


def _ragged_mask(positions: mx.array, slots: mx.array, length: int, window: int | None) -> mx.array:
    total = slots.shape[1]
    query = (positions[:, None] + mx.arange(length))[:, None, :, None]
    key = slots[:, None, None, :]
    seen = (key >= 0) & (key <= query)
    if window is not None:
        seen = seen & (key > query - window)
    # A query always reads its own slot: where the query is padding nothing else may be left, and its output,
    # which nobody uses, must still be finite.
    own = mx.arange(total)[None, :] == mx.arange(total - length, total)[:, None]
    return seen | own


class Mixer(Protocol):
    """Mixes tokens: x [B, T, D] -> y [B, T, D], from one state to the next."""

    def __call__(self, x: mx.array, state: LayerState, step: Step) -> tuple[mx.array, LayerState]: ...

    def fresh(self, batch: int) -> LayerState:
        """The state before the first token."""
        ...


def recurrent(state: LayerState) -> Mapping[str, mx.array]:
    """`state` of a layer with named arrays."""
    assert not isinstance(state, KeysValues)
    return state


def keys_values(state: LayerState) -> KeysValues:
    """`state` of an attention layer."""
    assert isinstance(state, KeysValues)
    return state
