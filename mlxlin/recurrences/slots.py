"""Gated slot attention: softmax attention over a few memories instead of over all tokens (arXiv:2409.07146).

Each token is written into every slot as far as the slot lets go of what it holds, 1 - exp(g). One recurrence reads how
well a query fits the keys in each slot; behind a softmax, another reads the values there.
"""

from __future__ import annotations

from mlxlin.backend import mx

from .run import run


def run_slots(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    g: mx.array,
    keys: mx.array,
    values: mx.array,
    lost: mx.array | None = None,
    lengths: mx.array | None = None,
) -> tuple[mx.array, mx.array, mx.array]:
    """The two recurrences over M slots, each with a log decay of its own.

    Args:
        q, k, v, lengths: as of `run`, H heads of each.
        g: float32 [B, T, H, M].
        lost: what a slot lets go of, 1 - exp(g), where that is known, in the shape of g.
        keys, values: the states, float32 [B, H, M, K] and [B, H, V, M].

    Returns:
        y [B, T, H, V] in v's dtype (0 at padding), and the states after the last token.
    """
    lost = -mx.expm1(g) if lost is None else lost
    fits, keys_after = run("gated_values", q, k, lost, g=g, state=keys, lengths=lengths)
    y, values_after = run("gated", mx.softmax(fits, axis=-1), lost, v, g=g, state=values, lengths=lengths)
    assert isinstance(keys_after, mx.array) and isinstance(values_after, mx.array)
    return y, keys_after, values_after
