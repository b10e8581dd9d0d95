"""`batch`: several prompts at once, each as if it were alone."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from mlxlin.backend import mx
from mlxlin.errors import InputError
from mlxlin.generate.decoding import launch, not_finite
from mlxlin.generate.prompts import Prompt, prompt_tokens, room
from mlxlin.generate.reading import prefill
from mlxlin.generate.records import Completion, Finish, Progress, Stats
from mlxlin.generate.text import Text, stop_texts
from mlxlin.sampling import Sampler, Sampling

if TYPE_CHECKING:
    from mlxlin.models import Model
    from mlxlin.state import State
    from mlxlin.tokenizer import Tokenizer


def batch(
    model: Model,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    *,
    max_tokens: int = 256,
    stop: str | Sequence[str] = (),
    think: bool | None = None,
    raw: bool = False,
    context: int | None = None,
    progress: Progress | None = None,
    **sampling: Any,
) -> list[Completion]:
    """Generate behind several prompts of any lengths, together; arguments as in `stream`.

    Each row reads, samples (from the same seed) and stops as it would alone. A row that has stopped leaves the batch.

    Returns:
        One completion for each prompt, in their order. Their prefill_seconds are those of the whole batch.

    Raises:
        InputError, ResourceError, NumericsError: as `stream`; one bad prompt ends the batch.
    """
    if isinstance(prompts, (str, Mapping)):  # iterable too: over characters, over keys
        raise InputError("batch takes a list of prompts, not one.", "Put it in a list, or use stream.")
    if not prompts:
        return []
    read = [prompt_tokens(tokenizer, prompt, raw=raw, think=think) for prompt in prompts]
    limits = [room(model, len(tokens), max_tokens, context) for tokens in read]
    chosen = Sampling(**{**tokenizer.generation_defaults, **sampling})
    stops = stop_texts(stop) + (() if raw else tokenizer.stop_texts)
    mx.reset_peak_memory()
    start = time.perf_counter()
    lengths = [len(tokens) for tokens in read]
    padded = [tokens + tokens[-1:] * (max(lengths) - len(tokens)) for tokens in read]
    logits, state = prefill(model, padded, lengths=lengths, progress=progress)
    seconds = time.perf_counter() - start
    rows = [
        _Row(index, Text(tokenizer, stops, continues=raw), limit, Stats(len(tokens), prefill_seconds=seconds))
        for index, (tokens, limit) in enumerate(zip(read, limits, strict=True))
    ]
    _decode(model, logits, state, Sampler(chosen, read), rows, tokenizer.stop_ids)
    return [row.completion() for row in rows]


class _Row:
    """One prompt's reply as it grows."""

    def __init__(self, index: int, text: Text, limit: int, stats: Stats) -> None:
        self.index = index
        self.tokens: list[int] = []
        self.finish_reason: Finish | None = None if limit else "length"
        self.limit = limit
        self._text, self._stats = text, stats
        self._parts: list[str] = []
        self._times: list[float] = []

    def take(self, token: int, stop_ids: frozenset[int]) -> None:
        """Add a token; sets finish_reason if it was the last."""
        if token < 0:
            raise not_finite(len(self.tokens) + 1, self.index)
        self.tokens.append(token)
        self._times.append(time.perf_counter())
        if token in stop_ids:
            self.finish_reason = "stop"
            return
        self._parts.append(self._text.add(token))
        if self._text.stopped:
            self.finish_reason = "stop"
        elif len(self.tokens) == self.limit:
            self.finish_reason = "length"

    def leave(self, state: State) -> None:
        """Note what the row cost when it leaves the batch."""
        self._parts.append(self._text.finish())
        times = self._times or [0.0]
        self._stats = replace(
            self._stats,
            generated_tokens=len(self.tokens),
            decode_seconds=times[-1] - times[0],
            finish_reason="stop" if self._text.stopped else self.finish_reason,
            state_bytes=state.nbytes // state.batch,
            peak_memory_bytes=mx.get_peak_memory(),
        )

    def completion(self) -> Completion:
        """The reply, once the row has left."""
        assert self._stats.finish_reason is not None
        return Completion("".join(self._parts), self.tokens, self._stats.finish_reason, self._stats)


def _decode(
    model: Model, logits: mx.array, state: State, sampler: Sampler, rows: list[_Row], stop_ids: frozenset[int]
) -> None:
    """Decode all rows, the next step always under way, until each has finished."""
    ahead = launch(logits, state, sampler)
    while rows:
        following, after = None, state
        if any(len(row.tokens) + 1 < row.limit for row in rows):
            found, after = model(ahead.token[:, None], state, logits="last")
            assert found is not None
            following = launch(found, after, sampler)
        for row, token in zip(rows, cast(list[int], ahead.token.tolist()), strict=True):
            if row.finish_reason is None:
                row.take(token, stop_ids)
        going = [place for place, row in enumerate(rows) if row.finish_reason is None]
        for row in rows:
            if row.finish_reason is not None:
                row.leave(after)
        if going and len(going) < len(rows):
            assert following is not None
            after, following = after.rows(going), following.rows(going)
            sampler.keep(going)
        rows = [rows[place] for place in going]
        if following is not None:
            state, ahead = after, following
    mx.clear_cache()
