"""Every sampling option against plain numpy, and the independence of a batch's rows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxlin.backend import mx
from mlxlin.errors import InputError
from mlxlin.sampling import WINDOW, Sampler, Sampling, _draw, log_probabilities

RNG = np.random.default_rng(7)
LOGITS = RNG.normal(size=50).astype(np.float32) * 2


def numbers(array: mx.array) -> np.ndarray[Any, Any]:
    return np.array(array)


def probabilities(logits: np.ndarray[Any, Any], sampling: Sampling) -> np.ndarray[Any, Any]:
    """What an option set means: float64, one step after the other, as transformers orders them."""
    scaled = logits.astype(np.float64) / sampling.temperature
    order = np.argsort(-scaled, kind="stable")
    p = np.exp(scaled - scaled.max())
    if sampling.top_k:
        p[order[sampling.top_k :]] = 0
    p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= sampling.top_p]] = 0
    p[p < sampling.min_p * p.max()] = 0
    return p / p.sum()


@settings(max_examples=40)
@given(
    st.floats(0.2, 3),
    st.sampled_from([0, 1, 3, 20, 49, 50, 90]),
    st.floats(0.05, 1),
    st.sampled_from([0.0, 0.02, 0.3, 1.0]),
)
def test_draws_follow_the_definition(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    """One row for each of many evenly spread uniform numbers: how often a token comes is its probability."""
    sampling = Sampling(temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    expected = probabilities(LOGITS, sampling)
    rows = 4001
    uniform = (mx.arange(rows) + 0.5)[:, None] / rows
    logits = mx.broadcast_to(mx.array(LOGITS), (rows, 50))
    drawn = np.bincount(numbers(_draw(logits, uniform, sampling)), minlength=50) / rows
    assert set(np.flatnonzero(drawn)) <= set(np.flatnonzero(expected))
    np.testing.assert_allclose(drawn, expected, atol=1.5 / rows)


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-24])
def test_the_ends_of_the_range_draw_possible_tokens(uniform: float) -> None:
    logits = mx.array([[-math.inf, 0.0, -math.inf, 1.0, -math.inf]])
    token = int(_draw(logits, mx.array([[uniform]]), Sampling(1.0))[0])
    assert token == (3 if uniform > 0.4 else 1)


def test_large_vocabularies_draw_by_their_probabilities() -> None:
    """Rounding of a long cumulative sum must not reach tokens that cannot come."""
    vocab = 248_320
    logits = np.full(vocab, -math.inf, dtype=np.float32)
    possible = RNG.choice(vocab, 3000, replace=False)
    logits[possible] = RNG.normal(size=3000)
    uniform = mx.array(np.linspace(0, 1 - 2**-24, 64, dtype=np.float32))[:, None]
    drawn = numbers(_draw(mx.broadcast_to(mx.array(logits), (64, vocab)), uniform, Sampling(1.0)))
    assert set(drawn) <= set(possible)
    assert len(set(drawn)) > 50


def test_greedy_takes_the_likeliest_and_ignores_the_rest() -> None:
    sampler = Sampler(Sampling(top_k=3, top_p=0.1, min_p=0.9, seed=5), rows=2)
    logits = mx.array(np.stack([LOGITS, -LOGITS]))
    assert sampler(logits).tolist() == [int(LOGITS.argmax()), int(LOGITS.argmin())]
    assert Sampler(Sampling())(mx.array(LOGITS)[None, None]).tolist() == [int(LOGITS.argmax())]


@pytest.mark.parametrize("temperature", [0.0, 1e-40, 1e-31, 1e-29, 1e-6])
@pytest.mark.parametrize("top", [{}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}], ids=str)
def test_near_zero_temperatures_take_the_likeliest(temperature: float, top: dict[str, Any]) -> None:
    sampling = Sampling(temperature, seed=0, **top)
    assert Sampler(sampling)(mx.array(LOGITS)[None]).tolist() == [int(LOGITS.argmax())]


@pytest.mark.parametrize(
    ("options", "token"),
    [
        ({"logit_bias": {7: 1e30}}, 7),
        ({"logit_bias": {int(LOGITS.argmax()): -1e30}}, int(np.argsort(LOGITS)[-2])),
        ({"repeat_penalty": 1e-30}, 7),
        ({"presence_penalty": -1e30}, 7),
    ],
    ids=str,
)
@pytest.mark.parametrize("temperature", [0.0, 1e-29, 0.7])
def test_the_largest_options_stay_finite(options: dict[str, Any], token: int, temperature: float) -> None:
    logits = np.where(np.arange(50) == 7, 0.5, LOGITS).astype(np.float32)
    sampler = Sampler(Sampling(temperature, seed=0, **options), [[7]])
    drawn = {int(sampler(mx.array(logits)[None])[0]) for _ in range(5)}
    assert drawn == {token} if temperature < 0.1 or token == 7 else int(LOGITS.argmax()) not in drawn


def draws(sampler: Sampler, logits: mx.array, count: int) -> list[list[int]]:
    return np.stack([numbers(sampler(logits)) for _ in range(count)], axis=1).tolist()


def test_b67_seed_zero_is_a_seed() -> None:
    logits = mx.array(LOGITS)[None]
    zero = draws(Sampler(Sampling(1.0, seed=0)), logits, 300)  # beyond one block of random numbers
    assert zero == draws(Sampler(Sampling(1.0, seed=0)), logits, 300)
    assert zero != draws(Sampler(Sampling(1.0, seed=1)), logits, 300)
    assert zero[0][:150] != zero[0][150:]
    free = [draws(Sampler(Sampling(1.0)), logits, 40) for _ in range(2)]
    assert free[0] != free[1]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(0.8, seed=3),
        Sampling(1.2, top_k=5, top_p=0.9, seed=3),
        Sampling(1.0, repeat_penalty=1.5, presence_penalty=0.5, seed=3),
        Sampling(0.0, repeat_penalty=1.3),
    ],
    ids=["plain", "top", "penalties", "greedy"],
)
def test_a_row_of_a_batch_draws_what_it_would_alone(sampling: Sampling) -> None:
    logits = RNG.normal(size=(3, 50)).astype(np.float32)
    recent = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
    together = draws(Sampler(sampling, recent), mx.array(logits), 20)
    alone = [draws(Sampler(sampling, [recent[row]]), mx.array(logits[row : row + 1]), 20)[0] for row in range(3)]
    assert together == alone


def test_rows_can_leave() -> None:
    sampling = Sampling(1.0, repeat_penalty=1.5, seed=3)
    logits = mx.array(RNG.normal(size=(3, 50)).astype(np.float32))
    recent = [[1, 2, 3], [4], [5, 6]]
    whole = draws(Sampler(sampling, recent), logits, 9)
    sampler = Sampler(sampling, recent)
    first = draws(sampler, logits, 4)
    sampler.keep([0, 2])
    rest = draws(sampler, logits[mx.array([0, 2])], 5)
    assert [first[0] + rest[0], first[2] + rest[1]] == [whole[0], whole[2]]


def test_penalties_look_back_on_prompt_and_reply() -> None:
    logits = np.array([3.0, 2.9, -1.0, 2.5], dtype=np.float32)
    sampler = Sampler(Sampling(repeat_penalty=2.0), [[2, 2, 0]])
    assert draws(sampler, mx.array(logits)[None], 3) == [[1, 3, 0]]  # 0 is at 1.5, then 1 at 1.45, 3 at 1.25
    only_presence = Sampler(Sampling(presence_penalty=0.5), [[0]])
    assert draws(only_presence, mx.array(logits)[None], 3) == [[1, 0, 0]]
    negative = Sampler(Sampling(repeat_penalty=2.0), [[0]])
    assert negative(mx.array([[-1.0, -1.5]])).tolist() == [1]  # a negative logit is multiplied


def test_penalties_forget_beyond_the_window() -> None:
    logits = mx.array([[1.0, 0.9, 0.0]])
    penalty = Sampling(presence_penalty=0.5)
    assert Sampler(penalty, [[0] + [2] * (WINDOW - 1)])(logits).tolist() == [1]
    assert Sampler(penalty, [[0] + [2] * WINDOW])(logits).tolist() == [0]
    sampler = Sampler(penalty, [[0] + [2] * (WINDOW - 3)])
    biased = mx.array([[1.0, 0.9, 9.0]])
    assert draws(sampler, biased, 3) == [[2, 2, 2]]
    assert sampler(logits).tolist() == [0]


def test_without_a_prompt_the_reply_counts() -> None:
    assert draws(Sampler(Sampling(presence_penalty=0.5)), mx.array([[1.0, 0.9]]), 3) == [[0, 1, 0]]


def test_logit_bias_adds_and_forbids() -> None:
    best = int(LOGITS.argmax())
    assert Sampler(Sampling(logit_bias={best: -math.inf}))(mx.array(LOGITS)[None]).tolist() != [best]
    assert Sampler(Sampling(logit_bias={4: 100.0, best: -1.0}))(mx.array(LOGITS)[None]).tolist() == [4]
    banned = Sampler(Sampling(1.5, logit_bias={best: -math.inf}, seed=1, repeat_penalty=1.2), [[best]])
    assert best not in draws(banned, mx.array(LOGITS)[None], 100)[0]
    with pytest.raises(InputError, match="token 50"):
        Sampler(Sampling(logit_bias={50: 1.0}))(mx.array(LOGITS)[None])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_rows_that_are_not_finite_are_marked(temperature: float, bad: float) -> None:
    logits = np.stack([LOGITS, LOGITS, LOGITS])
    logits[1, 17] = bad
    tokens = Sampler(Sampling(temperature, top_k=4, repeat_penalty=1.1, seed=0), [[1], [2], [3]])(mx.array(logits))
    assert tokens.tolist()[1] == -1 and min(tokens.tolist()[::2]) >= 0


def test_log_probabilities_are_the_models_own() -> None:
    logits = np.stack([LOGITS, -LOGITS])
    expected = logits - np.log(np.exp(logits.astype(np.float64)).sum(axis=1, keepdims=True))
    chosen, ids, values = log_probabilities(mx.array(logits), mx.array([3, 4]), 5)
    np.testing.assert_allclose(numbers(chosen), [expected[0, 3], expected[1, 4]], rtol=1e-5)
    order = np.argsort(-logits, axis=1)[:, :5]
    assert ids.tolist() == order.tolist()
    np.testing.assert_allclose(numbers(values), np.take_along_axis(expected, order, 1), rtol=1e-5)
    assert log_probabilities(mx.array(logits), mx.array([3, 4]), 0)[1].shape == (2, 0)
    assert log_probabilities(mx.array(logits), mx.array([3, 4]), 99)[1].shape == (2, 50)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"temperature": "hot"},
        {"temperature": 10**400},
        {"top_k": -1},
        {"top_k": 2.0},
        {"top_k": True},
        {"top_p": 0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"repeat_penalty": 0},
        {"temperature": 1e31},
        {"repeat_penalty": 1e-31},
        {"repeat_penalty": 1e31},
        {"presence_penalty": math.inf},
        {"presence_penalty": -1e31},
        {"logit_bias": {1: 1e39}},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": {1: math.inf}},
        {"logit_bias": {1: math.nan}},
        {"seed": -1},
        {"seed": 2**64},
        {"seed": 1.5},
    ],
)
def test_values_out_of_range_are_named(options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(options))):
        Sampling(**options)


def test_rows_must_fit() -> None:
    with pytest.raises(InputError, match="2 rows"):
        Sampler(Sampling(), rows=2)(mx.array(LOGITS)[None])
    with pytest.raises(InputError, match="every row"):
        Sampler(Sampling(repeat_penalty=1.1), [[1], []])
