"""RWKV-6: a decaying recurrence that is read before it is written (Peng et al. 2024, arXiv:2404.05892)."""

from __future__ import annotations

from mlxlin import recurrences
from mlxlin.backend import mx, one_dispatch
from mlxlin.metal.mixer import Projected
from mlxlin.models.blocks import Linear, Matrix
from mlxlin.models.mixers.fused import time_mixing
from mlxlin.models.mixers.rwkv7 import shifted, token_shift
from mlxlin.models.mixers.step import Step, recurrent
from mlxlin.models.params import Parameter, Params, Table
from mlxlin.models.spec import Rwkv6Spec
from mlxlin.state import LayerState

_INPUTS = ("r", "decay", "k", "v", "gate")  # of the mixed inputs, in the order of the rows of `mix`


def rwkv6_parameters(spec: Rwkv6Spec, width: int) -> Table:
    """Expected parameters of one time mixing in a model of this width."""
    keys, values, rank = spec.heads * spec.key_dim, spec.heads * spec.value_dim, spec.mix_rank
    table: Table = {
        "first_mix": Parameter((width,), "keep"),
        "mix": Parameter((len(_INPUTS), width), "keep"),
        "mix_in.weight": Parameter((len(_INPUTS) * rank, width), "gate"),
        "mix_out.weight": Parameter((width, len(_INPUTS) * rank), "gate"),
        "decay.weight": Parameter((spec.decay_rank, width), "gate"),
        "decay_out.weight": Parameter((keys, spec.decay_rank), "gate"),
        "decay_out.bias": Parameter((keys,), "keep"),
        "bonus": Parameter((spec.heads, spec.key_dim), "keep"),
        "norm.weight": Parameter((values,), "keep"),
        "norm.bias": Parameter((values,), "keep"),
        "out.weight": Parameter((width, values), "matrix"),
    }
    rows = {"r": keys, "k": keys, "v": values, "gate": values}
    return table | {f"{name}.weight": Parameter((count, width), "matrix") for name, count in rows.items()}


@one_dispatch
def shifted_by_token(x: mx.array, change: mx.array, mix: mx.array, own: mx.array) -> mx.array:
    """Inputs mixed with what the token before them had to say, by how much each token wants."""
    return x + change * (mix + own)


class Rwkv6:
    """Time mixing; its state is `S` [B, H, V, K] float32 and `shift` [B, 1, D], the last input."""

    def __init__(self, spec: Rwkv6Spec, params: Params, width: int, dtype: mx.Dtype) -> None:
        self._spec, self._width, self._dtype = spec, width, dtype
        self._fused = time_mixing(spec)
        self._first_mix, self._mix = params.take("first_mix"), params.made(params.take("mix")[:, None, None])
        names = ("r", "k", "v", "gate", "decay", "decay_out", "mix_in", "out")
        self._linear = {name: Linear(Matrix.take(params, name)) for name in names}
        # one matrix per mixed input, [5, rank, D]
        outer = Matrix.take(params, "mix_out").dense(dtype).reshape(width, len(_INPUTS), -1)
        self._mix_out = params.made(outer.transpose(1, 2, 0)[:, None])
        self._bonus = params.take("bonus")
        self._gain, self._bias = params.take("norm.weight"), params.take("norm.bias")

    def fresh(self, batch: int) -> LayerState:
        """The state before the first token."""
        spec = self._spec
        return {
            "S": mx.zeros((batch, spec.heads, spec.value_dim, spec.key_dim), dtype=mx.float32),
            "shift": mx.zeros((batch, 1, self._width), dtype=self._dtype),
        }

    def __call__(self, x: mx.array, state: LayerState, step: Step) -> tuple[mx.array, LayerState]:
        """x [B, T, D] -> y [B, T, D] and the state after the last real token of each row."""
        old, linear = recurrent(state), self._linear
        change, shift = token_shift(x, old["shift"], step.lengths)
        mixed = dict(zip(_INPUTS, self._mixed(x, change), strict=True))
        r, k, v = (linear[name](mixed[name]) for name in ("r", "k", "v"))
        decay = linear["decay_out"](mx.tanh(linear["decay"](mixed["decay"])))
        given = Projected(
            (r, k, v),
            old["S"],
            decay=decay,
            bonus=self._bonus,
            gate=linear["gate"](mixed["gate"]),
            norm=self._gain,
            norm_bias=self._bias,
            lengths=step.lengths,
        )
        read = recurrences.mixer.advance(self._fused, given)
        return linear["out"](read.y.flatten(2)), {"S": read.S, "shift": shift}

    def _mixed(self, x: mx.array, change: mx.array) -> list[mx.array]:
        """The inputs of r, decay, k, v and gate: x_t + m (x_{t-1} - x_t), the m of each from a low-rank projection."""
        low = mx.tanh(self._linear["mix_in"](shifted(x, change, self._first_mix)))
        low = low.reshape(*x.shape[:2], len(_INPUTS), -1).transpose(2, 0, 1, 3)
        mixed = shifted_by_token(x[None], change[None], self._mix, low @ self._mix_out)
        return [part.squeeze(0) for part in mx.split(mixed, len(_INPUTS))]
