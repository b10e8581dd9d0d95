"""The Metal kernels of mlx-lm, unmodified: the emulator runs them and they agree with a float64 recurrence."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from mlxlin.backend import mx
from tests.msl import install, last_report

pytestmark = pytest.mark.peers
Array = np.ndarray[Any, Any]
# largest difference, relative to the largest value: float32 sums, or one rounding of the output
TOLERANCE = {mx.float32: 2e-6, mx.float16: 1e-3, mx.bfloat16: 8e-3}


def emulated(name: str, **options: Any) -> ModuleType:
    """A fresh import of mlx_lm.models.<name>, whose kernels, made while importing, are the emulator's."""
    full = f"mlx_lm.models.{name}"
    sys.modules.pop(full, None)
    with install(**options):
        return importlib.import_module(full)


@pytest.fixture(scope="module", autouse=True)
def forget_emulated_modules() -> Iterator[None]:
    yield
    for name in ("gated_delta", "ssm", "rwkv7"):
        sys.modules.pop(f"mlx_lm.models.{name}", None)


def normal(seed: int, *shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def f64(x: mx.array) -> Array:
    return np.array(x.astype(mx.float32), np.float64)


def error(result: mx.array, expected: Array) -> float:
    return float(np.abs(f64(result) - expected).max() / np.abs(expected).max())


def gated_delta(q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array, mask: Array) -> tuple[Array, Array]:
    """S = g S (1 - beta k k^T) + beta v k^T per value head, y = S q; a masked token leaves the state and gives 0."""
    repeat = v.shape[2] // q.shape[2]
    q, k = np.repeat(q, repeat, 2), np.repeat(k, repeat, 2)
    g = g if g.ndim == 4 else g[..., None]
    state, y = state.copy(), np.zeros(v.shape)
    for t in range(q.shape[1]):
        decayed = state * g[:, t, :, None, :]
        delta = beta[:, t, :, None] * (v[:, t] - np.einsum("bhvk,bhk->bhv", decayed, k[:, t]))
        updated = decayed + delta[..., None] * k[:, t, :, None, :]
        keep = mask[:, t, None, None, None]
        state = np.where(keep, updated, state)
        y[:, t] = np.where(keep[..., 0], np.einsum("bhvk,bhk->bhv", updated, q[:, t]), 0)
    return y, state


def gated_delta_inputs(dtype: mx.Dtype, *, key_dim: int, vector_gate: bool) -> list[mx.array]:
    batch, tokens, heads, value_heads, value_dim = 2, 5, 2, 4, 16
    q, k = (normal(s, batch, tokens, heads, key_dim) for s in (1, 2))
    q, k = ((x / mx.sqrt((x * x).sum(-1, keepdims=True))).astype(dtype) for x in (q, k))
    gate_shape = (batch, tokens, value_heads, *([key_dim] if vector_gate else []))
    return [
        q,
        k,
        normal(3, batch, tokens, value_heads, value_dim, dtype=dtype),
        mx.sigmoid(normal(4, *gate_shape) + 2),
        mx.sigmoid(normal(5, batch, tokens, value_heads)).astype(dtype),
        normal(6, batch, value_heads, value_dim, key_dim),
    ]


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("vector_gate", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_gated_delta(dtype: mx.Dtype, vector_gate: bool, masked: bool) -> None:
    # with a mask all lanes of a SIMD-group write the same zero: a race by the letter
    module = emulated("gated_delta", strict=not masked)
    inputs = gated_delta_inputs(dtype, key_dim=64, vector_gate=vector_gate)
    mask = mx.arange(5)[None] < mx.array([[5], [3]])
    y, state = module.gated_delta_kernel(*inputs, mask if masked else None)
    for warning in last_report().warnings:
        assert "data race on device memory 'y'" in warning and "this store" in warning
    everything = np.ones((2, 5), bool)
    expected_y, expected_state = gated_delta(*map(f64, inputs), np.array(mask) if masked else everything)
    assert error(y, expected_y) < TOLERANCE[dtype]
    assert error(state, expected_state) < TOLERANCE[mx.float32]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_packed_gated_delta_is_bitwise_the_explicit_tree(dtype: mx.Dtype) -> None:
    """What mlx-lm claims of its kernels; the emulator's simd_sum adds in the same order, under every schedule."""
    inputs = gated_delta_inputs(dtype, key_dim=128, vector_gate=False)
    results = []
    for order in range(8):
        module = emulated("gated_delta", order=order)
        kernels = [module.gated_delta_kernel, module.gated_delta_kernel_unpacked, module.gated_delta_kernel_xtree]
        results += [kernel(*inputs) for kernel in kernels]
    assert all(mx.array_equal(a, b) for result in results for a, b in zip(result, results[0], strict=True))
    expected = gated_delta(*map(f64, inputs), np.ones((2, 5), bool))
    assert error(results[0][0], expected[0]) < TOLERANCE[dtype]
    assert error(results[0][1], expected[1]) < TOLERANCE[mx.float32]


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_ssm(dtype: mx.Dtype) -> None:
    module = emulated("ssm")
    batch, heads, dim, groups, state_dim = 2, 4, 16, 2, 64
    x = normal(1, batch, 1, heads, dim, dtype=dtype)
    a_log = normal(2, heads)
    b, c = (normal(s, batch, 1, groups, state_dim, dtype=dtype) for s in (3, 4))
    d, bias = (normal(s, heads, dtype=dtype) for s in (5, 6))
    dt = normal(7, batch, 1, heads, dtype=dtype)
    state = normal(8, batch, heads, dim, state_dim)
    y, new_state = module.ssm_update_kernel(x, a_log, b, c, d, dt, bias, state, (0.001, 100.0))

    step = np.clip(np.logaddexp(0, f64(dt) + f64(bias)), 0.001, 100.0)[:, 0]  # [batch, heads]
    decay = np.exp(-np.exp(f64(a_log)) * step)[..., None, None]
    b64, c64 = (np.repeat(f64(z)[:, 0], heads // groups, 1) for z in (b, c))
    x64 = f64(x)[:, 0]
    expected_state = decay * f64(state) + (step[..., None] * x64)[..., None] * b64[:, :, None, :]
    expected_y = np.einsum("bhds,bhs->bhd", expected_state, c64) + x64 * f64(d)[:, None]
    assert error(y, expected_y[:, None]) < TOLERANCE[dtype]
    assert error(new_state, expected_state) < 2e-6


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_rwkv7(dtype: mx.Dtype) -> None:
    module = emulated("rwkv7")
    batch, tokens, heads, dim = 2, 5, 2, 64
    r, k, v = (normal(s, batch, tokens, heads, dim, dtype=dtype) for s in (1, 2, 3))
    w = mx.sigmoid(normal(4, batch, tokens, heads, dim) + 2).astype(dtype)
    kk = normal(5, batch, tokens, heads, dim)
    kk = kk / mx.sqrt((kk * kk).sum(-1, keepdims=True))
    a, b = (-kk).astype(dtype), (kk * mx.sigmoid(normal(6, batch, tokens, heads, dim))).astype(dtype)
    state = normal(7, batch, heads, dim, dim, dtype=dtype)
    y, new_state = module.wkv7_kernel(r, w, k, v, a, b, state)

    s = f64(state)
    r64, w64, k64, v64, a64, b64 = map(f64, (r, w, k, v, a, b))
    expected = np.zeros(v64.shape)
    for t in range(tokens):
        read = np.einsum("bhvk,bhk->bhv", s, a64[:, t])
        s = s * w64[:, t, :, None, :] + v64[:, t, :, :, None] * k64[:, t, :, None, :]
        s = s + read[..., None] * b64[:, t, :, None, :]
        expected[:, t] = np.einsum("bhvk,bhk->bhv", s, r64[:, t])
    assert error(y, expected) < TOLERANCE[dtype]
    assert error(new_state, s) < TOLERANCE[dtype]
