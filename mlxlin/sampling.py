"""Logits to tokens, on the device, row by row independent: a row of a batch gets the tokens it would get alone.

The order is that of transformers: logit bias and penalties, temperature, then top-k, top-p and min-p, each on what the
one before left. Nothing here waits for the device.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlxlin.backend import mx, one_dispatch
from mlxlin.errors import InputError

WINDOW = 256  # tokens, of prompt and reply together, that the penalties look back on
_BLOCK = 256  # random numbers drawn at a time
_LARGEST = 1e30  # what options may do to a logit stays finite in float32


@dataclass(frozen=True)
class Sampling:
    """How to choose the next token; the default always takes the likeliest.

    Attributes:
        temperature: divides the logits; 0, or less than 1e-30, takes the likeliest token and leaves the next three
            without effect.
        top_k: keep this many of the likeliest tokens; 0 keeps all.
        top_p: keep the likeliest tokens whose probabilities add up to this; ties with the last of them stay too.
        min_p: drop tokens less probable than this fraction of the likeliest one.
        repeat_penalty: divides positive and multiplies negative logits of the last WINDOW tokens, prompt included
            (Keskar et al. 2019); 1 is off. Applies at any temperature, like the next two.
        presence_penalty: subtracted from the logits of the same tokens.
        logit_bias: token id -> what is added to its logit; -inf forbids the token.
        seed: makes choices repeatable; None for different ones every time.

    Raises:
        InputError: a value outside its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None

    def __post_init__(self) -> None:
        _check("temperature", self.temperature, 0 <= _number(self.temperature) <= _LARGEST, "from 0 to 1e30")
        _check("top_k", self.top_k, _whole(self.top_k) and self.top_k >= 0, "a whole number, 0 or more")
        _check("top_p", self.top_p, 0 < _number(self.top_p) <= 1, "above 0 and at most 1")
        _check("min_p", self.min_p, 0 <= _number(self.min_p) <= 1, "between 0 and 1")
        positive = 1 / _LARGEST <= _number(self.repeat_penalty) <= _LARGEST
        _check("repeat_penalty", self.repeat_penalty, positive, "above 0: from 1e-30 to 1e30")
        bounded = -_LARGEST <= _number(self.presence_penalty) <= _LARGEST
        _check("presence_penalty", self.presence_penalty, bounded, "from -1e30 to 1e30")
        seeded = self.seed is None or (_whole(self.seed) and 0 <= self.seed < 2**64)
        _check("seed", self.seed, seeded, "a whole number from 0 to 2^64 - 1")
        for token, bias in self.logit_bias.items():
            added = _number(bias) == -math.inf or -_LARGEST <= _number(bias) <= _LARGEST
            _check("logit_bias", {token: bias}, _whole(token) and token >= 0 and added, "at most 1e30 in size, or -inf")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature < 1 / _LARGEST

    @property
    def looks_back(self) -> bool:
        """Whether the choice depends on earlier tokens."""
        return self.repeat_penalty != 1 or self.presence_penalty != 0


def _number(value: Any) -> float:
    """NaN, which fails every comparison, for what is no number or too large for one."""
    try:
        return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan
    except OverflowError:
        return math.nan


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check(name: str, value: Any, fits: bool, wanted: str) -> None:
    if not fits:
        raise InputError(f"{name} is {value!r}; it must be {wanted}.", "Leave it out for its default.")


