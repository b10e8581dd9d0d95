"""How far a converted or quantised model is from its source: told on text the source itself writes.

No corpus is needed, and the text is in every model's own language: the source continues a few openings, its
probabilities at every place of that text are kept, and another model's are compared with them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlxlin.backend import mx
from mlxlin.errors import InputError, NumericsError
from mlxlin.generate import decode, prefill
from mlxlin.loader import load
from mlxlin.models import Model
from mlxlin.sampling import Sampler, Sampling
from mlxlin.tokenizer import Tokenizer

Progress = Callable[[int, int], None]
OPENINGS = ("The", "Once upon a time", "def main():", "Question: Why")
BITS = (2, 3, 4, 5, 6, 8)


@dataclass(frozen=True)
class Reference:
    """Text a model has written, and what it thought of it.

    Attributes:
        rows: token ids of each text.
        logprobs: for each row, natural-log probabilities of all tokens behind each of its places but the last,
            float32 [T - 1, vocab].
    """

    rows: tuple[tuple[int, ...], ...]
    logprobs: tuple[mx.array, ...]


@dataclass(frozen=True)
class Difference:
    """One model against a reference.

    Attributes:
        kl: mean Kullback-Leibler divergence KL(source || other) per place, in nats.
        worst_kl: the largest one.
        agreement: share of places where both find the same token likeliest.
        perplexities: of the source and of the other model on the text.
        places: how many were compared.
    """

    kl: float
    worst_kl: float
    agreement: float
    perplexities: tuple[float, float]
    places: int


def write_reference(
    model: Model, tokenizer: Tokenizer, *, tokens: int = 128, seed: int = 0, progress: Progress | None = None
) -> Reference:
    """Let `model` continue every opening by `tokens` sampled tokens (temperature 1, the end of the text ignored).

    Args:
        progress: called with (openings done, openings in all).
    """
    rows, logprobs = [], []
    for number, opening in enumerate(OPENINGS):
        start = tokenizer.encode(opening)
        logits, state = prefill(model, start)
        sampler = Sampler(Sampling(temperature=1.0, seed=seed + number))
        decoding = decode(model, logits, state, sampler, max_tokens=tokens)
        row = (*start, *(step.token for step in decoding))
        rows.append(row)
        logprobs.append(_logprobs(model, row))
        if progress is not None:
            progress(number + 1, len(OPENINGS))
    return Reference(tuple(rows), tuple(logprobs))


def compare(reference: Reference, model: Model) -> Difference:
    """Measure `model` against a reference.

    Raises:
        InputError: the two have different vocabularies.
        NumericsError: a probability is not finite.
    """
    divergences, equal, before, after = [], 0.0, 0.0, 0.0
    for row, ours in zip(reference.rows, reference.logprobs, strict=True):
        theirs = _logprobs(model, row)
        if theirs.shape != ours.shape:
            raise InputError(f"The vocabularies differ: {ours.shape[-1]} and {theirs.shape[-1]} tokens.")
        chosen = mx.array(row[1:])[:, None]
        divergences.append((mx.exp(ours) * (ours - theirs)).sum(axis=-1))
        equal += _number((ours.argmax(axis=-1) == theirs.argmax(axis=-1)).sum())
        before -= _number(mx.take_along_axis(ours, chosen, axis=-1).sum())
        after -= _number(mx.take_along_axis(theirs, chosen, axis=-1).sum())
    kl = mx.concatenate(divergences)
    places = kl.size
    if not math.isfinite(after) or not mx.all(mx.isfinite(kl)).item():
        raise NumericsError("The model compared with the source gives numbers that are not finite.")
    perplexities = (math.exp(before / places), math.exp(after / places))
    mean, worst = (max(0.0, _number(value)) for value in (kl.mean(), kl.max()))  # rounding may go below zero
    return Difference(mean, worst, equal / places, perplexities, places)


def check_conversion(
    source: str | Path,
    converted: str | Path,
    *,
    revision: str | None = None,
    tokens: int = 128,
    progress: Progress | None = None,
) -> Difference:
    """Compare a converted folder with its source; the two models are loaded one after the other."""
    reference = write_reference(*load(source, revision=revision), tokens=tokens, progress=progress)
    return compare(reference, load(converted)[0])


def choose_bits(
    source: str | Path,
    target_kl: float,
    *,
    revision: str | None = None,
    bits: Sequence[int] = BITS,
    tokens: int = 128,
    progress: Progress | None = None,
) -> tuple[int, list[tuple[int, Difference]]]:
    """The fewest bits per weight whose divergence from the source stays within `target_kl`.

    Returns:
        The bits, and all that was tried, in order.

    Raises:
        InputError: not even the most bits do, or the target is no positive number.
    """
    if not target_kl > 0:
        raise InputError(f"The divergence to stay within is {target_kl}; it must be above 0.", "Say for example: 0.05")
    reference = write_reference(*load(source, revision=revision), tokens=tokens, progress=progress)
    tried: list[tuple[int, Difference]] = []
    for count in sorted(bits):
        tried.append((count, compare(reference, load(source, bits=count, revision=revision)[0])))
        if tried[-1][1].kl <= target_kl:
            return count, tried
    raise InputError(
        f"With {tried[-1][0]} bits the divergence is {tried[-1][1].kl:.3g} nats, more than {target_kl:g}.",
        "Allow more, or leave the numbers as they are.",
    )


def _logprobs(model: Model, row: Sequence[int]) -> mx.array:
    """Float32 [T - 1, vocab] of a text of T tokens."""
    logits, _ = model([list(row[:-1])])
    assert logits is not None
    found = logits[0] - mx.logsumexp(logits[0], axis=-1, keepdims=True)
    mx.eval(found)
    return found


def _number(array: mx.array) -> float:
    value = array.item()
    assert not isinstance(value, complex)
    return float(value)
