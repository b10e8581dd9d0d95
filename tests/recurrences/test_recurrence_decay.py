"""Decay factors: exact however strong and weak gates are mixed."""

from __future__ import annotations

import numpy as np
import pytest
from recurrence_problems import GATES, error

from mlxlin.backend import mx
from mlxlin.recurrences.decay import BLOCK, ChannelDecay, HeadDecay, NoDecay, Reads, Row, delayed, segments

LENGTHS = (16, 32, 64, 128)


def gates(kind: str, *shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).choice(GATES[kind], size=shape).astype(np.float32)


def exact_factors(g: np.ndarray, reads: Reads) -> np.ndarray:
    """exp of the sum over (j, t] in float64 where token t sees the write of j (sums over (j, t - 1] for BEFORE)."""
    C = g.shape[-1]
    factors = np.zeros((*g.shape, C))
    for t in range(C):
        for j in range(t + 1 if reads is Reads.AFTER else t):
            end = t if reads is Reads.BEFORE else t + 1
            factors[..., t, j] = np.exp(g[..., j + 1 : end].astype(np.float64).sum(axis=-1))
    return factors


def factors(g: np.ndarray, kind: str, reads: Reads) -> mx.array:
    """The same through `pairs`, with rows and columns of ones and K = 1."""
    ones = mx.ones((*g.shape, 1))
    decay = HeadDecay(mx.array(g)) if kind == "head" else ChannelDecay(mx.array(g)[..., None])
    return decay.pairs([Row(ones, reads)], [ones])[0][0]


def assert_exact(got: mx.array, want: np.ndarray) -> None:
    """As near as float32 exponents allow, 4e-7 per unit of exponent; 0 exactly where a reset lies between."""
    values = np.array(got).astype(np.float64)
    assert np.isfinite(values).all()
    assert (values[want == 0] == 0).all()
    normal = want > 1e-30
    allowed = 4e-7 * (1 - np.log(want[normal]))
    assert (np.abs(values[normal] / want[normal] - 1) < allowed).all()
    assert (values[~normal] <= 1e-29).all()


@pytest.mark.parametrize("C", LENGTHS)
@pytest.mark.parametrize("mix", GATES)
@pytest.mark.parametrize("kind", ["head", "channel"])
@pytest.mark.parametrize("reads", Reads)
def test_factors_between_tokens(C: int, mix: str, kind: str, reads: Reads) -> None:
    g = gates(mix, 1, 1, 1, 4, C, seed=C)
    got, want = factors(g, kind, reads), exact_factors(g, reads)
    assert_exact(got, want)
    assert error(got, want) < 2e-7


@pytest.mark.parametrize("C", LENGTHS)
@pytest.mark.parametrize("mix", GATES)
@pytest.mark.parametrize("kind", ["head", "channel"])
def test_factors_to_the_borders_of_the_chunk(C: int, mix: str, kind: str) -> None:
    g = gates(mix, 1, 1, 1, 4, C, seed=C)
    sums = g.astype(np.float64)
    ones = mx.ones((*g.shape, 1))
    decay = HeadDecay(mx.array(g)) if kind == "head" else ChannelDecay(mx.array(g)[..., None])
    start = np.exp(np.cumsum(sums, axis=-1))
    before = np.exp(np.concatenate([np.zeros_like(sums[..., :1]), np.cumsum(sums, axis=-1)[..., :-1]], axis=-1))
    after = np.concatenate([np.cumsum(sums[..., ::-1], axis=-1)[..., -2::-1], np.zeros_like(sums[..., :1])], axis=-1)
    assert_exact(decay.read(ones, Reads.DECAYED)[..., 0], start)
    assert_exact(decay.read(ones, Reads.BEFORE)[..., 0], before)
    assert_exact(decay.write(ones)[..., 0], np.exp(after))
    [carry] = decay.carries(1)
    assert_exact(carry(mx.ones((1, 1, 1, 4, 1, 1)))[..., 0, 0], np.exp(sums.sum(axis=-1)))


def test_differences_of_cumulative_sums_would_not_do() -> None:
    """The test above can tell: the shortcut this module avoids fails it."""
    g = gates("mixed", 1, 1, 1, 4, 64)
    total = mx.cumsum(mx.maximum(mx.array(g), -1e4), axis=-1)
    shortcut = mx.where(mx.tri(64) > 0, mx.exp(total[..., :, None] - total[..., None, :]), 0.0)
    with pytest.raises(AssertionError):
        assert_exact(shortcut, exact_factors(g, Reads.AFTER))


def test_no_decay_is_a_triangle() -> None:
    ones = mx.ones((1, 1, 1, 1, 16, 1))
    for reads, k in ((Reads.AFTER, 0), (Reads.DECAYED, -1), (Reads.BEFORE, -1)):
        assert np.array_equal(np.array(NoDecay().pairs([Row(ones, reads)], [ones])[0][0])[0, 0, 0, 0], np.tri(16, k=k))


def test_channels_decay_each_for_itself() -> None:
    """Products over channels: sum of per-channel factors times the entries."""
    rng = np.random.default_rng(0)
    g = rng.choice(GATES["wild"], size=(1, 1, 1, 2, 32, 5)).astype(np.float32)
    x, c = (rng.standard_normal((1, 1, 1, 1, 32, 5)).astype(np.float32) for _ in range(2))
    want = sum(
        exact_factors(g[..., d], Reads.AFTER) * x[..., :, None, d] * c[..., None, :, d].astype(np.float64)
        for d in range(5)
    )
    got = ChannelDecay(mx.array(g)).pairs([Row(mx.array(x), Reads.AFTER)], [mx.array(c)])[0][0]
    assert np.abs(np.array(got) - want).max() < 1e-6


def test_segments_of_one_block_and_of_many_agree() -> None:
    g = gates("wild", 3, 4 * BLOCK)
    mask, start, end, whole = segments(mx.array(g))
    for i in range(4):
        block = slice(i * BLOCK, (i + 1) * BLOCK)
        own, _, _, _ = segments(mx.array(g[:, block]))
        assert bool(mx.array_equal(mask[:, block, block], own))
    assert mask.shape == (3, 64, 64) and start.shape == end.shape == (3, 64) and whole.shape == (3,)


def test_delayed_starts_from_one() -> None:
    assert delayed(mx.array([2.0, 3.0, 4.0]), -1).tolist() == [1.0, 2.0, 3.0]
    assert delayed(mx.array([[2.0], [3.0]]), -1).tolist() == [[1.0], [1.0]]
