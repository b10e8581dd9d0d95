"""How far a converted model is from its source, measured on a text: KL divergence, agreement, perplexity.

Both models are run layer by layer, so that neither needs to fit into memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mlxlin.backend import mx
from mlxlin.convert.prepare import Prepared
from mlxlin.convert.resolve import Notice, Progress, resolve
from mlxlin.errors import InputError, NumericsError
from mlxlin.layerwise import Layerwise
from mlxlin.loader import open_path
from mlxlin.sample_text import TEXT
from mlxlin.tokenizer import Tokenizer

TOKENS = 512  # of the text, at most
_POSITIONS = 64  # whose logits are compared at a time


@dataclass(frozen=True)
class Difference:
    """One model against its source, over a text.

    Attributes:
        kl: mean over places of the Kullback-Leibler divergence KL(source || other), in nats.
        worst_kl: the largest one.
        agreement: share of places where both find the same token likeliest.
        perplexities: of the text, under the source and under the other model.
        places: how many were compared.
    """

    kl: float
    worst_kl: float
    agreement: float
    perplexities: tuple[float, float]
    places: int


def check_conversion(
    source: str | Path,
    converted: str | Path,
    *,
    revision: str | None = None,
    tokens: Sequence[int] | None = None,
    progress: Progress | None = None,
    notice: Notice | None = None,
) -> Difference:
    """Compare a model with what was made of it, on a built-in text.

    Args:
        source: as for `load`.
        converted: a folder, or any other form of the same model.
        revision: of the source, where it is a hub id.
        tokens: to run both on instead.
        progress: called with (layers done, layers in all), for one model and then for the other.
        notice: as for `load`.

    Raises:
        InputError: two models with different vocabularies.
        NumericsError: a probability that is not finite.
    """
    path, other = resolve(source, revision, notice=notice), resolve(converted)
    return compare(open_path(path), open_path(other), sample_tokens(path) if tokens is None else tokens, progress)


def sample_tokens(path: Path) -> list[int]:
    """The built-in text in the tokens of the model at `path`."""
    return Tokenizer.from_folder(path if path.is_dir() else path.parent).encode(TEXT)[:TOKENS]


def compare(source: Prepared, other: Prepared, tokens: Sequence[int], progress: Progress | None = None) -> Difference:
    """`check_conversion`, of prepared models."""
    if len(tokens) < 2:
        raise InputError("A comparison needs at least two tokens.")
    ours, theirs = (m.logits(m.hidden(progress)) for m in (Layerwise(source, tokens), Layerwise(other, tokens)))
    return measure(ours, theirs, tokens)


def measure(ours: mx.array, theirs: mx.array, tokens: Sequence[int]) -> Difference:
    """Compare the logits [T, vocab] of a source and of another model on tokens [T].

    Raises:
        InputError: different vocabularies.
        NumericsError: a probability that is not finite.
    """
    if ours.shape != theirs.shape:
        raise InputError(f"The vocabularies differ: {ours.shape[-1]} and {theirs.shape[-1]} tokens.")
    divergence, equal, losses = np.zeros(0), 0.0, np.zeros(2)
    for start in range(0, len(tokens), _POSITIONS):
        piece = slice(start, start + _POSITIONS)
        log_p, log_q = (np.array(x[piece] - mx.logsumexp(x[piece], axis=-1, keepdims=True)) for x in (ours, theirs))
        divergence = np.append(divergence, (np.exp(log_p) * (log_p - log_q)).sum(-1))
        equal += float(np.sum(log_p.argmax(-1) == log_q.argmax(-1)))
        following = np.array(tokens[start + 1 : start + 1 + _POSITIONS], int)
        rows = np.arange(len(following))
        losses -= [log_p[rows, following].sum(), log_q[rows, following].sum()]
    if not np.isfinite(divergence).all() or not np.isfinite(losses).all():
        raise NumericsError("A model that is compared gives numbers that are not finite.")
    before, after = np.exp(np.minimum(losses / (len(tokens) - 1), 700))  # never infinite
    mean, worst = (max(0.0, float(value)) for value in (divergence.mean(), divergence.max()))  # rounding may go below 0
    return Difference(mean, worst, equal / len(tokens), (float(before), float(after)), len(tokens))