class Sampler:
    """Chooses tokens for the rows of a batch, step after step.

    Args:
        sampling: how.
        recent: the tokens each row has read, for the penalties; its length is the number of rows. Every row draws from
            the same seed, so that it does not matter which others it shares a batch with.
        rows: number of rows where `recent` is left out.
    """

    def __init__(self, sampling: Sampling, recent: Sequence[Sequence[int]] | None = None, rows: int = 1) -> None:
        self.sampling = sampling
        self._rows = rows if recent is None else len(recent)
        self._recent = _window(recent) if sampling.looks_back and recent is not None else None
        seeds = [secrets.randbits(64) if sampling.seed is None else sampling.seed for _ in range(self._rows)]
        self._keys = [mx.random.key(seed) for seed in seeds]
        self._uniform: mx.array | None = None  # [B, _BLOCK]
        self._drawn = 0
        bias = dict(sampling.logit_bias)
        self._bias = (list(bias), list(bias.values())) if bias else None

    def __call__(self, logits: mx.array) -> mx.array:
        """Logits float32 [B, V] or [B, 1, V] -> tokens [B] int32; -1 in a row whose logits are not all finite."""
        if logits.ndim == 3:
            logits = logits[:, -1]
        if logits.shape[0] != self._rows:
            raise InputError(f"The sampler has {self._rows} rows, the logits {logits.shape[0]}.")
        adjusted = self._penalise(self._add_bias(logits))
        if self.sampling.greedy:
            token = mx.argmax(adjusted, axis=-1)
        else:
            token = _draw(adjusted, self._next_uniform(), self.sampling)
        token = _or_none(mx.all(_finite(logits), axis=-1), token)
        if self.sampling.looks_back:
            before = token[:, None] if self._recent is None else self._recent[:, -(WINDOW - 1) :]
            self._recent = token[:, None] if self._recent is None else mx.concatenate([before, token[:, None]], axis=1)
        return token

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these rows only."""
        picked = mx.array(list(rows), dtype=mx.int32)
        self._rows = len(rows)
        self._keys = [self._keys[row] for row in rows]
        self._recent = None if self._recent is None else self._recent[picked]
        self._uniform = None if self._uniform is None else self._uniform[picked]

    def _add_bias(self, logits: mx.array) -> mx.array:
        if self._bias is None:
            return logits
        tokens, biases = self._bias
        if max(tokens) >= logits.shape[-1]:
            raise InputError(f"logit_bias names token {max(tokens)}; the vocabulary has {logits.shape[-1]}.")
        return logits.at[:, mx.array(tokens)].add(mx.array(biases))

    def _penalise(self, logits: mx.array) -> mx.array:
        if self._recent is None:
            return logits
        seen = mx.maximum(self._recent, 0)  # -1 marks numbers that are given up on anyway
        found = mx.take_along_axis(logits, seen, axis=-1)
        penalty = self.sampling.repeat_penalty
        found = mx.where(found > 0, found / penalty, found * penalty) - self.sampling.presence_penalty
        return mx.put_along_axis(logits, seen, found, axis=-1)  # a token seen twice gets the same value twice

    def _next_uniform(self) -> mx.array:
        """One number in [0, 1) for each row, [B, 1]; drawn in blocks, from each row's own key."""
        if self._drawn % _BLOCK == 0:
            pairs = [mx.random.split(key) for key in self._keys]
            self._keys = [pair[0] for pair in pairs]
            self._uniform = mx.stack([mx.random.uniform(shape=(_BLOCK,), key=pair[1]) for pair in pairs])
        assert self._uniform is not None
        at = self._drawn % _BLOCK
        self._drawn += 1
        return self._uniform[:, at : at + 1]


def _window(recent: Sequence[Sequence[int]]) -> mx.array | None:
    """The last tokens of each row, [B, W]; shorter rows repeat their own last token, which changes nothing."""
    rows = [list(row[-WINDOW:]) for row in recent]
    width = max(map(len, rows))
    if not all(rows):
        if width:
            raise InputError("The penalties need the tokens of every row or of none.")
        return None
    return mx.array([row + row[-1:] * (width - len(row)) for row in rows], dtype=mx.int32)


@one_dispatch
def _finite(logits: mx.array) -> mx.array:
    return mx.isfinite(logits)


@one_dispatch
def _or_none(sound: mx.array, token: mx.array) -> mx.array:
    """int32 tokens, -1 where the logits are not sound."""
    return mx.where(sound, token.astype(mx.int32), -1)


