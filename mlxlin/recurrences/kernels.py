"""The Metal kernels as paths of `run`: the calls they take, and whether this machine computes them right."""

from __future__ import annotations

from mlxlin.backend import mx, on_metal
from mlxlin.metal import recurrence
from mlxlin.metal.recurrence import SIZES, VALUE_SIZES, Arguments, columns_for, rows_for, supports

from .probe import trusted
from .reference import NORMALIZER_EPS
from .rules import DecayKind, Inputs

Result = tuple[mx.array, mx.array, mx.array | None]
HEADS = f"K {min(SIZES)} to {max(SIZES)}, V to {max(VALUE_SIZES)}"  # for people; `supports` knows exactly
CHUNKED: tuple[DecayKind, ...] = ("none", "head", "channel")  # a decay of values comes apart into no products


def scan(x: Inputs, rows: int | None = None) -> Result:
    """Token by token, every rule."""
    return recurrence.scan(arguments(x), normalize=x.Z is not None, eps=NORMALIZER_EPS, rows=rows)


def chunk(x: Inputs, columns: int | None = None) -> Result:
    """Sixteen tokens at a time, every rule without a normaliser whose decay is `CHUNKED`."""
    return *recurrence.chunk(arguments(x), columns=columns), None


def takes_scan(x: Inputs) -> bool:
    rows = rows_for(*_size(x))
    return _fits(x) and trusted("scan", lambda sample: scan(sample, rows), x, rows)


def takes_chunk(x: Inputs) -> bool:
    columns = columns_for(*_size(x))
    return _fits(x) and x.Z is None and trusted("chunk", lambda sample: chunk(sample, columns), x, columns)


def _size(x: Inputs) -> tuple[int, int, int]:
    """K, V and all value heads of the batch."""
    return x.q.shape[3], x.v.shape[3], x.batch * x.value_heads


def _fits(x: Inputs) -> bool:
    return on_metal() and supports(x.q.shape[3], x.v.shape[3])


def arguments(x: Inputs) -> Arguments:
    """What the kernels are given. A delta rule with a reader a of its own is a low-rank write to them:

    S' + beta (v - S a) k^T = S' + (S a) (-beta k)^T + (beta v) k^T, for every value head
    """
    if x.rule.reader and x.beta is not None and x.a is not None:
        q, k, a = (mx.repeat(z, x.value_heads // x.heads, axis=2) for z in (x.q, x.k, x.a))
        beta = x.beta[..., None].astype(mx.float32)
        return Arguments(q, k, x.v * beta, x.g, None, a, -beta * k, x.S, x.Z, x.lengths, x.v.dtype)
    values = x.decay == "value"
    return Arguments(x.q, x.k, x.v, x.g, x.beta, x.a, x.b, x.S, x.Z, x.lengths, decays_values=values)
