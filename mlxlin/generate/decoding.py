"""Decode: one token after the other, the next one always under way."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from mlxlin.backend import mx
from mlxlin.errors import InputError, NumericsError
from mlxlin.generate.records import Finish, Step
from mlxlin.sampling import Sampler, log_probabilities

if TYPE_CHECKING:
    from mlxlin.models import Model
    from mlxlin.state import State

CLEAR_EVERY = 256  # decode steps after which memory kept for reuse is given back: keys and values outgrow it


@dataclass(frozen=True)
class Ahead:
    """Tokens that are being computed, [B] int32, and their probabilities if asked for."""

    token: mx.array
    logprobs: tuple[mx.array, mx.array, mx.array] | None

    def rows(self, indices: Sequence[int]) -> Ahead:
        """These rows of the batch only."""
        assert self.logprobs is None
        return Ahead(self.token[mx.array(list(indices))], None)


def launch(logits: mx.array, state: State, sampler: Sampler, top: int | None = None) -> Ahead:
    """Sample the next tokens and begin to compute them, and the state before them, without waiting."""
    token = sampler(logits)
    logprobs = None if top is None else log_probabilities(logits[:, -1], token, top)
    mx.async_eval([token, *(logprobs or ()), *state.leaves()])
    return Ahead(token, logprobs)


def not_finite(count: int, row: int | None = None) -> NumericsError:
    """The error for a token whose logits were not finite."""
    where = "" if row is None else f" of prompt {row + 1}"
    return NumericsError(
        f"The logits for token {count}{where} are not finite (NaN or infinite).",
        "The checkpoint may be damaged, or its dtype too narrow for its values.",
    )


class Decoding:
    """The tokens that follow a prompt; iterate over it. The token that stops it is not handed out.

    Token n + 1 is being computed when token n is handed out. `tokens` and `state` belong together at any time, also
    after an interrupt or when the iteration is given up.

    Args:
        model: what predicts.
        logits: behind the prompt, [1, 1, vocab].
        state: has read the prompt.
        sampler: chooses; of one row.
        stop_ids: tokens that end it.
        max_tokens: how many at most, the stop token included; 0 generates nothing.
        logprobs: None, or how many of the likeliest tokens to report with each one.

    Attributes:
        tokens: everything generated so far, the stop token included.
        finish_reason: "stop", "length", or None while it goes on.
        seconds: from the first token to the last one so far.

    Raises:
        InputError: a negative number of tokens.
        NumericsError: while iterating, when logits are not finite; `tokens` and `state` end before that token.
    """

    def __init__(
        self,
        model: Model,
        logits: mx.array,
        state: State,
        sampler: Sampler,
        *,
        stop_ids: frozenset[int] = frozenset(),
        max_tokens: int,
        logprobs: int | None = None,
    ) -> None:
        if max_tokens < 0 or (logprobs or 0) < 0:
            raise InputError(f"max_tokens is {max_tokens} and logprobs {logprobs}; both must be 0 or more.")
        self.tokens: list[int] = []
        self.finish_reason: Finish | None = None if max_tokens else "length"
        self.seconds = 0.0
        self._first_at = 0.0
        self._model, self._sampler, self._stop_ids = model, sampler, stop_ids
        self._max_tokens, self._top = max_tokens, logprobs
        self._read: tuple[int, State] = (0, state)  # so many of the tokens, and the state that has read them
        self._ahead = launch(logits, state, sampler, logprobs) if max_tokens else None

    @property
    def state(self) -> State:
        """Has read the prompt and exactly `tokens`. Reads the last token first where no step was under way."""
        read, state = self._read
        if read < len(self.tokens):
            _, state = self._model([self.tokens[read:]], state, logits="none")
            self._read = (len(self.tokens), state)
        return state

    @property
    def state_bytes(self) -> int:
        """Bytes of the state so far, without reading anything."""
        return self._read[1].nbytes

    def __iter__(self) -> Iterator[Step]:
        return self

    def __next__(self) -> Step:
        if self.finish_reason is not None:
            raise StopIteration
        current, (_, after), count = self._ahead, self._read, len(self.tokens) + 1
        assert current is not None
        following = None
        if count < self._max_tokens:
            logits, after = self._model(current.token[:, None], after, logits="last")
            assert logits is not None
            following = launch(logits, after, self._sampler, self._top)
        step = _wait(current, count)
        self._clock()
        self.tokens.append(step.token)
        self._read = (count if following else count - 1, after)  # one assignment: an interrupt finds it whole
        self._ahead = following
        if step.token in self._stop_ids:
            self.finish_reason = "stop"
            raise StopIteration
        if following is None:
            self.finish_reason = "length"
        if count % CLEAR_EVERY == 0:
            mx.clear_cache()
        return step

    def _clock(self) -> None:
        now = time.perf_counter()
        self._first_at = self._first_at or now
        self.seconds = now - self._first_at


def _wait(ahead: Ahead, count: int) -> Step:
    """The token, once it is there."""
    (token,) = cast(list[int], ahead.token.tolist())
    if token < 0:
        raise not_finite(count)
    if ahead.logprobs is None:
        return Step(token)
    chosen, ids, values = (cast(list[Any], array.tolist()) for array in ahead.logprobs)
    return Step(token, chosen[0], tuple(zip(ids[0], values[0], strict=True)))


def decode(
    model: Model,
    logits: mx.array,
    state: State,
    sampler: Sampler,
    *,
    stop_ids: frozenset[int] = frozenset(),
    max_tokens: int,
    logprobs: int | None = None,
) -> Decoding:
    """Generate behind a prompt; see `Decoding`."""
    return Decoding(model, logits, state, sampler, stop_ids=stop_ids, max_tokens=max_tokens, logprobs=logprobs)
