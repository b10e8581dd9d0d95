"""Decoding: a few tokens one after the other, in as few passes over the state as possible.

The state is viewed as [B, H, R V, K]: value heads that share a key are rows of one matrix, so each token costs one
scaling, one or two rank-one updates and two or three matrix-vector products, with no copies of keys and no joins.
"""

from __future__ import annotations

from mlxlin.backend import mx

from .decay import exp
from .reference import NORMALIZER_EPS
from .rules import Inputs


def run(x: Inputs) -> tuple[mx.array, mx.array, mx.array | None]:
    """The recurrence token by token (one sub-step per token); meant for a handful of tokens."""
    S, Z = x.S, x.Z
    outputs = []
    for t in range(x.tokens):
        y, S, Z = step(x, t, S, Z)
        outputs.append(y)
    y = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=1)
    return y.astype(x.v.dtype), S, Z


def step(x: Inputs, t: int, S: mx.array, Z: mx.array | None) -> tuple[mx.array, mx.array, mx.array | None]:
    """Token t: y [B, 1, HV, V] float32, S [B, HV, V, K] and Z."""
    B, HV, V, K = S.shape
    H = x.heads
    shared = (B, H, HV // H * V, K)

    def column(z: mx.array) -> mx.array:
        return z[:, t].astype(mx.float32).reshape(B, H, -1, 1)

    q, k, u = column(x.q), column(x.k), column(x.v)
    old = S.reshape(shared)
    if x.g is not None:
        g = x.g[:, t, :, :, None] if x.decay == "value" else x.g[:, t].reshape(B, HV, 1, -1)
        # What is only added is never corrected: rounding exp(g) once per token, the same way each time, would drift
        # (1e-4 after 8,192 tokens of g = -1e-4). Small changes are exact, and their sums round either way.
        S = S + S * mx.expm1(g) if x.rule.write == "add" else S * exp(g)
    S = S.reshape(shared)
    if x.beta is not None:
        beta = x.beta[:, t].astype(mx.float32).reshape(B, HV, 1, 1)
        answering, key = (S, k) if x.a is None else (old, column(x.a))
        u = (mx.addmm(u, answering, key, alpha=-1.0).reshape(B, HV, V, 1) * beta).reshape(B, H, -1, 1)
    S = mx.addmm(S, u, k.swapaxes(-1, -2))
    if x.a is not None and x.b is not None:
        S = mx.addmm(S, old @ column(x.a), column(x.b).swapaxes(-1, -2))
    y = (S @ q).reshape(B, 1, HV, V)
    if Z is not None:
        groups = Z.reshape(B, H, -1, K) + k.swapaxes(-1, -2)
        y = y / ((groups @ q).reshape(B, 1, HV, 1) + NORMALIZER_EPS)
        Z = groups.reshape(Z.shape)
    return y, S.reshape(B, HV, V, K), Z
