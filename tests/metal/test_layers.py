"""Norms and the router, against numpy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from mlxlin.backend import mx
from mlxlin.metal.layers import add_norm, gated_norm, router_topk
from mlxlin.models import residual as residual_module

from .cases import TOLERANCE, error, float64

Float64 = npt.NDArray[np.float64]


def normal(*shape: int, dtype: mx.Dtype = mx.float32, seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng(seed).normal(size=shape).astype(np.float32)).astype(dtype)


def rms_norm(x: Float64, weight: Float64, eps: float) -> Float64:
    normed: Float64 = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * weight
    return normed


@pytest.mark.parametrize(("width", "dtype"), [(96, mx.float32), (1000, mx.bfloat16), (4104, mx.float16)], ids=str)
def test_add_norm_equals_its_parts(width: int, dtype: mx.Dtype) -> None:
    x, residual = normal(2, 3, width, dtype=dtype), normal(2, 3, 2 * width, dtype=dtype, seed=1)[..., ::2]
    weight = normal(width, dtype=dtype, seed=2)
    total, normed = add_norm(x, residual, weight, 1e-6)
    assert mx.array_equal(total, (x.astype(mx.float32) + residual.astype(mx.float32)).astype(dtype))
    assert error(normed, rms_norm(float64(total), float64(weight), 1e-6)) < TOLERANCE[dtype]


@pytest.mark.parametrize("biased", [False, True])
def test_add_norm_without_the_mean(biased: bool) -> None:
    x, residual, weight = normal(1, 3, 1000) + 7, normal(1, 3, 1000, seed=1), normal(1000, seed=2)
    bias = normal(1000, seed=3) if biased else None
    total, normed = add_norm(x, residual, weight, 1e-5, centered=True, bias=bias)
    centered = float64(total) - float64(total).mean(axis=-1, keepdims=True)
    expected = rms_norm(centered, float64(weight), 1e-5) + (0 if bias is None else float64(bias))
    assert error(normed, expected) < TOLERANCE[mx.float32]
    assert residual_module._complaint(64, mx.bfloat16, True, biased) == ""


@pytest.mark.parametrize(
    ("gated", "gate_first", "shared"), [(False, False, True), (True, False, False), (True, True, False)]
)
def test_gated_norm_over_groups_that_cross_heads(gated: bool, gate_first: bool, shared: bool) -> None:
    y, weight = normal(2, 2, 192, dtype=mx.bfloat16), normal(64 if shared else 192, seed=2)
    gate = normal(2, 2, 192, seed=1) if gated else None
    found = gated_norm(y, gate, weight, 1e-5, activation="silu", groups=3, gate_first=gate_first)
    x, act = float64(y), 1.0 if gate is None else float64(gate) / (1 + np.exp(-float64(gate)))
    x = x * act if gate_first else x
    expected = rms_norm(x.reshape(2, 2, 3, 64), float64(weight).reshape(-1, 64), 1e-5).reshape(2, 2, 192)
    assert error(found, expected if gate_first else expected * act) < TOLERANCE[mx.bfloat16]


@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize("affine", [False, True])
def test_gated_layer_norm(affine: bool, gate_first: bool) -> None:
    y, gate = normal(2, 2, 192) + 7, normal(2, 2, 192, seed=1)
    weight, shift = (normal(64, seed=2), normal(192, seed=3)) if affine else (None, None)
    found = gated_norm(
        y, gate, weight, 1e-5, bias=shift, centered=True, activation="sigmoid", groups=3, gate_first=gate_first
    )
    act = 1 / (1 + np.exp(-float64(gate)))
    x = (float64(y) * act if gate_first else float64(y)).reshape(2, 2, 3, 64)
    x = rms_norm(x - x.mean(axis=-1, keepdims=True), np.ones(64) if weight is None else float64(weight), 1e-5)
    expected = x.reshape(2, 2, 192) + (0 if shift is None else float64(shift))
    assert error(found, expected if gate_first else expected * act) < TOLERANCE[mx.float32]


def test_gated_norm_without_a_gain() -> None:
    y = normal(2, 2, 192)
    expected = rms_norm(float64(y).reshape(2, 2, 3, 64), np.ones(64), 1e-5).reshape(2, 2, 192)
    assert error(gated_norm(y, None, None, 1e-5, groups=3), expected) < TOLERANCE[mx.float32]


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_gated_norm_adds_what_bypasses_the_recurrence(normed: bool, shared: bool) -> None:
    """In float32, before the gate and the norm (Mamba-2); one factor per head or per channel."""
    y, v = normal(2, 3, 192, dtype=mx.bfloat16), normal(2, 3, 6, 64, dtype=mx.bfloat16, seed=1)[..., ::2]
    gate, skip = normal(2, 3, 192, seed=2), normal(6, 1 if shared else 32, seed=3) * 100
    eps, groups = (1e-5, 2) if normed else (None, 6)
    found = gated_norm(y, gate, None, eps, activation="silu", groups=groups, gate_first=normed, skip=skip, v=v)
    act = float64(gate) / (1 + np.exp(-float64(gate)))
    x = (float64(y).reshape(2, 3, 6, 32) + float64(skip) * float64(v)).reshape(2, 3, 192) * act
    expected = rms_norm(x.reshape(2, 3, 2, 96), np.ones(96), 1e-5).reshape(x.shape) if normed else x
    assert error(found, expected) < TOLERANCE[mx.bfloat16]


def test_gated_norm_is_zero_where_nothing_is_real() -> None:
    y = normal(2, 3, 64)
    y, gate = mx.where(mx.arange(3)[:, None] > 1, mx.nan, y), mx.where(mx.arange(3)[:, None] > 0, mx.nan, y)
    bias = normal(64, seed=1)
    found = gated_norm(
        y, gate, None, 1e-5, bias=bias, centered=True, groups=2, activation="silu", lengths=mx.array([1, 0])
    )
    assert mx.all(mx.isfinite(found)) and mx.any(found[0, 0] != 0)
    assert mx.all(found[0, 1:] == 0) and mx.all(found[1] == 0)


def routed(
    logits: Float64, top: int, score: str, correction: Float64, groups: int, kept: int
) -> tuple[Float64, Float64]:
    """Indices and normalised weights, one token at a time."""
    indices, weights = [], []
    for row in logits.reshape(-1, logits.shape[-1]):
        scores = (
            1 / (1 + np.exp(-row)) if score == "sigmoid" else np.exp(row - row.max()) / np.exp(row - row.max()).sum()
        )
        choice = scores + correction
        if groups > 1:
            ranks = np.sort(choice.reshape(groups, -1), axis=1)[:, -2:].sum(axis=1)
            best = np.argsort(-ranks, kind="stable")[:kept]
            choice = np.where(np.isin(np.arange(len(row)) // (len(row) // groups), best), choice, -np.inf)
        chosen = np.argsort(-choice, kind="stable")[:top]
        indices.append(chosen)
        weights.append(scores[chosen] / scores[chosen].sum())
    shape = (*logits.shape[:-1], top)
    return np.array(indices).reshape(shape), np.array(weights).reshape(shape)


@pytest.mark.parametrize(
    ("experts", "top", "score", "corrected", "groups", "kept"),
    [
        (40, 4, "softmax", False, 1, 1),
        (512, 10, "softmax", False, 1, 1),
        (256, 8, "sigmoid", True, 8, 4),
        (5, 2, "sigmoid", True, 1, 1),
    ],
)
def test_router_topk_equals_sorting(
    experts: int, top: int, score: str, corrected: bool, groups: int, kept: int
) -> None:
    logits = normal(2, 3, experts)
    logits[0, 0] = mx.zeros(experts)  # ties go to the lower index
    correction = normal(experts, seed=1) * 0.1 if corrected else None
    indices, weights = router_topk(
        logits, top, score=score, correction=correction, groups=groups, groups_kept=kept, factor=2.5
    )
    plain = np.zeros(experts) if correction is None else float64(correction)
    expected_indices, expected_weights = routed(float64(logits), top, score, plain, groups, kept)
    assert np.array_equal(np.array(indices), expected_indices)
    assert error(weights, expected_weights * 2.5) < TOLERANCE[mx.float32]


def test_router_topk_adds_to_the_sum_it_divides_by() -> None:
    logits = normal(1, 3, 40)
    _, weights = router_topk(logits, 4, score="sigmoid", sum_eps=0.5, factor=2.5)
    best = -np.sort(-1 / (1 + np.exp(-float64(logits))), axis=-1)[..., :4]
    assert error(weights, 2.5 * best / (best.sum(axis=-1, keepdims=True) + 0.5)) < TOLERANCE[mx.float32]
