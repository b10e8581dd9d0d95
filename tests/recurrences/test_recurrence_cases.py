"""Faults people have reported in programs of this kind, each with its number."""

from __future__ import annotations

import numpy as np
import pytest
from recurrence_problems import RULE_NAMES, assert_matches, error, make

from mlxlin.backend import mx
from mlxlin.recurrences import RULES, chunkwise

DECAYING = [name for name, rule in RULES.items() if rule.decays != ("none",)]
C = 32


def open_gates(problem, low: float, high: float, seed: int = 1):
    """The problem with decays drawn from (low, high) themselves rather than their logarithms."""
    w = np.random.default_rng(seed).uniform(low, high, problem.rest["g"].shape)
    return problem.with_(g=mx.array(np.log(w).astype(np.float32)))


@pytest.mark.parametrize("rule", DECAYING)
@pytest.mark.parametrize("T", [1, 2, C - 1, C, C + 1, 2 * C - 1, 2 * C, 2 * C + 3])
def test_b31_the_last_chunk_decays_by_its_own_tokens_only(rule: str, T: int) -> None:
    problem = open_gates(make(rule, B=1, T=T, H=1, HV=2, K=16, V=16), 0.5, 1.0)
    assert_matches(problem, problem.run(chunk=C))


@pytest.mark.parametrize("rule", ["gated_delta", "kda", "delta", "dplr"])
def test_b32_prefill_split_anywhere_equals_prefill_in_one(rule: str) -> None:
    T = 67
    problem = make(rule, B=1, T=T, H=1, HV=2, K=16, V=16)
    y, S = problem.run()
    for at in range(T + 1):
        first, state = problem.tokens(0, at).run(state=problem.rest["state"])
        second, state = problem.tokens(at, T).run(state=state)
        assert float(mx.abs(mx.concatenate([first, second], axis=1) - y).max()) < 1e-5
        assert float(mx.abs(state - S).max()) < 1e-5


@pytest.mark.parametrize("rule", RULE_NAMES)
def test_b33_later_windows_start_from_the_state_of_earlier_ones(rule: str) -> None:
    problem = make(rule, T=48, gates="slow")
    y, S = problem.run()
    state, outputs = problem.rest["state"], []
    for start in range(0, 48, 16):
        part, state = problem.tokens(start, start + 16).run(state=state)
        outputs.append(part)
    assert error(mx.concatenate(outputs, axis=1), y) < 1e-5
    assert error(state, S) < 1e-5


@pytest.mark.parametrize("rule", RULE_NAMES)
@pytest.mark.parametrize("bad", [float("nan"), 1e9])
def test_b34_a_one_token_prompt_does_not_read_a_stale_state(rule: str, bad: float) -> None:
    """Nor does a row read its neighbour's: a poisoned row stays alone with its poison."""
    problem = make(rule, T=1)
    stale = mx.full(problem.rest["state"].shape, bad)
    mx.eval(problem.run(state=stale))
    fresh = problem.run(state=None)
    assert_matches(problem, fresh, state=None)
    mixed = mx.concatenate([stale[:1], mx.zeros_like(stale[1:])])
    for T in (1, 40):
        problem = make(rule, T=T)
        y, S = problem.run(state=mixed)
        expected = problem.rows(1, 2).run(state=None)
        assert error(y[1:], expected[0]) < 1e-5 and error(S[1:], expected[1]) < 1e-5


@pytest.mark.parametrize("rule", RULE_NAMES)
@pytest.mark.parametrize("T", [0, 1, 2, 3])
def test_b37_prompts_shorter_than_anything(rule: str, T: int) -> None:
    problem = make(rule, T=8).tokens(0, T).with_(state=make(rule, T=8).rest["state"])
    y, S = problem.run()
    assert y.shape[1] == T
    assert_matches(problem, (y, S))
    if T == 0:
        assert bool(mx.array_equal(S, problem.rest["state"]))


@pytest.mark.parametrize("rule", RULE_NAMES)
def test_b39_a_batch_of_unequal_prompts_equals_each_alone(rule: str) -> None:
    lengths = [3, 27, 1, 59]
    problem = make(rule, B=4, T=59)
    y, S = problem.run(lengths=mx.array(lengths))
    for row, length in enumerate(lengths):
        alone = problem.rows(row, row + 1)
        y1, S1 = alone.tokens(0, length).run(state=alone.rest["state"])
        assert error(y[row : row + 1, :length], y1) < 1e-5 and error(S[row : row + 1], S1) < 1e-5


