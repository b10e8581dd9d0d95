"""RWKV-7: time mixing, a generalised delta rule, and channel mixing (Peng et al. 2025, arXiv:2503.14456)."""

from __future__ import annotations

from mlxlin import recurrences
from mlxlin.backend import mx
from mlxlin.models.activations import sigmoid
from mlxlin.models.blocks import Linear, Matrix
from mlxlin.models.mixers.step import Step, recurrent
from mlxlin.models.params import Parameter, Params, Table
from mlxlin.models.spec import ChannelMixSpec, Rwkv7Spec
from mlxlin.state import LayerState

_SLOWEST = -0.6065306597126334  # log of the smallest decay factor, -exp(-1/2)
_MIXES = 6  # of the inputs of r, decay, k, v, rate and gate, in this order


def rwkv7_parameters(spec: Rwkv7Spec, width: int) -> Table:
    """Expected parameters of one time mixing in a model of this width."""
    table: Table = {"mix": Parameter((_MIXES, width), "keep")}
    table |= {f"{name}.weight": Parameter((width, width), "matrix") for name in ("r", "k", "v", "out")}
    ranks = {
        "decay": spec.decay_rank,
        "rate": spec.rate_rank,
        "value": spec.value_rank,
        "gate": spec.gate_rank,
    }
    for name, rank in ranks.items():
        if rank:
            table[f"{name}.weight"] = Parameter((rank, width), "gate")
            table[f"{name}_out.weight"] = Parameter((width, rank), "gate")
            if name != "gate":
                table[f"{name}_out.bias"] = Parameter((width,), "keep")
    table |= {name: Parameter((width,), "keep") for name in ("k_k", "k_a", "r_k", "norm.weight", "norm.bias")}
    return table


def channel_mix_parameters(spec: ChannelMixSpec, width: int) -> Table:
    """Expected parameters of one channel mixing in a model of this width."""
    table = {
        "mix": Parameter((width,), "keep"),
        "key.weight": Parameter((spec.hidden, width), "matrix"),
        "value.weight": Parameter((width, spec.hidden), "matrix"),
    }
    if spec.gated:
        table |= {"gate_mix": Parameter((width,), "keep"), "gate.weight": Parameter((width, width), "matrix")}
    return table


def token_shift(x: mx.array, memory: mx.array, lengths: mx.array | None) -> tuple[mx.array, mx.array]:
    """What the token before each had to say, minus the token's own: x_{t-1} - x_t.

    Args:
        x: inputs [B, T, D].
        memory: the input before the first, [B, 1, D].
        lengths: real inputs of each row, [B] int32; None when all are.

    Returns:
        The difference [B, T, D], and the last real input of each row, [B, 1, D].
    """
    window = mx.concatenate([memory, x], axis=1)
    if lengths is not None:
        return window[:, :-1] - x, mx.take_along_axis(window, lengths[:, None, None], axis=1)
    # A plain slice would keep the whole window alive for its last row.
    return window[:, :-1] - x, mx.contiguous(x[:, -1:])


