"""`stream`: a prompt in, text out, piece by piece."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from mlxlin.backend import mx
from mlxlin.errors import InputError
from mlxlin.generate.decoding import Decoding, decode
from mlxlin.generate.prompts import Prompt, is_tokens, prompt_tokens, room
from mlxlin.generate.reading import prefill
from mlxlin.generate.records import Piece, Progress, Stats
from mlxlin.generate.text import pieces, stop_texts
from mlxlin.sampling import Sampler, Sampling

if TYPE_CHECKING:
    from mlxlin.models import Model
    from mlxlin.state import State
    from mlxlin.tokenizer import Tokenizer


def stream(
    model: Model,
    tokenizer: Tokenizer,
    prompt: Prompt,
    *,
    max_tokens: int = 256,
    state: State | None = None,
    stop: str | Sequence[str] = (),
    think: bool | None = None,
    logprobs: int | None = None,
    raw: bool = False,
    context: int | None = None,
    progress: Progress | None = None,
    **sampling: Any,
) -> Iterator[Piece]:
    """Generate text behind a prompt. Stopping early does no harm; the given state stays valid.

    Args:
        prompt: messages; or a string, the one message of the person, or with `raw` plain text; or token ids.
        max_tokens: how many at most, the stop token included; what is left of the context at most.
        state: has read what comes before a raw or tokenised prompt.
        stop: texts that end the reply and are no part of it.
        think: thinking on or off, where the template can; None leaves its default.
        logprobs: report the probability of each token and of this many of the likeliest ones.
        raw: go on with a text instead of answering a message.
        context: tokens that prompt and reply may have together; the model's own limit by default.
        progress: called with (prompt tokens read, all of them).
        sampling: fields of `Sampling`; those left out come from the checkpoint's generation_config.json.

    Returns:
        A piece for each token, and a last one with finish_reason and stats.

    Raises:
        InputError: an empty prompt, or options that cannot be honoured.
        ResourceError: the prompt leaves no room in the context.
        NumericsError: while iterating, when the model produces NaN or infinity.
    """
    if state is not None and not (raw or is_tokens(prompt)):
        raise InputError("A state goes on with raw text or token ids, not with a conversation.", "Pass raw=True.")
    tokens = prompt_tokens(tokenizer, prompt, raw=raw, think=think, bos=state is None)
    chosen = Sampling(**{**tokenizer.generation_defaults, **sampling})
    reused = 0 if state is None else int(state.positions[0])
    limit = room(model, reused + len(tokens), max_tokens, context)
    stops = stop_texts(stop) + (() if raw else tokenizer.stop_texts)

    def begin() -> tuple[Decoding, Stats]:  # on its own, so that the state behind the prompt is not kept alive
        mx.reset_peak_memory()
        start = time.perf_counter()
        logits, behind = prefill(model, tokens, state, progress=progress)
        stats = Stats(reused + len(tokens), reused, prefill_seconds=time.perf_counter() - start)
        sampler, ids = Sampler(chosen, [tokens]), tokenizer.stop_ids
        return decode(model, logits, behind, sampler, stop_ids=ids, max_tokens=limit, logprobs=logprobs), stats

    def run() -> Iterator[Piece]:
        decoding, stats = begin()
        yield from pieces(tokenizer, decoding, stop=stops, continues=raw, stats=stats)

    return run()
