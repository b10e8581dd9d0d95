"""The one door to every recurrence: arguments are checked, a path is chosen, padding is made neutral."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mlxlin.backend import mx

from . import chunkwise, step
from .rules import Inputs, check

CHUNK = 64
STEPS = 4


def run(
    rule: str,
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    g: mx.array | None = None,
    beta: mx.array | None = None,
    a: mx.array | None = None,
    b: mx.array | None = None,
    state: Any = None,
    lengths: mx.array | None = None,
    normalize: bool = False,
    chunk: int | None = None,
) -> tuple[mx.array, Any]:
    x = check(rule, q, k, v, g=g, beta=beta, a=a, b=b, state=state, lengths=lengths, normalize=normalize)
    y, S, Z = _run(x, chunk)
    return y, S if Z is None else (S, Z)


def _run(x: Inputs, chunk: int | None) -> tuple[mx.array, mx.array, mx.array | None]:
    if x.tokens == 0:
        return mx.zeros((x.batch, 0, *x.v.shape[2:]), x.v.dtype), x.S, x.Z
    n = x.substeps
    if x.lengths is not None:
        x = neutral_padding(x)
    if n > 1:
        x = flattened(x)
    y, S, Z = step.run(x) if x.tokens <= STEPS and chunk is None else chunkwise.run(x, chunk or CHUNK)
    return (y if n == 1 else y[:, n - 1 :: n]), S, Z


def neutral_padding(x: Inputs) -> Inputs:
    """Tokens past a row's length leave the state as it is: their values are selected away, for 0 * NaN is NaN."""
    assert x.lengths is not None
    real = mx.arange(x.tokens) < x.lengths[:, None]
    by_substep = {x.tokens: real, x.k.shape[1]: mx.repeat(real, x.substeps, axis=1)}

    def select(z: mx.array | None) -> mx.array | None:
        if z is None:
            return None
        mask = by_substep[z.shape[1]]
        return mx.where(mask.reshape(*mask.shape, *[1] * (z.ndim - 2)), z, mx.zeros((), z.dtype))

    kept = {name: select(getattr(x, name)) for name in ("q", "k", "v", "g", "beta", "a", "b")}
    return replace(x, lengths=None, **kept)


def flattened(x: Inputs) -> Inputs:
    """Sub-tokens as tokens: the decay acts on the first of each n, the query reads after the last."""
    n = x.substeps

    def spread(z: mx.array, at: int) -> mx.array:
        parts = [z if i == at else mx.zeros_like(z) for i in range(n)]
        return mx.stack(parts, axis=2).reshape(z.shape[0], -1, *z.shape[2:])

    return replace(x, q=spread(x.q, n - 1), g=None if x.g is None else spread(x.g, 0))