@one_dispatch
def _weights(logits: mx.array, top: mx.array, temperature: mx.array) -> mx.array:
    """Probabilities up to a factor: 1 for the largest logit, `top`."""
    return mx.exp((logits - top) / temperature)


@one_dispatch
def _reaches(cumulative: mx.array, total: mx.array, uniform: mx.array, weights: mx.array) -> mx.array:
    return (cumulative > uniform * total) & (weights > 0)


@one_dispatch
def _not_below(weights: mx.array, threshold: mx.array) -> mx.array:
    return mx.where(weights >= threshold, weights, 0)


@one_dispatch
def _needed(ascending: mx.array, cumulative: mx.array, total: mx.array, top_p: mx.array) -> mx.array:
    """Infinity in place of the weights behind likelier ones that reach the share `top_p` by themselves."""
    return mx.where((total - cumulative) < top_p * total, ascending, mx.inf)


def _draw(logits: mx.array, uniform: mx.array, sampling: Sampling) -> mx.array:
    """One token [B] of each row of logits [B, V], by where `uniform` [B, 1] falls among the cumulative probabilities.

    With top-k only k numbers are left to work on. They stay in the order of the vocabulary: a row then draws the same
    token however it was partitioned.
    """
    ids = None
    vocab = logits.shape[-1]
    if 0 < sampling.top_k < vocab:
        ids = mx.sort(mx.argpartition(logits, vocab - sampling.top_k, axis=-1)[:, vocab - sampling.top_k :], axis=-1)
        logits = mx.take_along_axis(logits, ids, axis=-1)
    weights = _weights(logits, mx.max(logits, axis=-1, keepdims=True), mx.array(sampling.temperature))
    if sampling.top_p < 1:
        weights = _keep_top_p(weights, sampling.top_p)
    if sampling.min_p > 0:
        weights = _not_below(weights, mx.array(sampling.min_p))  # the likeliest one weighs 1
    cumulative = mx.cumsum(weights, axis=-1)
    hit = _reaches(cumulative, cumulative[:, -1:], uniform, weights)
    # rounding of the sum may leave no hit for a number close to 1
    at = mx.where(mx.any(hit, axis=-1), mx.argmax(hit, axis=-1), mx.argmax(weights, axis=-1))
    return at if ids is None else mx.take_along_axis(ids, at[:, None], axis=-1)[:, 0]


def _keep_top_p(weights: mx.array, top_p: float) -> mx.array:
    """Zero what lies outside the likeliest part of mass `top_p`; weights [B, V] need not add up to 1."""
    ascending = mx.sort(weights, axis=-1)
    cumulative = mx.cumsum(ascending, axis=-1)
    needed = _needed(ascending, cumulative, cumulative[:, -1:], mx.array(top_p))
    return _not_below(weights, mx.min(needed, axis=-1, keepdims=True))


def log_probabilities(logits: mx.array, tokens: mx.array, top: int) -> tuple[mx.array, mx.array, mx.array]:
    """Natural-log probabilities under the model itself, before any sampling option.

    Args:
        logits: float32 [B, V].
        tokens: [B], the chosen ones.
        top: how many of the likeliest to list as well.

    Returns:
        Of the chosen tokens [B]; ids [B, top] and log probabilities [B, top] of the likeliest, in descending order.
    """
    normaliser = mx.logsumexp(logits, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(logits, mx.maximum(tokens, 0)[:, None], axis=-1)[:, 0] - normaliser[:, 0]
    first = logits.shape[-1] - min(top, logits.shape[-1])
    ids = mx.argpartition(logits, min(first, logits.shape[-1] - 1), axis=-1)[:, first:]
    values = mx.take_along_axis(logits, ids, axis=-1)
    order = mx.argsort(-values, axis=-1)
    return chosen, mx.take_along_axis(ids, order, axis=-1), mx.take_along_axis(values, order, axis=-1) - normaliser
