"""Decay of the recurrent state from the layer's input, as natural logarithm, float32."""

from __future__ import annotations

from mlxlin.backend import mx
from mlxlin.models.activations import sigmoid, softplus
from mlxlin.models.blocks import Linear, Matrix
from mlxlin.models.params import Parameter, Params, Table
from mlxlin.models.spec import DecaySpec, LinearSpec

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
    if decay is None or decay.kind == "retention":
        return {}
    out = decay_width(spec)
    table = {"decay.weight": Parameter((decay.rank or out, width), "gate")}
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
        if spec.decay.kind == "retention":
            heads = mx.arange(spec.value_heads, dtype=mx.float32)
            self._fixed = params.made(mx.log(1 - mx.power(2.0, -5 - heads)))
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
        if self._spec.kind != "logsigmoid":
            found |= {"rate": self._rate.reshape(-1), "decay_bias": self._bias}
        return found

    def __call__(self, x: mx.array) -> mx.array:
        """Projected x [B, T, rank or width] -> g [B, T, HV] or [B, T, HV, K]."""
        spec = self._spec
        if self._outer is not None:
            x = self._outer(x)
        x = x.astype(mx.float32).reshape(*x.shape[:2], *self._shape)
        if spec.kind == "softplus":
            return self._rate * softplus(x + self._bias)
        if spec.kind == "sigmoid":
            return spec.bound * sigmoid(self._rate * (x + self._bias))
        if spec.kind == "forget":
            return mx.logaddexp(mx.log(self._bound), mx.log1p(-self._bound) - softplus(-x))
        g = -softplus(-x) / spec.divisor
        return g if spec.floor is None else mx.maximum(g, spec.floor)


def _learned_bound(spec: LinearSpec, params: Params) -> mx.array:
    """b of each channel, [H, K]. Float32 from the table on: a long memory is a b just below one."""
    assert spec.decay is not None
    if not spec.decay.bounds:
        return mx.zeros((1, 1))
    shares = mx.softmax(params.take("bounds").astype(mx.float32), axis=0)
    return shares[1 : spec.decay.layer + 1].sum(axis=0).reshape(-1, spec.key_dim)
