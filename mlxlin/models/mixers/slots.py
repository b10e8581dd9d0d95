"""Gated slot attention: softmax attention over a few memories instead of over all tokens (arXiv:2409.07146).

Each token is written into every slot as far as the slot lets go of what it holds, s = 1 - exp(f). One recurrence reads
how well a query fits the keys in each slot; behind a softmax, another reads the values there.
"""

from __future__ import annotations

from mlxlin import recurrences
from mlxlin.backend import mx
from mlxlin.models.activations import silu, softplus
from mlxlin.models.blocks import Linear, Matrix, Projections
from mlxlin.models.mixers.convolution import short_convolution
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
        self._spec, self._dtype = spec, dtype
        self._project = Projections(params, _INPUTS)
        self._conv = params.take("conv.weight") if spec.conv else None
        self._norm = Norm(spec.norm, params.at("norm"))
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
        spec, old = self._spec, recurrent(state)
        new: dict[str, mx.array] = {}
        qkv, forget = self._project(x)
        if self._conv is not None:
            qkv, new["conv"] = short_convolution(qkv, old["conv"], self._conv, None, step.lengths)
            qkv = silu(qkv)
        q_width, k_width, _ = _widths(spec)
        q, k, v = mx.split(qkv, [q_width, q_width + k_width], axis=-1)
        q, k = (silu(z) if spec.features == "silu" else mx.maximum(z, 0) for z in (q, k))
        q = self._heads(q, spec.heads)
        k, v = self._heads(k, spec.kv_heads), self._heads(silu(v), spec.kv_heads)
        g = -softplus(-self._heads(forget, spec.kv_heads).astype(mx.float32)) / spec.divisor
        written = -mx.expm1(g)
        fits, new["S"] = self._run("gated_values", q, k, written, g, old["S"], step)
        y, new["S_values"] = self._run(
            "gated", mx.softmax(fits, axis=-1), self._repeated(written), v, g, old["S_values"], step
        )
        return self._out(self._norm(silu(y.reshape(*x.shape[:2], -1)))), new

    def _heads(self, x: mx.array, heads: int) -> mx.array:
        return x.reshape(*x.shape[:2], heads, -1)

    def _repeated(self, x: mx.array) -> mx.array:
        """x [B, T, H or kv heads, *] for every head."""
        return mx.repeat(x, self._spec.heads // x.shape[2], axis=2) if x.shape[2] < self._spec.heads else x

    def _run(
        self, rule: str, q: mx.array, k: mx.array, v: mx.array, g: mx.array, S: mx.array, step: Step
    ) -> tuple[mx.array, mx.array]:
        k, v, g = (self._repeated(z) for z in (k, v, g))
        y, S_new = recurrences.run(rule, q, k, v, g=g, state=S, lengths=step.lengths)
        assert isinstance(S_new, mx.array)
        return y, S_new
