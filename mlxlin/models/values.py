"""What happens to tensors on the way from a checkpoint to a model: values that family files combine into WEIGHTS."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from mlxlin.backend import mx
from mlxlin.errors import UnsupportedError
from mlxlin.models.spec import AttentionSpec, LatentSpec, LayerSpec, LinearSpec, MixerSpec

Spec = TypeVar("Spec", bound=MixerSpec)


@dataclass(frozen=True)
class Place:
    """Where an operation runs: the layer a tensor belongs to, and whether the checkpoint was written by MLX tools.

    `mlx_layout` is read off the convolutions, [C, W, 1] instead of [C, 1, W]; such files hold zero-centred norm gains
    with the one already added.
    """

    layer: LayerSpec | None
    mlx_layout: bool

    def mixer(self, kind: type[Spec]) -> Spec:
        """The layer's mixer, of the kind that the rule is for."""
        assert self.layer is not None and isinstance(self.layer.mixer, kind)
        return self.layer.mixer


@dataclass(frozen=True)
class Operation:
    """A function of source tensors.

    rowwise: it only moves whole rows of matrices, so that packed weights, scales and biases can go through it too.
    """

    apply: Callable[[list[mx.array], Place], mx.array]
    rowwise: bool = False


def _only(arrays: list[mx.array]) -> mx.array:
    (array,) = arrays
    return array


def _split(array: mx.array, ends: list[int], axis: int) -> list[mx.array]:
    """Pieces up to each of `ends`, and the rest; MLX takes ends beyond the array without complaint, or aborts."""
    if ends[-1] > array.shape[axis]:
        raise ValueError(f"{array.shape[axis]} rows cannot be cut at {ends[-1]}")
    return list(mx.split(array, ends, axis=axis))


def _one_plus(arrays: list[mx.array], place: Place) -> mx.array:
    """The gain of a zero-centred norm, in float32 as its sources add: in bfloat16 the sum would lose 0.2 %."""
    gain = _only(arrays)
    return gain if place.mlx_layout else gain.astype(mx.float32) + 1


def _conv(arrays: list[mx.array], place: Place) -> mx.array:
    taps = [a.reshape(a.shape[0], a.shape[1] * a.shape[2]) for a in arrays]
    return mx.contiguous(mx.concatenate(taps, axis=0).T)


def _interleaved(part: int, parts: int) -> Callable[[list[mx.array], Place], mx.array]:
    def apply(arrays: list[mx.array], place: Place) -> mx.array:
        array, heads = _only(arrays), place.mixer(AttentionSpec).heads
        rest = array.shape[1:]
        return array.reshape(heads, parts, -1, *rest)[:, part].reshape(-1, *rest)

    return apply


def _key_head_groups(part: int) -> Callable[[list[mx.array], Place], mx.array]:
    """Rows stored for each key head in turn, [q | k | v | z] or [b | a]: those of q, k and v, or of one other part."""

    def apply(arrays: list[mx.array], place: Place) -> mx.array:
        spec, array = place.mixer(LinearSpec), _only(arrays)
        grouped = array.reshape(spec.heads, -1, *array.shape[1:])
        values = spec.value_heads // spec.heads * spec.value_dim
        ends = [spec.key_dim, 2 * spec.key_dim, 2 * spec.key_dim + values]
        if part < 2:
            pieces = _split(grouped, ends, axis=1)
            pieces = pieces[:3] if part == 0 else pieces[3:]
        else:
            pieces = [mx.split(grouped, 2, axis=1)[part - 2]]
        return mx.concatenate([piece.reshape(-1, *array.shape[1:]) for piece in pieces], axis=0)

    return apply


def _head_parts(values: bool) -> Callable[[list[mx.array], Place], mx.array]:
    """Rows of each head in turn, first those of its keys, then of its values."""

    def apply(arrays: list[mx.array], place: Place) -> mx.array:
        spec, array = place.mixer(LatentSpec), _only(arrays)
        grouped = array.reshape(spec.heads, -1, *array.shape[1:])
        chosen = grouped[:, spec.plain_dim :] if values else grouped[:, : spec.plain_dim]
        return chosen.reshape(-1, *array.shape[1:])

    return apply


