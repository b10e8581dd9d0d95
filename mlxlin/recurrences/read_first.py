"""A state that is read before a token is written, and the token's own write by a weight of its own (RWKV-6).

    y_t = S_{t-1} q_t + (q_t . (u * k_t)) v_t,        S_t = S_{t-1} diag(exp(g_t)) + v_t k_t^T

Reading first is reading behind the writes of the token before, so the recurrence runs over T + 1 slots in which k, v
and g come one slot late: slot t reads what the tokens before t have left, and the last one only writes.
"""

from __future__ import annotations

from mlxlin.backend import mx

from .run import run

_BEHIND, _BEFORE = [(0, 0), (0, 1), (0, 0), (0, 0)], [(0, 0), (1, 0), (0, 0), (0, 0)]


def run_read_first(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    g: mx.array,
    bonus: mx.array,
    state: mx.array,
    lengths: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """The rule `gated` in this way; arguments, results and errors as of `run`, and the bonus u [H, K]."""
    y, S = run(
        "gated",
        mx.pad(q, _BEHIND),
        mx.pad(k, _BEFORE),
        mx.pad(v, _BEFORE),
        g=mx.pad(g, _BEFORE),
        state=state,
        lengths=None if lengths is None else lengths + 1,
    )
    assert isinstance(S, mx.array)
    own, groups = (q * k * bonus).sum(axis=-1, keepdims=True), v.shape[2] // q.shape[2]
    y = y[:, :-1] + (own if groups == 1 else mx.repeat(own, groups, axis=2)) * v
    if lengths is not None:
        y = mx.where((mx.arange(y.shape[1]) < lengths[:, None])[:, :, None, None], y, 0)
    return y, S
