"""The Metal kernels as paths of `run`: the calls they take, and whether this machine computes them right."""

from __future__ import annotations

from mlxlin.backend import mx, on_metal
from mlxlin.metal import recurrence
from mlxlin.metal.recurrence import Arguments, supports

from .probe import trusted
from .reference import NORMALIZER_EPS
from .rules import DecayKind, Inputs, Rule

Result = tuple[mx.array, mx.array, mx.array | None]


def scan(x: Inputs) -> Result:
    """Token by token, every rule."""
    return recurrence.scan(_arguments(x), normalize=x.Z is not None, eps=NORMALIZER_EPS)


def chunk(x: Inputs) -> Result:
    """Sixteen tokens at a time, every rule without a normaliser."""
    return *recurrence.chunk(_arguments(x)), None


def know(rule: Rule, decay: DecayKind) -> bool:
    """Whether there are kernels for a rule with that decay."""
    return decay != "value" and not rule.reader


def takes_scan(x: Inputs) -> bool:
    return _fits(x) and trusted("scan", scan, x)


def takes_chunk(x: Inputs) -> bool:
    return _fits(x) and x.Z is None and trusted("chunk", chunk, x)


def _fits(x: Inputs) -> bool:
    return on_metal() and know(x.rule, x.decay) and supports(x.q.shape[3], x.v.shape[3])


def _arguments(x: Inputs) -> Arguments:
    return Arguments(x.q, x.k, x.v, x.g, x.beta, x.a, x.b, x.S, x.Z, x.lengths)
