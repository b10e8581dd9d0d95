"""Gated slot attention: softmax attention over a few memories instead of over all tokens (Zhang et al. 2024,
arXiv:2409.07146)."""

from __future__ import annotations

from mlxlin import recurrences
from mlxlin.backend import mx
from mlxlin.metal.mixer import Projected
from mlxlin.models.blocks import Linear, Matrix, Projections
from mlxlin.models.mixers.fused import slot_attention
from mlxlin.models.mixers.step import Step, recurrent
from mlxlin.models.norms import Norm
from mlxlin.models.params import Parameter, Params, Table, under
from mlxlin.models.spec import SlotSpec
from mlxlin.state import LayerState

_INPUTS = ["qkv", "forget"]


def _widths(spec: SlotSpec) -> tuple[int, int, int]:
    """Projected width of q, k and v."""
    return spec.heads * spec.key_dim, spec.kv_heads * spec.key_dim, spec.kv_heads * spec.value_dim


def slot_parameters(spec: SlotSpec, width: int) -> Table:
    """Expected parameters of one mixer in a model of this width."""
    values = spec.heads * spec.value_dim
    table: Table = {
        "qkv.weight": Parameter((sum(_widths(spec)), width), "matrix"),
        "forget.weight": Parameter((spec.kv_heads * spec.slots, width), "gate"),
        "out.weight": Parameter((width, values), "matrix"),
    }
    if spec.conv:
        table["conv.weight"] = Parameter((spec.conv, sum(_widths(spec))), "keep")
    return table | under("norm", Norm.parameters(spec.norm, values))


class SlotMixer:
    """One layer; its state is `S` [B, H, M, K], the keys of M slots, `S_values` [B, H, V, M], float32, and `conv`."""

    def __init__(self, spec: SlotSpec, params: Params, width: int, dtype: mx.Dtype) -> None:
        self._spec, self._fused, self._dtype = spec, slot_attention(spec), dtype
        self._project = Projections(params, _INPUTS)
        self._conv = params.take("conv.weight") if spec.conv else None
        self._norm = params.take("norm.weight") if spec.norm.affine else None
        self._out = Linear(Matrix.take(params, "out"))

    def fresh(self, batch: int) -> LayerState:
        """The state before the first token."""
        spec = self._spec
        state = {
            "S": mx.zeros((batch, spec.heads, spec.slots, spec.key_dim)),
            "S_values": mx.zeros((batch, spec.heads, spec.value_dim, spec.slots)),
        }
        if spec.conv:
            state["conv"] = mx.zeros((batch, spec.conv - 1, sum(_widths(spec))), dtype=self._dtype)
        return state

    def __call__(self, x: mx.array, state: LayerState, step: Step) -> tuple[mx.array, LayerState]:
        """x [B, T, D] -> y [B, T, D] and the state after the last real token of each row."""
        old = recurrent(state)
        qkv, forget = self._project(x)
        given = {"decay": forget, "weight": self._conv, "memory": old.get("conv"), "norm": self._norm}
        mixed = recurrences.mixer.advance(
            self._fused,
            Projected(qkv, old["S_values"], S_keys=old["S"], **given, lengths=step.lengths),
        )
        new = {"S": mixed.S_keys, "S_values": mixed.S, "conv": mixed.memory}
        return self._out(mixed.y.flatten(2)), {name: array for name, array in new.items() if array is not None}
