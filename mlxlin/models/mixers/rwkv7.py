"""RWKV-7: time mixing, a generalised delta rule, and channel mixing (Peng et al. 2025, arXiv:2503.14456)."""

from __future__ import annotations

from mlxlin import recurrences
from mlxlin.backend import mx, one_dispatch
from mlxlin.metal.rwkv7 import TimeMix
from mlxlin.models.activations import relu2, sigmoid_gated
from mlxlin.models.blocks import Linear, Matrix
from mlxlin.models.mixers.step import Step, recurrent
from mlxlin.models.params import Parameter, Params, Table
from mlxlin.models.spec import ChannelMixSpec, Rwkv7Spec
from mlxlin.state import LayerState

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
    if x.shape[1] == 1 and lengths is None:
        return memory - x, x
    window = mx.concatenate([memory, x], axis=1)
    if lengths is not None:
        return window[:, :-1] - x, mx.take_along_axis(window, lengths[:, None, None], axis=1)
    # A plain slice would keep the whole window alive for its last row.
    return window[:, :-1] - x, mx.contiguous(x[:, -1:])


@one_dispatch
def shifted(x: mx.array, change: mx.array, mix: mx.array) -> mx.array:
    """Inputs mixed with what the token before them had to say."""
    return x + change * mix


@one_dispatch
def drawn(v: mx.array, first: mx.array, gate: mx.array) -> mx.array:
    """v moved towards the values of the first layer by sigmoid(gate)."""
    return v + (first - v) * mx.sigmoid(gate)


class Rwkv7:
    """Time mixing; its state is `S` [B, H, V, K] float32 and `shift` [B, 1, D], the last input."""

    def __init__(self, spec: Rwkv7Spec, params: Params, width: int, dtype: mx.Dtype) -> None:
        self._spec, self._width, self._dtype = spec, width, dtype
        self._mix = params.made(params.take("mix")[:, None, None])
        names = ["r", "k", "v", "decay", "decay_out", "rate", "rate_out", "gate", "gate_out", "out"]
        names += ["value", "value_out"] if spec.value_rank else []
        self._linear = {name: Linear(Matrix.take(params, name)) for name in names}
        self._k_k, self._k_a = params.take("k_k"), params.take("k_a")
        self._r_k = params.take("r_k").reshape(spec.heads, spec.head_dim)
        self._gain, self._bias = params.take("norm.weight"), params.take("norm.bias")

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
        mixed = mx.split(shifted(x[None], change[None], self._mix), _MIXES)
        for_r, for_decay, for_k, for_v, for_rate, for_gate = (z.squeeze(0) for z in mixed)
        r, k = linear["r"](for_r), linear["k"](for_k)
        v = self._value(linear["v"](for_v), for_v, step)
        decay = linear["decay_out"](mx.tanh(linear["decay"](for_decay)))
        rate = linear["rate_out"](linear["rate"](for_rate))
        gate = linear["gate_out"](mx.sigmoid(linear["gate"](for_gate)))
        vectors = (self._k_k, self._k_a, self._gain, self._bias, self._r_k)
        y, S = recurrences.rwkv7.advance(
            TimeMix(r, k, v, gate, decay, rate, old["S"], *vectors, spec.eps, spec.key_eps, step.lengths)
        )
        return linear["out"](y), {"S": S, "shift": shift}

    def _value(self, v: mx.array, x: mx.array, step: Step) -> mx.array:
        """v drawn towards the first layer's; the first layer leaves its own for the others."""
        if not self._spec.value_rank:
            step.first_value = v
            return v
        assert step.first_value is not None
        return drawn(v, step.first_value, self._linear["value_out"](self._linear["value"](x)))


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
        y = self._value(relu2(self._key(shifted(x, change, self._mix))))
        if self._gate is not None and self._gate_mix is not None:
            y = sigmoid_gated(self._gate(shifted(x, change, self._gate_mix)), y)
        return y, memory
