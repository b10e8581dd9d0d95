"""Sampling options against transformers' logits processors: the same penalised logits, the same tokens kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mlxlin.backend import mx
from mlxlin.sampling import Sampler, Sampling, _draw

pytestmark = pytest.mark.parity
RNG = np.random.default_rng(3)
LOGITS = (RNG.normal(size=(4, 200)) * 3).astype(np.float32)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("top_k, top_p, min_p", [(20, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.05), (40, 0.8, 0.02)])
def test_the_same_distribution_is_left(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    torch = pytest.importorskip("torch")
    process = pytest.importorskip("transformers.generation.logits_process")
    steps: list[Any] = [process.TemperatureLogitsWarper(temperature)]
    steps += [process.TopKLogitsWarper(top_k)] if top_k else []
    steps += [process.TopPLogitsWarper(top_p)] if top_p < 1 else []
    steps += [process.MinPLogitsWarper(min_p)] if min_p else []
    scores = torch.tensor(LOGITS)
    for step in steps:
        scores = step(None, scores)
    expected = torch.softmax(scores, dim=-1).numpy()
    sampling = Sampling(temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    rows = 4001
    uniform = (mx.arange(rows) + 0.5)[:, None] / rows
    for row, logits in enumerate(LOGITS):
        many = mx.broadcast_to(mx.array(logits), (rows, 200))
        drawn = np.bincount(np.array(_draw(many, uniform, sampling)), minlength=200) / rows
        np.testing.assert_allclose(drawn, expected[row], atol=1.5 / rows)


def test_the_same_repetition_penalty() -> None:
    torch = pytest.importorskip("torch")
    process = pytest.importorskip("transformers.generation.logits_process")
    seen = RNG.integers(0, 200, size=(4, 60))
    expected = process.RepetitionPenaltyLogitsProcessor(1.4)(torch.tensor(seen), torch.tensor(LOGITS)).numpy()
    sampler = Sampler(Sampling(repeat_penalty=1.4), seen.tolist())
    np.testing.assert_allclose(np.array(sampler._penalise(mx.array(LOGITS))), expected, rtol=1e-6)
