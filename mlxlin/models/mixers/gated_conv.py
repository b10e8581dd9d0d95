"""LFM2's gated short convolution: a mixer that remembers a few inputs and nothing else."""

from __future__ import annotations

from mlxlin.backend import mx
from mlxlin.models.blocks import Linear, Matrix
from mlxlin.models.mixers.convolution import short_convolution
from mlxlin.models.mixers.step import Step, recurrent
from mlxlin.models.params import Parameter, Params, Table
from mlxlin.models.spec import GatedConvSpec
from mlxlin.state import LayerState


def gated_conv_parameters(spec: GatedConvSpec, width: int) -> Table:
    """Expected parameters of one gated convolution in a model of this width."""
    table = {
        "in.weight": Parameter((3 * width, width), "matrix"),
        "conv.weight": Parameter((spec.taps, width), "keep"),
        "out.weight": Parameter((width, width), "matrix"),
    }
    if spec.bias:
        rows = {"in": 3 * width, "conv": width, "out": width}
        table |= {f"{name}.bias": Parameter((size,), "keep") for name, size in rows.items()}
    return table


class GatedConv:
    """y = out(after * conv(before * x)), the three of one projection; its state is `conv` [B, taps - 1, D]."""

    def __init__(self, spec: GatedConvSpec, params: Params, width: int, dtype: mx.Dtype) -> None:
        self._memory, self._dtype = (spec.taps - 1, width), dtype
        self._in, self._out = (Linear(Matrix.take(params, name)) for name in ("in", "out"))
        self._conv = params.take("conv.weight")
        self._bias = params.take("conv.bias") if spec.bias else None

    def fresh(self, batch: int) -> LayerState:
        """The state before the first token."""
        return {"conv": mx.zeros((batch, *self._memory), dtype=self._dtype)}

    def __call__(self, x: mx.array, state: LayerState, step: Step) -> tuple[mx.array, LayerState]:
        """x [B, T, D] -> y [B, T, D] and the state after the last real token of each row."""
        before, after, x = mx.split(self._in(x), 3, axis=-1)
        y, memory = short_convolution(before * x, recurrent(state)["conv"], self._conv, self._bias, step.lengths)
        return self._out(after * y), {"conv": memory}