@pytest.mark.parametrize("rule", RULE_NAMES)
def test_b41_the_state_is_float32_whatever_the_weights(rule: str) -> None:
    """400 decode steps in bfloat16: the state equals the float64 one to float32 accuracy, not to bfloat16's."""
    problem = make(rule, B=1, T=400, H=1, HV=2, K=16, V=16, gates="slow", dtype=mx.bfloat16)
    S = problem.rest["state"]
    for t in range(400):
        _, S = problem.tokens(t, t + 1).run(state=S)
        assert S.dtype == mx.float32
    _, expected = problem.expected()
    assert error(S, expected) < 1e-5


@pytest.mark.parametrize("rule", ["delta", "gated_delta", "kda"])
def test_b42_keys_slightly_too_long_for_10000_steps(rule: str) -> None:
    """No decay, full correction, correlated keys with |k| a little over 1: bounded, and equal to float64."""
    problem = make(rule, B=1, T=10_000, H=1, HV=1, K=16, V=4, gates="none", beta=1.0, cosine=0.9)
    problem = problem.with_(k=problem.k * 1.003)
    y, S = problem.run()
    assert float(mx.abs(S).max()) < 100
    assert_matches(problem, (y, S))


@pytest.mark.parametrize("rule", RULE_NAMES)
def test_b43_a_snapshot_is_not_changed_by_later_tokens(rule: str) -> None:
    problem = make(rule, T=12)
    _, snapshot = problem.tokens(0, 2).run(state=problem.rest["state"])
    before = np.array(snapshot)
    state = snapshot
    for t in range(2, 12):
        y, state = problem.tokens(t, t + 1).run(state=state)
        mx.eval(y, state)
    assert np.array_equal(np.array(snapshot), before)


@pytest.mark.parametrize("rule", RULE_NAMES)
def test_b55_a_long_prompt_is_evaluated_as_it_goes(rule: str) -> None:
    """4,096 tokens: when the call returns, at most a few pieces are left to evaluate."""
    problem = make(rule, B=1, T=4096, H=1, HV=1, K=16, V=16, n=1)
    mx.eval(problem.q, problem.k, problem.v, *problem.rest.values())
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    y, S = problem.run(chunk=C)
    mx.eval(y, S)
    piece = chunkwise.TOKENS_AT_ONCE
    a_row = 4 * 16 * 4  # bytes of q, k, v and y of one token
    assert mx.get_peak_memory() - before < 2 * y.nbytes + 30 * a_row * piece


@pytest.mark.parametrize("rule", DECAYING)
@pytest.mark.parametrize("chunk", [16, 64])
def test_b59_strong_decays_neither_overflow_nor_leak(rule: str, chunk: int) -> None:
    """-20 a step for 64 steps, then mixed with 0 at random: finite and equal to float64."""
    problem = make(rule, B=1, T=64, H=1, HV=2, K=16, V=16)
    g = np.full(problem.rest["g"].shape, -20.0, np.float32)
    for keep in (0.0, 0.5):
        mixed = np.where(np.random.default_rng(0).random(g.shape) < keep, 0, g).astype(np.float32)
        strong = problem.with_(g=mx.array(mixed))
        y, S = strong.run(chunk=chunk)
        assert bool(mx.all(mx.isfinite(y))) and bool(mx.all(mx.isfinite(S)))
        assert_matches(strong, (y, S))


@pytest.mark.parametrize("rule", DECAYING)
def test_b60_ordinary_gates_show_what_gates_near_one_hide(rule: str) -> None:
    problem = open_gates(make(rule, T=33), 0.3, 0.9)
    assert_matches(problem, problem.run(chunk=C))


@pytest.mark.parametrize("rule", RULE_NAMES)
@pytest.mark.parametrize("size, dtype", [(0.0, mx.float32), (1e-20, mx.float32), (1e-4, mx.float16)])
def test_b61_zero_and_tiny_keys(rule: str, size: float, dtype: mx.Dtype) -> None:
    problem = make(rule, T=40, dtype=dtype)
    some = mx.arange(problem.k.shape[1])[:, None, None] % 3 == 0
    problem = problem.with_(k=mx.where(some, (problem.k * size).astype(dtype), problem.k))
    y, S = problem.run()
    assert bool(mx.all(mx.isfinite(y.astype(mx.float32)))) and bool(mx.all(mx.isfinite(S)))
    assert_matches(problem, (y, S))
