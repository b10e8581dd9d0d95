"""The definition: one token after the other in float64, and the parallel forms of the textbooks.

Slow and plain on purpose. Every other path is tested against `scan`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mlxlin.backend import mx

from .rules import Inputs, check

Array = npt.NDArray[np.float64]
NORMALIZER_EPS = 1e-10


def scan(
    rule: str,
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    g: mx.array | None = None,
    beta: mx.array | None = None,
    a: mx.array | None = None,
    b: mx.array | None = None,
    state: mx.array | tuple[mx.array, mx.array] | None = None,
    lengths: mx.array | None = None,
    normalize: bool = False,
) -> tuple[mx.array, mx.array | tuple[mx.array, mx.array]]:
    """Run a recurrence token by token in float64; arguments and errors as in `mlxlin.recurrences.run`.

    Returns:
        y [B, T, HV, V] in v's dtype and the float32 state, both rounded once from float64.
    """
    x = check(rule, q, k, v, g=g, beta=beta, a=a, b=b, state=state, lengths=lengths, normalize=normalize)
    y, S, Z = scan_float64(x)
    state = _float32(S)
    return _float32(y).astype(v.dtype), state if Z is None else (state, _float32(Z))


def scan_float64(x: Inputs) -> tuple[Array, Array, Array | None]:
    """The recurrence in float64: y [B, T, HV, V], S [B, HV, V, K] and, where normalised, Z [B, HV, K]."""
    groups = x.value_heads // x.heads
    q, k = (_float64(z).repeat(groups, axis=2) for z in (x.q, x.k))
    a, b = (None if z is None else _float64(z).repeat(groups, axis=2) for z in (x.a, x.b))
    v, S = _float64(x.v), _float64(x.S)
    Z = None if x.Z is None else _float64(x.Z)
    beta = None if x.beta is None else _float64(x.beta)
    w = None if x.g is None else np.exp(_float64(x.g))
    lengths = np.full(x.batch, x.tokens) if x.lengths is None else np.array(x.lengths)
    y = np.zeros((*x.q.shape[:2], *v.shape[2:]))
    for t in range(x.tokens):
        new, new_Z = S, Z
        for s in range(t * x.substeps, (t + 1) * x.substeps):
            before = new
            if w is not None and s == t * x.substeps:
                rows = x.decay == "value"
                new = new * (w[:, t, ..., None] if rows else w[:, t].reshape(x.batch, x.value_heads, 1, -1))
            if x.rule.write == "add":
                new = new + _outer(v[:, s], k[:, s])
            elif beta is not None:
                answer = _apply(new, k[:, s]) if a is None else _apply(before, a[:, s])
                new = new + _outer(beta[:, s, :, None] * (v[:, s] - answer), k[:, s])
            elif a is not None and b is not None:
                new = new + _outer(_apply(before, a[:, s]), b[:, s]) + _outer(v[:, s], k[:, s])
        output = _apply(new, q[:, t])
        if Z is not None:
            new_Z = Z + k[:, t]
            output = output / ((new_Z * q[:, t]).sum(-1, keepdims=True) + NORMALIZER_EPS)
        real = t < lengths
        S = np.where(real[:, None, None, None], new, S)
        Z = None if Z is None or new_Z is None else np.where(real[:, None, None], new_Z, Z)
        y[:, t] = np.where(real[:, None, None], output, 0)
    return y, S, Z


def _float64(x: mx.array) -> Array:
    return np.array(x.astype(mx.float32)).astype(np.float64)


def _float32(x: Array) -> mx.array:
    return mx.array(x.astype(np.float32))


def _apply(S: Array, x: Array) -> Array:
    """S x per head: [B, HV, V, K] and [B, HV, K] to [B, HV, V]."""
    product: Array = np.einsum("bhvk,bhk->bhv", S, x)
    return product


def _outer(u: Array, k: Array) -> Array:
    return u[..., :, None] * k[..., None, :]


def softmax_attention(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
    """Causal softmax attention softmax(Q K^T) V, the member whose state grows.

    q, k [B, T, H, K], v [B, T, H, V]; q arrives scaled. Returns [B, T, H, V] in float32.
    """
    q, k, v = (x.astype(mx.float32).swapaxes(1, 2) for x in (q, k, v))
    scores = mx.where(mx.tri(q.shape[2]) > 0, q @ k.swapaxes(-1, -2), -mx.inf)
    return (mx.softmax(scores, axis=-1) @ v).swapaxes(1, 2)


def masked_attention(q: mx.array, k: mx.array, v: mx.array, g: mx.array | None = None) -> mx.array:
    """(Q K^T o L) V: a decaying recurrence from a zero state, written as attention with a multiplicative mask.

    L[t, j] is the product of the decays after token j up to token t, 0 for j > t. It multiplies the scores: added to
    them before a softmax it would be another function.

    q, k [B, T, H, K], v [B, T, H, V], g [B, T, H] natural log of the decay (None: no decay). Returns float32.
    """
    q, k, v = (x.astype(mx.float32).swapaxes(1, 2) for x in (q, k, v))
    return ((q @ k.swapaxes(-1, -2) * decay_mask(q.shape[2], g)) @ v).swapaxes(1, 2)


def decay_mask(tokens: int, g: mx.array | None = None) -> mx.array:
    """The lower-triangular mask L: [T, T] of ones without g, [B, H, T, T] with g [B, T, H]."""
    causal = mx.tri(tokens)
    if g is None:
        return causal
    # sums over (j, t] themselves, not differences of sums from 0, which lose the small terms behind large ones
    steps = mx.where(mx.tri(tokens, k=-1) > 0, g.swapaxes(1, 2)[..., None], 0.0)
    return mx.where(causal > 0, mx.exp(mx.cumsum(steps, axis=-2)), 0.0)


def regrouped(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
    """Q (K^T V): without a causal mask the product regroups, and its cost is linear in T.

    q, k [B, T, H, K], v [B, T, H, V]. Returns [B, T, H, V] in float32.
    """
    q, k, v = (x.astype(mx.float32).swapaxes(1, 2) for x in (q, k, v))
    return (q @ (k.swapaxes(-1, -2) @ v)).swapaxes(1, 2)
