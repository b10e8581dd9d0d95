"""How far two models are apart: known distances, the shipped model against itself and its quantised forms."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from mlxlin import check
from mlxlin.backend import mx
from mlxlin.check import Reference, choose_bits, compare, write_reference
from mlxlin.convert import convert_checkpoint
from mlxlin.errors import InputError, NumericsError
from mlxlin.loader import load

VOCAB = 5


class Fixed:
    """A model whose logits are given, whatever it reads."""

    def __init__(self, logits: np.ndarray) -> None:
        self._logits = mx.array(logits.astype(np.float32))

    def __call__(self, tokens: list[list[int]]) -> tuple[mx.array, None]:
        return self._logits[None, : len(tokens[0])], None


def reference(logits: np.ndarray, row: tuple[int, ...]) -> Reference:
    return Reference((row,), (check._logprobs(Fixed(logits), row),))  # type: ignore[arg-type]


def softmax(x: np.ndarray) -> np.ndarray:
    return np.exp(x) / np.exp(x).sum(-1, keepdims=True)


def test_the_numbers_are_those_of_their_definitions() -> None:
    ours, theirs = np.random.default_rng(0).normal(size=(2, 6, VOCAB)) * 2
    row = (0, 1, 2, 3, 4, 0, 1)
    p, q = softmax(ours), softmax(theirs)
    kl = (p * np.log(p / q)).sum(-1)
    found = compare(reference(ours, row), Fixed(theirs))  # type: ignore[arg-type]
    assert found.kl == pytest.approx(kl.mean(), rel=1e-5) and found.worst_kl == pytest.approx(kl.max(), rel=1e-5)
    assert found.agreement == (p.argmax(-1) == q.argmax(-1)).mean() and found.places == 6
    chosen = [np.exp(-np.log(x[range(6), row[1:]]).mean()) for x in (p, q)]
    assert found.perplexities == pytest.approx(tuple(chosen), rel=1e-5)


def test_a_model_is_no_distance_from_itself() -> None:
    model, tokenizer = load("demo")
    written = write_reference(model, tokenizer, tokens=16)
    assert len(written.rows) == len(check.OPENINGS) and all(len(row) > 16 for row in written.rows)
    found = compare(written, model)
    assert found.kl < 1e-9 and found.agreement == 1.0
    assert found.perplexities[0] == found.perplexities[1] > 1
    assert write_reference(model, tokenizer, tokens=16).rows == written.rows, "the text is repeatable"


def test_a_conversion_without_quantisation_is_exact(tmp_path: Path) -> None:
    convert_checkpoint("demo", tmp_path / "out")
    found = check.check_conversion("demo", tmp_path / "out", tokens=8)
    assert found.kl < 1e-9 and found.agreement == 1.0


def test_fewer_bits_are_further_away() -> None:
    bits, tried = choose_bits("demo", 0.02, tokens=16)
    distances = [difference.kl for _, difference in tried]
    assert distances == sorted(distances, reverse=True)
    assert [count for count, _ in tried] == list(check.BITS[: len(tried)]) and bits == tried[-1][0]
    assert distances[-1] <= 0.02 and all(kl > 0.02 for kl in distances[:-1])
    with pytest.raises(InputError, match="With 8 bits the divergence"):
        choose_bits("demo", 1e-12, bits=(8,), tokens=4)


@pytest.mark.parametrize("target", [0.0, -1.0, math.nan])
def test_a_target_that_cannot_be_is_refused(target: float) -> None:
    with pytest.raises(InputError, match="above 0"):
        choose_bits("demo", target)


def test_models_that_cannot_be_compared_are_refused() -> None:
    written = reference(np.zeros((3, VOCAB)), (0, 1, 2, 3))
    with pytest.raises(InputError, match="vocabularies differ: 5 and 4"):
        compare(written, Fixed(np.zeros((3, 4))))  # type: ignore[arg-type]
    with pytest.raises(NumericsError):
        compare(written, Fixed(np.full((3, VOCAB), np.nan)))  # type: ignore[arg-type]
