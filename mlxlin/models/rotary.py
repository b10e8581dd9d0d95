"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864)."""

from __future__ import annotations

from functools import lru_cache

from mlxlin.backend import mx
from mlxlin.models.spec import RopeSpec


@lru_cache
def _frequencies(spec: RopeSpec) -> mx.array:
    """Turns per token of each pair, [dims / 2]."""
    exponents = mx.arange(0, spec.dims, 2, dtype=mx.float32) / spec.dims
    frequencies = mx.power(spec.base, -exponents)
    mx.eval(frequencies)
    return frequencies


class Rotary:
    """The angles of one forward pass: computed once for all layers where the device has no fused kernel."""

    def __init__(self, positions: mx.array, length: int) -> None:
        self._positions = positions
        self._length = length
        self._angles: dict[RopeSpec, tuple[mx.array, mx.array]] = {}

    def __call__(self, x: mx.array, spec: RopeSpec) -> mx.array:
        """x [B, H, T, d] with its first `spec.dims` channels turned by its tokens' positions."""
        if spec.interleaved or x.dtype != mx.float32 or mx.default_device() != mx.Device(mx.cpu):
            base = spec.base
            return mx.fast.rope(
                x, spec.dims, traditional=spec.interleaved, base=base, scale=1.0, offset=self._positions
            )
        cos, sin = self.turns(spec)
        half = spec.dims // 2
        one, two, *rest = mx.split(x, [half] if spec.dims == x.shape[-1] else [half, spec.dims], axis=-1)
        return mx.concatenate([one * cos - two * sin, two * cos + one * sin, *rest], axis=-1)

    def turns(self, spec: RopeSpec) -> tuple[mx.array, mx.array]:
        """Cosines and sines, [B, 1, T, dims / 2] float32."""
        if spec not in self._angles:
            tokens = (self._positions[:, None] + mx.arange(self._length))[:, None, :, None]
            angles = tokens.astype(mx.float32) * _frequencies(spec)
            self._angles[spec] = mx.cos(angles), mx.sin(angles)
        return self._angles[spec]