def _thirds_of_heads(arrays: list[mx.array], place: Place) -> mx.array:
    """Rows stored for each head in turn, [q | k | v], as those of all heads' q, then k, then v."""
    array, heads = _only(arrays), place.mixer(LinearSpec).heads
    return array.reshape(heads, 3, -1, array.shape[-1]).swapaxes(0, 1).reshape(array.shape)


def _flat_heads(array: mx.array) -> mx.array:
    return array.reshape(-1, array.shape[-1])


def _rows_of(part: int) -> Callable[[list[mx.array], Place], mx.array]:
    """Rows of all heads' q, then k, then v: those of one of the three."""

    def apply(arrays: list[mx.array], place: Place) -> mx.array:
        spec = place.mixer(AttentionSpec)
        queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        return _split(_only(arrays), [queries, queries + keys], axis=0)[part]

    return apply


def folded(parameter: str, operation: Operation) -> Operation:
    """`operation`, then the factors that the layer's description says are folded into `parameter`."""

    def apply(arrays: list[mx.array], place: Place) -> mx.array:
        assert place.layer is not None
        array = operation.apply(arrays, place)
        factors = next((f.factors for f in place.layer.folded if f.parameter == parameter), ())
        if not factors:
            return array
        if place.mlx_layout:
            raise UnsupportedError(
                "The checkpoint was written by MLX tools, which multiply weights by some of the config's multipliers.",
                hint="Use the original checkpoint.",
            )
        rows = mx.array(factors)
        if len(factors) > 1:
            spec = place.mixer(LinearSpec)
            keys, values = spec.heads * spec.key_dim, spec.value_heads * spec.value_dim
            rows = mx.concatenate([mx.full((n,), f) for n, f in zip((keys, keys, values), factors, strict=True)])
        return (array.astype(mx.float32) * rows.reshape(-1, *[1] * (array.ndim - 1))).astype(array.dtype)

    return Operation(apply)


COPY = Operation(lambda arrays, place: _only(arrays), rowwise=True)
CONCAT = Operation(lambda arrays, place: mx.concatenate(arrays, axis=0), rowwise=True)
ROWS = Operation(lambda arrays, place: mx.concatenate([a.reshape(-1, a.shape[-1]) for a in arrays], axis=0))
TRANSPOSED = Operation(lambda arrays, place: mx.contiguous(_only(arrays).T))
FLAT = Operation(lambda arrays, place: _only(arrays).reshape(-1))
ONE_PLUS = Operation(_one_plus)
CONV = Operation(_conv)  # one or several [C, 1, W] or [C, W, 1], behind each other in C -> [W, C]
QUERY_OF_PAIR = Operation(_interleaved(0, 2), rowwise=True)  # rows per head: first the query, then its gate
GATE_OF_PAIR = Operation(_interleaved(1, 2), rowwise=True)
STACK = Operation(lambda arrays, place: mx.stack(arrays), rowwise=True)  # matrices of one expert each
FIRST_HALF = Operation(lambda arrays, place: mx.split(_only(arrays), 2, axis=-2)[0], rowwise=True)  # of a matrix's rows
SECOND_HALF = Operation(lambda arrays, place: mx.split(_only(arrays), 2, axis=-2)[1], rowwise=True)
QKV_OF_GROUPS = Operation(_key_head_groups(0), rowwise=True)
GATE_OF_GROUPS = Operation(_key_head_groups(1), rowwise=True)
BETA_OF_GROUPS = Operation(_key_head_groups(2), rowwise=True)
DECAY_OF_GROUPS = Operation(_key_head_groups(3), rowwise=True)
Q_ROWS, K_ROWS, V_ROWS = (Operation(_rows_of(part), rowwise=True) for part in range(3))
QKV_OF_HEADS = Operation(_thirds_of_heads, rowwise=True)
COLUMNS_OF_HEADS = Operation(lambda arrays, place: mx.contiguous(_flat_heads(_only(arrays).swapaxes(-1, -2))))
ROWS_OF_HEADS = Operation(lambda arrays, place: _flat_heads(_only(arrays)), rowwise=True)  # one matrix per head
KEYS_OF_HEADS = Operation(_head_parts(False), rowwise=True)
VALUES_OF_HEADS = Operation(_head_parts(True), rowwise=True)
