"""Normalisations over the last axis.

MLX has fused kernels for GPUs. On the CPU it takes eleven operations apart; the same mathematics with the factor
sqrt(n) folded into the gain takes seven, and decoding on a CPU is mostly the cost of operations.
"""

from __future__ import annotations

from mlxlin.backend import mx
from mlxlin.models.params import Parameter, Params, Table
from mlxlin.models.spec import NormSpec

_L2_EPS = 1e-6  # under the root, added to the sum of squares


def plain(dtype: mx.Dtype) -> bool:
    """Whether plain operations in `dtype` replace the fused kernels here."""
    return dtype == mx.float32 and mx.default_device() == mx.Device(mx.cpu)


def _over_length(x: mx.array, eps: mx.array) -> mx.array:
    """x / sqrt(sum x^2 + eps)."""
    return x * mx.rsqrt((x * x).sum(axis=-1, keepdims=True) + eps)


class Norm:
    """RMS or layer normalisation, statistics in float32; `groups` equal parts of the last axis each have their own."""

    def __init__(self, spec: NormSpec, params: Params, groups: int = 1) -> None:
        self.spec = spec
        self.groups = groups
        self.weight = params.take("weight") if spec.affine else None
        self.bias = params.take("bias") if spec.affine and spec.kind == "layer" else None
        self._gain: mx.array | None = None
        if spec.kind == "rms" and self.weight is not None and plain(self.weight.dtype):
            width = self.weight.shape[0] // groups
            self._gain = params.made((self.weight * width**0.5).reshape(1, 1, -1))
            self._eps = params.made(mx.full((1, 1, 1), spec.eps * width))

    @staticmethod
    def parameters(spec: NormSpec, width: int) -> Table:
        """Expected parameters."""
        names = ["weight", "bias"] if spec.kind == "layer" else ["weight"]
        return {name: Parameter((width,), "keep") for name in names} if spec.affine else {}

    def __call__(self, x: mx.array) -> mx.array:
        """x [B, T, ..., width], normalised."""
        if self.groups > 1:
            return self._by_group(x)
        if self.spec.kind == "layer":
            return mx.fast.layer_norm(x, self.weight, self.bias, self.spec.eps)
        if self._gain is None or x.dtype != mx.float32:
            return mx.fast.rms_norm(x, self.weight, self.spec.eps)
        return _over_length(x, self._eps) * self._gain

    def _by_group(self, x: mx.array) -> mx.array:
        parts = x.reshape(*x.shape[:-1], self.groups, -1)
        if self._gain is not None and x.dtype == mx.float32:
            return _over_length(parts, self._eps).reshape(x.shape) * self._gain
        y = mx.fast.rms_norm(parts, None, self.spec.eps).reshape(x.shape)
        return y if self.weight is None else y * self.weight


class UnitVectors:
    """length x / sqrt(sum x^2 + 1e-6)."""

    def __init__(self, length: float, dim: int, params: Params, dtype: mx.Dtype) -> None:
        self._length = length
        self._dim = dim
        self._eps = params.made(mx.full((1, 1, 1, 1), _L2_EPS)) if plain(dtype) else None
        self._gain = params.made(mx.full((dim,), length * dim**-0.5, dtype=dtype))

    def __call__(self, x: mx.array) -> mx.array:
        """x [B, T, H, dim], each vector of the given length."""
        if self._eps is None:
            return mx.fast.rms_norm(x, self._gain, _L2_EPS / self._dim)
        unit = _over_length(x, self._eps)
        return unit if self._length == 1.0 else unit * self._length
