"""Pointwise functions against float64, and attention in blocks against one softmax."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from mlxlin.backend import mx
from mlxlin.models import activations
from mlxlin.models.mixers import attention
from mlxlin.models.mixers.step import Step

POINTS = np.concatenate([np.linspace(-12, 12, 4801), [-1e30, -200.0, -104.0, -88.5, -30.0, 30.0, 88.5, 200.0, 1e30]])
EXACT: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "sigmoid": lambda x: np.exp(-np.logaddexp(0, -x)),
    "silu": lambda x: x * np.exp(-np.logaddexp(0, -x)),
    "softplus": lambda x: np.logaddexp(0, x),
}


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize("name", EXACT)
def test_functions_are_exact_to_the_dtype_everywhere(name: str, dtype: mx.Dtype) -> None:
    x = mx.array(POINTS).astype(dtype)
    x = mx.array(np.array(x.astype(mx.float32))[np.isfinite(np.array(x.astype(mx.float32)))]).astype(dtype)
    given = np.array(x.astype(mx.float32)).astype(np.float64)
    found = getattr(activations, name)(x)
    assert found.dtype == dtype
    exact = EXACT[name](given)
    error = np.abs(np.array(found.astype(mx.float32)).astype(np.float64) - exact)
    tolerance = {mx.float32: 3e-7, mx.float16: 2e-3, mx.bfloat16: 1.6e-2}[dtype]
    assert (error <= tolerance * np.maximum(np.abs(exact), 1.0)).all()
    many = mx.repeat(x, activations._LARGE // x.size + 1)
    if activations.vectorises(many.dtype, many.size):
        # small values too: e itself is rounded, which costs 3e-8 for each unit of the exponent
        found = getattr(activations, name)(many)[:: activations._LARGE // x.size + 1]
        error = np.abs(np.array(found).astype(np.float64) - exact)
        assert (error <= (tolerance + 4e-8 * np.abs(given)) * np.abs(exact) + 1e-37).all()


def plain_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, seen: np.ndarray) -> np.ndarray:
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat(repeat, 1), v.repeat(repeat, 1)
    scores = np.where(seen, q @ k.swapaxes(-1, -2) * 0.3, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


@pytest.mark.parametrize("window", [None, 1, 7, 40, 300])
@pytest.mark.parametrize(("length", "total"), [(1, 1), (1, 90), (40, 40), (70, 133), (300, 310)])
def test_attention_in_blocks_equals_one_softmax(
    monkeypatch: pytest.MonkeyPatch, length: int, total: int, window: int | None
) -> None:
    monkeypatch.setattr(attention, "_LARGEST_BLOCK", 32)
    rng = np.random.default_rng(length + total)
    q, k, v = (rng.standard_normal(s) for s in ((2, 4, length, 8), (2, 2, total, 8), (2, 2, total, 6)))
    query, key = np.arange(total - length, total)[:, None], np.arange(total)[None]
    seen = (key <= query) & (key > query - (window or total))
    step = Step(length, mx.full((2,), total - length, dtype=mx.int32))
    found = attention.attend(*(mx.array(a.astype(np.float32)) for a in (q, k, v)), scale=0.3, window=window, step=step)
    assert np.abs(np.array(found) - plain_attention(q, k, v, seen)).max() < 2e-6


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_ragged_attention_reads_only_real_keys(dtype: mx.Dtype) -> None:
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal(s) for s in ((2, 2, 5, 8), (2, 1, 9, 8), (2, 1, 9, 8)))
    slots = np.array([[0, 1, 2, 3, 4, 5, 6, 7, 8], [0, 1, -1, -1, 2, 3, 4, -1, -1]])
    positions = np.array([4, 2])
    k[1, :, [2, 3]] = v[1, :, [2, 3]] = 1e4  # padding of the second row
    step = Step(5, mx.array(positions), mx.array([5, 3]), mx.array(slots))
    found = attention.attend(*(mx.array(a).astype(dtype) for a in (q, k, v)), scale=0.3, window=None, step=step)
    query = positions[:, None] + np.arange(5)
    seen = (slots[:, None, None, :] >= 0) & (slots[:, None, None, :] <= query[:, None, :, None])
    seen[1, :, 3:] = True  # outputs of padding are only asked to be finite
    expected = plain_attention(q, k, v, seen)
    found = np.array(found.astype(mx.float32))
    tolerance = 2e-6 if dtype == mx.float32 else 0.05
    assert np.abs(found[0] - expected[0]).max() < tolerance and np.isfinite(found).all()
    assert np.abs(found[1, :, :3] - expected[1, :, :3]).max() < tolerance


@pytest.mark.parametrize(("dim", "exists"), [(64, False), (192, False), (192, True), (256, True)])
def test_a_fused_kernel_is_only_insisted_on_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch, dim: int, exists: bool
) -> None:
    """A GPU without a fused kernel for a head dim: asked once, then the scores are kept small instead."""
    asked: list[bool] = []
    attend = mx.fast.scaled_dot_product_attention

    def without_fused(*arrays: mx.array, force_fused: bool = False, **options: object) -> mx.array:
        asked.append(force_fused)
        if force_fused and not exists:
            raise ValueError("no fused kernel")
        return attend(*arrays, **options)

    monkeypatch.setattr(attention, "on_metal", lambda: True)
    monkeypatch.setattr(attention, "vectorises", lambda dtype, size: False)
    monkeypatch.setattr(attention, "_LARGEST_BLOCK", 32)
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", without_fused)
    attention._fused_exists.cache_clear()
    q, k, v = (mx.random.normal((1, heads, 70, dim), key=mx.random.key(heads)) for heads in (4, 2, 2))
    q = q * (64 / dim) ** 0.5  # scores of one size for every head dim, and so their rounding
    step = Step(70, mx.zeros((1,), dtype=mx.int32))
    found = attention.attend(q, k, v, scale=0.3, window=None, step=step)
    seen = np.tril(np.ones((70, 70), dtype=bool))
    assert np.abs(np.array(found) - plain_attention(*(np.array(a) for a in (q, k, v)), seen)).max() < 1e-5
    # once to know, and then for all queries at once
    assert asked == ([False] if dim == 64 else [True, True] if exists else [True, False, False, False])
    attention._fused_exists.cache_clear()
