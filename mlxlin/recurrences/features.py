"""Activations, feature maps and norms of a mixer's vectors."""

from __future__ import annotations

from mlxlin.backend import mx
from mlxlin.metal.mixer import VECTOR_EPS, Activation, Features, VectorNorm

_DPFP_SHIFTS = 4


def activated(kind: Activation, x: mx.array) -> mx.array:
    """x behind an activation; elu is elu(x) + 1 (Katharopoulos et al. 2020)."""
    if kind == "none":
        return x
    if kind == "relu":
        return mx.maximum(x, 0)
    if kind == "elu":
        return mx.where(x > 0, x + 1, mx.exp(mx.minimum(x, 0)))
    if kind == "silu_twice":
        return activated("silu", activated("silu", x))
    return x * mx.sigmoid(x) if kind == "silu" else mx.sigmoid(x)


def mapped(kind: Features, x: mx.array) -> mx.array:
    """The features [..., K] of vectors x [..., D], as `mlxlin.metal.mixer.FusedSpec` names them."""
    if kind == "dpfp":
        return dpfp(x)
    if kind == "product":
        one, two = mx.split(x, 2, axis=-1)
        return one * two
    if kind == "hedgehog":
        return mx.softmax(mx.concatenate([2 * x, -2 * x], axis=-1), axis=-1)
    return activated(kind, x)


def dpfp(x: mx.array) -> mx.array:
    """Deterministic parameter-free projection, D -> 8 D (Schlag et al. 2021, nu = 4)."""
    both = mx.concatenate([mx.maximum(x, 0), mx.maximum(-x, 0)], axis=-1)
    return mx.concatenate([both * mx.roll(both, shift, -1) for shift in range(1, _DPFP_SHIFTS + 1)], axis=-1)


def normed(kind: VectorNorm, x: mx.array, gain: mx.array | None = None, rms_eps: float = 0.0) -> mx.array:
    """x [..., K] with each vector divided by its norm, as `mlxlin.metal.mixer.FusedSpec` names them."""
    if kind == "none":
        return x
    if kind == "rms":
        return mx.fast.rms_norm(x, None if gain is None else gain.astype(x.dtype), rms_eps)
    eps = VECTOR_EPS[kind]
    if kind == "l2":
        return x * mx.rsqrt((x * x).sum(axis=-1, keepdims=True) + eps)
    if kind == "sum":
        return x / mx.maximum(mx.abs(x).sum(axis=-1, keepdims=True), eps)
    return x / (x.sum(axis=-1, keepdims=True) + eps)
