"""What happens to tensors on the way from a checkpoint to a model: values that family files combine into WEIGHTS."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mlxlin.backend import mx
from mlxlin.models.spec import LayerSpec


@dataclass(frozen=True)
class Place:
    """Where an operation runs: the layer a tensor belongs to, and whether the checkpoint was written by MLX tools.

    `mlx_layout` is read off the convolutions, [C, W, 1] instead of [C, 1, W]; such files hold zero-centred norm gains
    with the one already added.
    """

    layer: LayerSpec | None
    mlx_layout: bool


@dataclass(frozen=True)
class Operation:
    """A function of source tensors.

    rowwise: it only moves whole rows (axis 0), so that packed weights, scales and biases can go through it too.
    """

    apply: Callable[[list[mx.array], Place], mx.array]
    rowwise: bool = False


def _only(arrays: list[mx.array]) -> mx.array:
    (array,) = arrays
    return array


def _conv(arrays: list[mx.array], place: Place) -> mx.array:
    taps = [a.reshape(a.shape[0], a.shape[1] * a.shape[2]) for a in arrays]
    return mx.contiguous(mx.concatenate(taps, axis=0).T)


def _interleaved(part: int, parts: int) -> Callable[[list[mx.array], Place], mx.array]:
    def apply(arrays: list[mx.array], place: Place) -> mx.array:
        array, heads = _only(arrays), _attention_heads(place)
        rest = array.shape[1:]
        return array.reshape(heads, parts, -1, *rest)[:, part].reshape(-1, *rest)

    return apply


def _attention_heads(place: Place) -> int:
    assert place.layer is not None and place.layer.mixer.kind == "attention"
    return place.layer.mixer.heads


COPY = Operation(lambda arrays, place: _only(arrays), rowwise=True)
CONCAT = Operation(lambda arrays, place: mx.concatenate(arrays, axis=0), rowwise=True)
ROWS = Operation(lambda arrays, place: mx.concatenate([a.reshape(-1, a.shape[-1]) for a in arrays], axis=0))
TRANSPOSED = Operation(lambda arrays, place: mx.contiguous(_only(arrays).T))
FLAT = Operation(lambda arrays, place: _only(arrays).reshape(-1))
ONE_PLUS = Operation(lambda arrays, place: _only(arrays) + (0 if place.mlx_layout else 1))
CONV = Operation(_conv)  # one or several [C, 1, W] or [C, W, 1], behind each other in C -> [W, C]
QUERY_OF_PAIR = Operation(_interleaved(0, 2), rowwise=True)  # rows per head: first the query, then its gate
GATE_OF_PAIR = Operation(_interleaved(1, 2), rowwise=True)
