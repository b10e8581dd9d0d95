"""Decay of the recurrent state from the layer's input, as natural logarithm, float32."""

from __future__ import annotations

import math

from mlxlin.backend import mx
from mlxlin.models.activations import sigmoid, softplus
from mlxlin.models.blocks import Linear, Matrix
from mlxlin.models.params import Parameter, Params, Table
from mlxlin.models.spec import FIXED_DECAYS, DecaySpec, LinearSpec

# exp(A_log) is capped below infinity: infinity times a softplus that underflows to zero would be NaN.
_LARGEST_RATE = 3e38


def decay_width(spec: LinearSpec) -> int:
    """Values of g per token before heads are repeated."""
    assert spec.decay is not None
    heads = spec.kv_heads or spec.value_heads
    return heads * (spec.key_dim if spec.decay.vector else 1)


def decay_parameters(spec: LinearSpec, width: int) -> Table:
    """Expected parameters, without the (first) projection, which is one of the mixer's."""
    decay = spec.decay
    if decay is None or decay.kind in FIXED_DECAYS:
        return {}
    out = decay_width(spec)
    table = {"decay.weight": Parameter((decay.rank or out, width), "gate")}
    if spec.in_bias:
        table["decay.bias"] = Parameter((decay.rank or out,), "keep")
    if decay.rank:
        table["decay_out.weight"] = Parameter((out, decay.rank), "gate")
    if decay.kind == "forget":
        if decay.bounds:
            table["bounds"] = Parameter((decay.bounds, out), "keep")
    elif decay.kind == "logsigmoid":
        table["decay_out.bias"] = Parameter((out,), "keep")
    else:
        table["A_log"] = Parameter((spec.value_heads,), "keep")
        table["dt_bias"] = Parameter((out,), "keep")
    return table


class Decay:
    """g from the projected input."""

    def __init__(self, spec: LinearSpec, params: Params) -> None:
        assert spec.decay is not None
        self._spec: DecaySpec = spec.decay
        self._shape = (spec.kv_heads or spec.value_heads, spec.key_dim) if spec.decay.vector else (spec.value_heads,)
        self._outer = Linear(Matrix.take(params, "decay_out")) if spec.decay.rank else None
        if spec.decay.kind in FIXED_DECAYS:
            self._fixed = params.made(mx.array(_fixed_rates(spec.decay, spec.value_heads), dtype=mx.float32))
        elif spec.decay.kind == "forget":
            self._bound = params.made(_learned_bound(spec, params))
        elif spec.decay.kind != "logsigmoid":
            rate = mx.minimum(mx.exp(params.take("A_log").astype(mx.float32)), _LARGEST_RATE)
            if spec.decay.vector:
                rate = rate[:, None]
            self._rate = params.made(-rate if spec.decay.kind == "softplus" else rate)
            self._bias = params.made(params.take("dt_bias").astype(mx.float32).reshape(self._shape))

    def fixed(self, batch: int, length: int) -> mx.array:
        """g that does not depend on the input, [B, T, HV]."""
        return mx.broadcast_to(self._fixed, (batch, length, *self._fixed.shape))

    def parts(self, x: mx.array | None, batch: int, length: int) -> dict[str, mx.array]:
        """What a fused kernel makes g of, by the names of `mlxlin.metal.mixer.Projected`."""
        if x is None:
            return {"decay": self.fixed(batch, length)}
        found = {"decay": x if self._outer is None else self._outer(x)}
        if self._spec.kind == "forget":
            found["decay_bias"] = mx.broadcast_to(self._bound, self._shape)
        elif self._spec.kind != "logsigmoid":
            found |= {"rate": self._rate.reshape(-1), "decay_bias": self._bias}
        return found

    def step(self, x: mx.array) -> mx.array:
        """Projected x [B, T, rank or width] -> the time step dt [B, T, HV] or [B, T, HV, K] of a softplus decay."""
        dt = softplus(self._projected(x) + self._bias)
        if self._spec.shortest > 0.0:
            dt = mx.maximum(dt, self._spec.shortest)
        return dt if self._spec.longest is None else mx.minimum(dt, self._spec.longest)

    def over(self, dt: mx.array) -> mx.array:
        """The g of a time step."""
        return self._rate * dt

    def _projected(self, x: mx.array) -> mx.array:
        if self._outer is not None:
            x = self._outer(x)
        return x.astype(mx.float32).reshape(*x.shape[:2], *self._shape)

    def __call__(self, x: mx.array) -> mx.array:
        """Projected x [B, T, rank or width] -> g [B, T, HV] or [B, T, HV, K]."""
        spec = self._spec
        if spec.kind == "softplus":
            return self.over(self.step(x))
        x = self._projected(x)
        if spec.kind == "sigmoid":
            return spec.bound * sigmoid(self._rate * (x + self._bias))
        if spec.kind == "forget":
            return mx.logaddexp(mx.log(self._bound), mx.log1p(-self._bound) - softplus(-x))
        g = -softplus(-x) / spec.divisor
        return g if spec.floor is None else mx.maximum(g, spec.floor)


def _fixed_rates(decay: DecaySpec, heads: int) -> list[float]:
    """g of each head."""
    if decay.kind == "retention":
        return [math.log1p(-(2.0 ** (-5 - head))) for head in range(heads)]
    slopes = _alibi(heads) if decay.kind == "alibi" else _geometric(heads)
    return [-decay.factor * slope for slope in slopes]


def _geometric(heads: int) -> list[float]:
    return [2.0 ** (-8 * (head + 1) / heads) for head in range(heads)]


def _alibi(heads: int) -> list[float]:
    """The series for the power of two below, then every other slope of the one above (arXiv:2108.12409)."""
    below = 1 << (heads.bit_length() - 1)
    return _geometric(below) + _geometric(2 * below)[::2][: heads - below]


def _learned_bound(spec: LinearSpec, params: Params) -> mx.array:
    """b of each channel, [H, K]. Float32 from the table on: a long memory is a b just below one."""
    assert spec.decay is not None
    if not spec.decay.bounds:
        return mx.zeros((1, 1))
    shares = mx.softmax(params.take("bounds").astype(mx.float32), axis=0)
    return shares[1 : spec.decay.layer + 1].sum(axis=0).reshape(-1, spec.key_dim)
