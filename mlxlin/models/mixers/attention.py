"""Softmax attention over keys and values that grow with the context."""

from __future__ import annotations

from functools import lru_cache

from mlxlin.backend import mx, on_metal
from mlxlin.models.activations import sigmoid_gated, softmax_weights, vectorises
from mlxlin.models.blocks import Linear, Matrix, Projections
from mlxlin.models.mixers.step import Step, keys_values
from mlxlin.models.norms import Norm
from mlxlin.models.params import Parameter, Params, Table, under
from mlxlin.models.spec import AttentionSpec, NormSpec
from mlxlin.state import KeysValues, LayerState

# Scores of one attention call, in elements: where no fused kernel runs they are all in memory at once.
_SCORES = 1 << 24
_FUSED_DIMS = (64, 80, 128)  # head dims for which Metal's prefill never holds the scores, without being asked
_SMALLEST_BLOCK, _LARGEST_BLOCK = 16, 256


def _inputs(spec: AttentionSpec) -> list[str]:
    return ["q", "gate", "k", "v"] if spec.gate else ["q", "k", "v"]


def _norm_widths(spec: AttentionSpec) -> tuple[int, int]:
    full = spec.qk_norm == "full"
    return spec.head_dim * (spec.heads if full else 1), spec.head_dim * (spec.kv_heads if full else 1)


def attention_parameters(spec: AttentionSpec, width: int) -> Table:
    """Expected parameters of one attention layer in a model of this width."""
    sizes = {"q": spec.heads, "gate": spec.heads, "k": spec.kv_heads, "v": spec.kv_heads}
    table: Table = {}
    for name in _inputs(spec):
        rows = sizes[name] * spec.head_dim
        table[f"{name}.weight"] = Parameter((rows, width), "matrix")
        if spec.qkv_bias:
            table[f"{name}.bias"] = Parameter((rows,), "keep")
    table["out.weight"] = Parameter((width, spec.heads * spec.head_dim), "matrix")
    if spec.out_bias:
        table["out.bias"] = Parameter((width,), "keep")
    if spec.qk_norm != "none":
        q_width, k_width = _norm_widths(spec)
        table.update(under("q_norm", Norm.parameters(NormSpec(spec.eps), q_width)))
        table.update(under("k_norm", Norm.parameters(NormSpec(spec.eps), k_width)))
    return table


class Attention:
    """Grouped-query attention with optional rotary embedding, query/key norms, output gate and window."""

    def __init__(self, spec: AttentionSpec, params: Params, width: int, dtype: mx.Dtype) -> None:
        self._spec = spec
        self._dtype = dtype
        self._project = Projections(params, _inputs(spec))
        self._q_norm = Norm(NormSpec(spec.eps), params.at("q_norm")) if spec.qk_norm != "none" else None
        self._k_norm = Norm(NormSpec(spec.eps), params.at("k_norm")) if spec.qk_norm != "none" else None
        self._out = Linear(Matrix.take(params, "out"))

    def fresh(self, batch: int) -> KeysValues:
        """The state before the first token."""
        shape = (self._spec.kv_heads, self._spec.head_dim)
        return KeysValues.empty({"keys": shape, "values": shape}, batch, self._dtype)

    def __call__(self, x: mx.array, state: LayerState, step: Step) -> tuple[mx.array, LayerState]:
        """x [B, T, D] -> y [B, T, D] and the keys and values with T more rows."""
        spec = self._spec
        projected = dict(zip(_inputs(spec), self._project(x), strict=True))
        q = self._heads(projected["q"], spec.heads, self._q_norm)
        k = self._heads(projected["k"], spec.kv_heads, self._k_norm)
        v = self._heads(projected["v"], spec.kv_heads, None)
        if spec.rope is not None:
            q, k = step.rotate(q, spec.rope), step.rotate(k, spec.rope)
        remembered = keys_values(state).append(k, v)
        keys, values = remembered.view()
        y = attend(q, keys, values, scale=spec.scale, window=spec.window, step=step)
        y = y.swapaxes(1, 2).reshape(*x.shape[:2], -1)
        if spec.gate:
            y = sigmoid_gated(projected["gate"], y)
        return self._out(y), remembered

    def _heads(self, x: mx.array, heads: int, norm: Norm | None) -> mx.array:
        """[B, T, heads * d] -> [B, heads, T, d], normalised."""
        spec, (batch, length, _) = self._spec, x.shape
        if norm is not None and spec.qk_norm == "full":
            x = norm(x)
        x = x.reshape(batch, length, heads, spec.head_dim)
        if norm is not None and spec.qk_norm == "head":
            x = norm(x)
        return x.swapaxes(1, 2)


