"""Pointwise functions, in the form that is fast on the device.

MLX's CPU backend computes exp, sigmoid and tanh one number at a time; its power is vectorised, two to four times as
fast and as exact in float32, so there everything large is built on it. Elsewhere, and where the number of operations
counts more than their size, MLX's own functions are used.

On Metal what matters is the number of dispatches: chains of pointwise functions are compiled into one.
"""

from __future__ import annotations

from mlxlin.backend import mx, one_dispatch
from mlxlin.recurrences.decay import exp

_LARGE = 1 << 14  # elements; below, one operation costs less than the several that a power needs around it


def vectorises(dtype: mx.Dtype, size: int) -> bool:
    """Whether functions of `size` numbers are faster built on a power."""
    return size >= _LARGE and dtype == mx.float32 and mx.default_device() == mx.Device(mx.cpu)


def sigmoid(x: mx.array) -> mx.array:
    """1 / (1 + exp(-x))."""
    return 1 / (1 + exp(-x)) if vectorises(x.dtype, x.size) else mx.sigmoid(x)


def silu(x: mx.array) -> mx.array:
    """x sigmoid(x)."""
    return x / (1 + exp(-x)) if vectorises(x.dtype, x.size) else x * mx.sigmoid(x)


def softplus(x: mx.array) -> mx.array:
    """log(1 + exp(x)), without overflow and exact where it is small."""
    if vectorises(x.dtype, x.size):
        return mx.maximum(x, 0) + mx.log1p(exp(-mx.abs(x)))
    return mx.logaddexp(x, 0.0)


@one_dispatch
def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """silu(gate) x."""
    return silu(gate) * x


@one_dispatch
def relu2(x: mx.array) -> mx.array:
    """relu(x)^2."""
    return mx.square(mx.maximum(x, 0))


@one_dispatch
def sigmoid_gated(gate: mx.array, x: mx.array) -> mx.array:
    """sigmoid(gate) x."""
    return sigmoid(gate) * x


def softmax_weights(scores: mx.array) -> tuple[mx.array, mx.array]:
    """exp(scores - max) over the last axis, and the sums [..., 1] that would make them a softmax."""
    weights = exp(scores - scores.max(axis=-1, keepdims=True))
    return weights, weights.sum(axis=-1, keepdims=True)
