"""Decoding: a few tokens, one after the other, with as few operations over the state as possible."""

from __future__ import annotations

from mlxlin.backend import mx

from .reference import NORMALIZER_EPS
from .rules import Inputs


def run(x: Inputs) -> tuple[mx.array, mx.array, mx.array | None]:
    """The recurrence token by token (one sub-step per token); meant for a handful of tokens."""
    S, Z = x.S, x.Z
    outputs = []
    for t in range(x.tokens):
        y, S, Z = _step(x, t, S, Z)
        outputs.append(y)
    return mx.stack(outputs, axis=1).astype(x.v.dtype), S, Z


def _step(x: Inputs, t: int, S: mx.array, Z: mx.array | None) -> tuple[mx.array, mx.array, mx.array | None]:
    """One token: y [B, HV, V] float32 and the new state."""
    groups = x.value_heads // x.heads

    def head(z: mx.array) -> mx.array:
        z = z[:, t].astype(mx.float32)
        return z if groups == 1 else mx.repeat(z, groups, axis=1)

    q, k, v = head(x.q), head(x.k), x.v[:, t].astype(mx.float32)
    read = None if x.a is None else (S @ head(x.a)[..., None])[..., 0]
    if x.g is not None:
        w = mx.exp(x.g[:, t])
        S = S * (w[..., None, None] if w.ndim == 2 else w[:, :, None, :])
    if x.beta is not None:
        v = x.beta[:, t, :, None].astype(mx.float32) * (v - (S @ k[..., None])[..., 0])
    S = S + v[..., None] * k[:, :, None, :]
    if read is not None and x.b is not None:
        S = S + read[..., None] * head(x.b)[:, :, None, :]
    y = (S @ q[..., None])[..., 0]
    if Z is not None:
        Z = Z + k
        y = y / ((Z * q).sum(axis=-1, keepdims=True) + NORMALIZER_EPS)
    return y, S, Z