def attend(q: mx.array, keys: mx.array, values: mx.array, *, scale: float, window: int | None, step: Step) -> mx.array:
    """Causal attention of the last T slots over all S, in blocks of queries so that the scores stay in bounds.

    Args:
        q: [B, H, T, d]; keys: [B, HK, S, d]; values: [B, HK, S, e].

    Returns:
        [B, H, T, e].
    """
    length, total = q.shape[2], keys.shape[2]
    forced = _force_fused(q, values, step.slots is not None or window is not None)
    block = int(length) if forced else _block(q, total)
    outputs = []
    for start in range(0, length, block):
        stop = min(start + block, length)
        last = total - length + stop  # slots these queries may read: none behind the last of them
        first = 0 if window is None or step.slots is not None else max(0, last - (stop - start) - window + 1)
        mask = _mask(step, window, start, stop, first, last)
        part = q[:, :, start:stop] if block < length else q
        outputs.append(_attend(part, keys[:, :, first:last], values[:, :, first:last], scale, mask, forced))
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=2)


def _force_fused(q: mx.array, values: mx.array, masked: bool) -> bool:
    """Whether to insist on a fused kernel that MLX would not choose by itself."""
    if q.shape[2] == 1 or not on_metal() or q.shape[3] in _FUSED_DIMS:
        return False
    return _fused_exists(q.shape[3], values.shape[3], q.dtype, masked)


@lru_cache
def _fused_exists(dim: int, value_dim: int, dtype: mx.Dtype, masked: bool) -> bool:
    q, k, v = (mx.zeros((1, 1, 32, width), dtype=dtype) for width in (dim, dim, value_dim))
    mask = mx.ones((32, 32), dtype=mx.bool_) if masked else "causal"
    try:
        mx.eval(mx.fast.scaled_dot_product_attention(q, k, v, scale=1.0, mask=mask, force_fused=True))
    except (ValueError, RuntimeError):
        return False
    return True


def _attend(
    q: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array | str | None, forced: bool
) -> mx.array:
    (batch, heads, length, _), (kv_heads, total) = q.shape, keys.shape[1:3]
    if not vectorises(q.dtype, batch * heads * length * total):
        return mx.fast.scaled_dot_product_attention(q, keys, values, scale=scale, mask=mask, force_fused=forced)
    # The CPU has no fused kernel: MLX would do the same steps with a slower exponential.
    scores = (q * scale).reshape(batch, kv_heads, -1, q.shape[3]) @ keys.swapaxes(-1, -2)
    scores = scores.reshape(batch, heads, length, total)
    if mask is not None:
        seen = mx.tri(length, total, total - length, dtype=mx.bool_) if isinstance(mask, str) else mask
        scores = scores + mx.where(seen, 0.0, -mx.inf)
    weights, sums = softmax_weights(scores)
    y = weights.reshape(batch, kv_heads, -1, total) @ values
    return y.reshape(batch, heads, length, -1) / sums


def _block(q: mx.array, total: int) -> int:
    batch, heads, length, dim = q.shape
    if length == 1 or (on_metal() and dim in _FUSED_DIMS):
        return int(length)
    return max(_SMALLEST_BLOCK, min(_LARGEST_BLOCK, _SCORES // (batch * heads * total)))


def _mask(step: Step, window: int | None, start: int, stop: int, first: int, last: int) -> mx.array | str | None:
    if step.slots is not None:
        return step.ragged_mask(window)[:, :, start:stop, :last]
    queries = stop - start
    if window is not None and last - first > window:
        query = mx.arange(last - queries, last)[:, None]
        key = mx.arange(first, last)[None]
        return (key <= query) & (key > query - window)
    return "causal" if queries > 1 else None