class Rwkv7:
    """Time mixing; its state is `S` [B, H, V, K] float32 and `shift` [B, 1, D], the last input."""

    def __init__(self, spec: Rwkv7Spec, params: Params, width: int, dtype: mx.Dtype) -> None:
        self._spec, self._width, self._dtype = spec, width, dtype
        self._mix = params.take("mix")
        names = ["r", "k", "v", "decay", "decay_out", "rate", "rate_out", "gate", "gate_out", "out"]
        names += ["value", "value_out"] if spec.value_rank else []
        self._linear = {name: Linear(Matrix.take(params, name)) for name in names}
        self._k_k, self._k_a = params.take("k_k"), params.take("k_a")
        self._r_k = params.take("r_k").reshape(spec.heads, spec.head_dim)
        self._gain, self._bias = params.take("norm.weight"), params.take("norm.bias")
        self._unit = params.made(mx.full((spec.head_dim,), spec.head_dim**-0.5, dtype=dtype))

    def fresh(self, batch: int) -> LayerState:
        """The state before the first token."""
        spec = self._spec
        return {
            "S": mx.zeros((batch, spec.heads, spec.head_dim, spec.head_dim), dtype=mx.float32),
            "shift": mx.zeros((batch, 1, self._width), dtype=self._dtype),
        }

    def __call__(self, x: mx.array, state: LayerState, step: Step) -> tuple[mx.array, LayerState]:
        """x [B, T, D] -> y [B, T, D] and the state after the last real token of each row."""
        spec, old, linear = self._spec, recurrent(state), self._linear
        change, shift = token_shift(x, old["shift"], step.lengths)
        for_r, for_decay, for_k, for_v, for_rate, for_gate = (x + change * self._mix[i] for i in range(_MIXES))
        r, k = linear["r"](for_r), linear["k"](for_k)
        v = self._heads(self._value(linear["v"](for_v), for_v, step))
        decay = linear["decay_out"](mx.tanh(linear["decay"](for_decay)))
        rate = mx.sigmoid(linear["rate_out"](linear["rate"](for_rate)))
        gate = linear["gate_out"](mx.sigmoid(linear["gate"](for_gate)))
        removal = mx.fast.rms_norm(self._heads(k * self._k_k), self._unit, spec.key_eps / spec.head_dim)
        k = self._heads(k * (1 + (rate - 1) * self._k_a))
        r = self._heads(r)
        y, S = recurrences.run(
            "dplr",
            r,
            k,
            v,
            g=_SLOWEST * mx.sigmoid(self._heads(decay).astype(mx.float32)),
            a=-removal,
            b=removal * self._heads(rate),
            state=old["S"],
            lengths=step.lengths,
        )
        assert isinstance(S, mx.array)
        bonus = (r * k * self._r_k).sum(axis=-1, keepdims=True) * v
        y = mx.fast.layer_norm(y, None, None, spec.eps).reshape(*x.shape[:2], -1) * self._gain + self._bias
        return linear["out"]((y + bonus.reshape(y.shape)) * gate), {"S": S, "shift": shift}

    def _heads(self, x: mx.array) -> mx.array:
        return x.reshape(*x.shape[:2], self._spec.heads, -1)

    def _value(self, v: mx.array, x: mx.array, step: Step) -> mx.array:
        """v drawn towards the first layer's; the first layer leaves its own for the others."""
        if not self._spec.value_rank:
            step.first_value = v
            return v
        assert step.first_value is not None
        return v + (step.first_value - v) * mx.sigmoid(self._linear["value_out"](self._linear["value"](x)))


class ChannelMix:
    """Feed-forward with a token shift: value(relu(key(x_t + mix (x_{t-1} - x_t)))^2), perhaps gated alike."""

    def __init__(self, spec: ChannelMixSpec, params: Params, width: int, dtype: mx.Dtype) -> None:
        self._width, self._dtype = width, dtype
        self._mix = params.take("mix")
        self._gate_mix = params.take("gate_mix") if spec.gated else None
        self._gate = Linear(Matrix.take(params, "gate")) if spec.gated else None
        self._key, self._value = Linear(Matrix.take(params, "key")), Linear(Matrix.take(params, "value"))

    def fresh(self, batch: int) -> mx.array:
        """The input before the first token, [B, 1, D]."""
        return mx.zeros((batch, 1, self._width), dtype=self._dtype)

    def __call__(self, x: mx.array, memory: mx.array, step: Step) -> tuple[mx.array, mx.array]:
        """x [B, T, D] and the input before it [B, 1, D] -> y [B, T, D] and the last real input of each row."""
        change, memory = token_shift(x, memory, step.lengths)
        y = self._value(mx.square(mx.maximum(self._key(x + change * self._mix), 0)))
        if self._gate is not None and self._gate_mix is not None:
            y = y * sigmoid(self._gate(x + change * self._gate_mix))
        return y, memory
