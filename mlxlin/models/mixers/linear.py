"""The recurrent mixer: projections, short convolution, feature map, gates, recurrence, gated norm, projection."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlxlin import recurrences
from mlxlin.backend import mx
from mlxlin.metal.mixer import FusedSpec, Projected
from mlxlin.models.activations import sigmoid, silu
from mlxlin.models.blocks import Linear, Matrix, Projections
from mlxlin.models.mixers.convolution import short_convolution
from mlxlin.models.mixers.features import feature_dim, feature_maps, feature_parameters, feature_products
from mlxlin.models.mixers.fused import fusion
from mlxlin.models.mixers.gates import Decay, decay_parameters
from mlxlin.models.mixers.step import Step, recurrent
from mlxlin.models.norms import Norm, UnitVectors
from mlxlin.models.params import Parameter, Params, Table, under
from mlxlin.models.spec import FIXED_DECAYS, LinearSpec, NormSpec
from mlxlin.recurrences.features import normed
from mlxlin.state import LayerState


def _widths(spec: LinearSpec) -> tuple[int, int, int]:
    """Projected width of q, k and v."""
    k = (spec.kv_heads or spec.heads) * spec.key_dim * spec.steps
    v = (spec.kv_heads or spec.value_heads) * spec.value_dim * spec.steps
    return spec.heads * spec.key_dim, k, v


def _forgets(spec: LinearSpec) -> bool:
    """Whether k is what the decay lets go of; the projection of the decay then stands for that of k."""
    return spec.decay is not None and spec.decay.kind == "forget"


def _inputs(spec: LinearSpec) -> list[str]:
    """Names of the projections of the layer's input."""
    names = ["qkv"]
    if spec.output.gate != "none":
        names.append("gate")
    if spec.beta is not None and spec.beta_projection:
        names.append("beta")
    if spec.decay is not None and spec.decay.kind not in FIXED_DECAYS:
        names.append("decay")
    return names


def linear_parameters(spec: LinearSpec, width: int) -> Table:
    """Expected parameters of one mixer in a model of this width."""
    total, value_width = sum(_widths(spec)), spec.value_heads * spec.value_dim
    joined = total - _widths(spec)[1] if _forgets(spec) else total
    table = {
        "qkv.weight": Parameter((joined, width), "matrix"),
        "out.weight": Parameter((width, value_width), "matrix"),
    }
    if spec.conv:
        table["conv.weight"] = Parameter((spec.conv, total), "keep")
    if spec.conv_bias:
        table["conv.bias"] = Parameter((total,), "keep")
    if spec.in_bias:
        table["qkv.bias"] = Parameter((joined,), "keep")
    if spec.out_bias:
        table["out.bias"] = Parameter((width,), "keep")
    if spec.skip != "none":
        table["skip"] = Parameter((value_width if spec.skip == "channel" else spec.value_heads,), "keep")
    if spec.beta is not None and spec.beta_projection:
        table["beta.weight"] = Parameter((spec.value_heads * spec.steps, width), "gate")
    if spec.rule == "comba":
        table |= {name: Parameter((spec.heads,), "keep") for name in ("reader", "correction")}
    if spec.qk_norm == "rms":
        for name in ("q_norm", "k_norm"):
            table.update(under(name, Norm.parameters(NormSpec(spec.qk_eps), spec.key_dim)))
    table.update(_output_parameters(spec, width, value_width))
    table.update(decay_parameters(spec, width))
    table.update(feature_parameters(spec))
    return table


def _output_parameters(spec: LinearSpec, width: int, value_width: int) -> Table:
    output, table = spec.output, {}
    if output.gate != "none":
        rank = output.rank
        table["gate.weight"] = Parameter((rank or value_width, width), "gate" if rank else "matrix")
        if rank:
            table["gate_out.weight"] = Parameter((value_width, rank), "gate")
        if output.bias:
            table["gate_out.bias" if rank else "gate.bias"] = Parameter((value_width,), "keep")
    if output.norm is not None:
        table.update(under("norm", Norm.parameters(output.norm, value_width if output.joint else spec.value_dim)))
    return table


@dataclass(frozen=True, eq=False)
class _Ready:
    """Arguments of the recurrence: q, k, v, the log decay, what is written of v, what reads if that is not k; and what
    is already known of the new state."""

    q: mx.array
    k: mx.array
    v: mx.array
    g: mx.array | None
    written: mx.array
    reader: mx.array | None
    new: dict[str, mx.array]


class LinearMixer:
    """One layer of the linear-attention family; its state is `S` [B, HV, V, K] float32, `Z`, and `conv`."""

    def __init__(self, spec: LinearSpec, params: Params, width: int, dtype: mx.Dtype) -> None:
        self._spec = spec
        self._fusion = fusion(spec)
        self._one = params.made(mx.ones((1, 1, 1)))
        self._dtype = dtype
        self._project = Projections(params, _inputs(spec))
        self._conv = params.take("conv.weight") if spec.conv else None
        self._conv_bias = params.take("conv.bias") if spec.conv_bias else None
        self._products = feature_products(spec, params)
        self._map_q, self._map_k = feature_maps(spec)
        self._decay = Decay(spec, params) if spec.decay is not None else None
        self._skip: mx.array | None = None
        if spec.skip != "none":
            self._skip = params.made(params.take("skip").astype(mx.float32).reshape(spec.value_heads, -1))
        self._gate_out = Linear(Matrix.take(params, "gate_out")) if spec.output.rank else None
        self._norm: Norm | None = None
        if spec.output.norm is not None:
            self._norm = Norm(spec.output.norm, params.at("norm"), spec.output.groups)
        self._reader: mx.array | None = None
        if spec.rule == "comba":
            fraction, correction = sigmoid(params.take("reader")), params.take("correction")
            self._fraction, self._correction = params.made(fraction[:, None]), correction[:, None]
            self._reader = params.made(mx.stack([fraction, correction]).astype(mx.float32))
        self._qk_norms: list[Norm] = []
        if spec.qk_norm == "rms":
            self._qk_norms = [Norm(NormSpec(spec.qk_eps), params.at(name)) for name in ("q_norm", "k_norm")]
        self._out = Linear(Matrix.take(params, "out"))
        dim = feature_dim(spec)
        self._unit_q = UnitVectors(spec.scale, dim, params, dtype)
        self._unit_k = UnitVectors(1.0, dim, params, dtype)

    def fresh(self, batch: int) -> LayerState:
        """The state before the first token."""
        spec, dim = self._spec, feature_dim(self._spec)
        state = {"S": mx.zeros((batch, spec.value_heads, spec.value_dim, dim), dtype=mx.float32)}
        if spec.normalize:
            state["Z"] = mx.zeros((batch, spec.value_heads, dim), dtype=mx.float32)
        if spec.conv:
            state["conv"] = mx.zeros((batch, spec.conv - 1, sum(_widths(spec))), dtype=self._dtype)
        return state

    def __call__(self, x: mx.array, state: LayerState, step: Step) -> tuple[mx.array, LayerState]:
        """x [B, T, D] -> y [B, T, D] and the state after the last real token of each row."""
        spec, old, fused = self._spec, recurrent(state), self._fusion
        projected = dict(zip(_inputs(spec), self._project(x), strict=True))
        if fused is not None and recurrences.mixer.takes(fused, x.shape[0], x.shape[1], x.dtype):
            return self._by_kernels(fused, projected, old, step)
        ready = self._made_ready(projected, old, step)
        new, v = ready.new, ready.v
        y, after = recurrences.run(
            spec.rule,
            ready.q,
            ready.k,
            ready.written,
            g=ready.g,
            beta=self._beta(projected.get("beta"), *x.shape[:2]),
            a=ready.reader,
            state=(old["S"], old["Z"]) if spec.normalize else old["S"],
            lengths=step.lengths,
            normalize=spec.normalize,
        )
        new.update(zip(("S", "Z"), after, strict=True) if isinstance(after, tuple) else {"S": after})
        if self._skip is not None:
            y = y + self._skip * v
        return self._out(self._gated(y, projected.get("gate"))), new

    def _made_ready(self, projected: Mapping[str, mx.array], old: Mapping[str, mx.array], step: Step) -> _Ready:
        """The arguments of the recurrence."""
        new: dict[str, mx.array] = {}
        qkv, forgets = projected["qkv"], _forgets(self._spec)
        if forgets:
            qkv = mx.concatenate([qkv, projected["decay"]], axis=-1)
        if self._conv is not None:
            qkv, new["conv"] = short_convolution(qkv, old["conv"], self._conv, self._conv_bias, step.lengths)
        q, k, v, reader = self._queries_keys_values(qkv, step)
        g, written = self._log_decay(k if forgets else projected.get("decay"), v)
        if forgets:
            assert g is not None
            k = -mx.expm1(g).astype(k.dtype)
        return _Ready(q, k, v, g, written, reader, new)

    def _by_kernels(
        self, fused: FusedSpec, projected: Mapping[str, mx.array], old: Mapping[str, mx.array], step: Step
    ) -> tuple[mx.array, LayerState]:
        """All that stands between the projections in one kernel, or four for many tokens."""
        spec, qkv, gate = self._spec, projected["qkv"], projected.get("gate")
        batch, length, _ = qkv.shape
        given: dict[str, Any] = {"lengths": step.lengths, "Z": old.get("Z"), "skip": self._skip, "reader": self._reader}
        given |= {"memory": old.get("conv"), "weight": self._conv, "bias": self._conv_bias}
        given["qkv"] = qkv if self._products is None else self._multiplied(qkv)
        if self._qk_norms:
            given["q_gain"], given["k_gain"] = (norm.weight for norm in self._qk_norms)
        if self._decay is not None:
            given |= self._decay.parts(projected.get("decay"), batch, length)
        if spec.rope is not None:
            given["cos"], given["sin"] = (angles.squeeze(1) for angles in step.rotate.turns(spec.rope))
        if spec.beta is not None:
            ones = mx.broadcast_to(self._one, (batch, length, spec.value_heads * spec.steps))
            given["beta"] = projected.get("beta", ones)
        given["gate"] = gate if gate is None or self._gate_out is None else self._gate_out(gate)
        if self._norm is not None:
            given["norm"], given["norm_bias"] = self._norm.weight, self._norm.bias
        mixed = recurrences.mixer.advance(fused, Projected(S=old["S"], **given))
        made = {"S": mixed.S, "Z": mixed.Z, "conv": mixed.memory}
        new = {name: array for name, array in made.items() if array is not None}
        return self._out(mixed.y.reshape(batch, length, -1)), new

    def _multiplied(self, qkv: mx.array) -> tuple[mx.array, ...]:
        """q, k and v, the first two behind the product of their feature map."""
        assert self._products is not None
        (batch, length, _), (q_width, k_width, _) = qkv.shape, _widths(self._spec)
        q, k, v = mx.split(qkv, [q_width, q_width + k_width], axis=-1)
        heads = (z.reshape(batch, length, -1, self._spec.key_dim) for z in (q, k))
        q, k = (product(z).reshape(batch, length, -1) for product, z in zip(self._products, heads, strict=True))
        return q, k, v

    def _queries_keys_values(self, qkv: mx.array, step: Step) -> tuple[mx.array, mx.array, mx.array, mx.array | None]:
        """qkv [B, T, C] -> q [B, T, H, K], k [B, T n, H, K], v [B, T n, HV, V] and what reads, if that is not k."""
        spec, (batch, length, _) = self._spec, qkv.shape
        if spec.qk_activation == spec.v_activation == "silu":
            qkv = silu(qkv)
        q_width, k_width, v_width = _widths(spec)
        if _forgets(spec):
            q, v, k = mx.split(qkv, [q_width, q_width + v_width], axis=-1)
        else:
            q, k, v = mx.split(qkv, [q_width, q_width + k_width], axis=-1)
        if spec.v_activation == "silu" != spec.qk_activation:
            v = silu(v)
        q = q.reshape(batch, length, spec.heads, spec.key_dim)
        k = k.reshape(batch, length * spec.steps, -1, spec.key_dim)
        v = v.reshape(batch, length * spec.steps, -1, spec.value_dim)
        if self._products is not None:
            q, k = (product(z) for product, z in zip(self._products, (q, k), strict=True))
        q, k = self._map_q(q), self._map_k(k)
        if self._qk_norms:
            q, k = (norm(x) for norm, x in zip(self._qk_norms, (q, k), strict=True))
        if spec.rope is not None:
            q = step.rotate(q.swapaxes(1, 2), spec.rope).swapaxes(1, 2)
            k = step.rotate(k.swapaxes(1, 2), spec.rope).swapaxes(1, 2)
        reader = None
        if self._reader is not None:
            p = k * self._fraction
            q, reader = q - p * self._correction, self._unit_k(p)
        q, k = self._normalised(q, k)
        if spec.kv_heads and spec.kv_heads != spec.heads:
            k, v = (mx.repeat(a, spec.heads // spec.kv_heads, axis=2) for a in (k, v))
        return q, k, v, reader

    def _normalised(self, q: mx.array, k: mx.array) -> tuple[mx.array, mx.array]:
        spec = self._spec
        if spec.qk_norm == "l2":
            return self._unit_q(q), self._unit_k(k)
        if spec.qk_norm == "sum":
            q, k = normed("sum", q), normed("sum", k)
        if spec.simplex_q:
            q = normed("simplex", q)
        if spec.simplex_k:
            k = normed("simplex", k)
        return q if spec.scale == 1.0 else q * spec.scale, k

    def _log_decay(self, projected: mx.array | None, v: mx.array) -> tuple[mx.array | None, mx.array]:
        """g, and what is written of v."""
        spec, decay = self._spec, self._decay
        if decay is None:
            return None, v
        if projected is None:
            return decay.fixed(v.shape[0], v.shape[1]), v
        if spec.decay is not None and spec.decay.scales_values:
            dt = decay.step(projected)
            return decay.over(dt), (v * dt[..., None]).astype(v.dtype)
        g = decay(projected)
        return mx.repeat(g, spec.heads // spec.kv_heads, axis=2) if spec.kv_heads else g, v

    def _beta(self, projected: mx.array | None, batch: int, length: int) -> mx.array | None:
        spec = self._spec
        if spec.beta is None:
            return None
        if projected is None:
            return mx.full((batch, length, spec.value_heads), spec.beta, dtype=mx.float32)
        beta = sigmoid(projected.astype(mx.float32)).reshape(batch, length * spec.steps, spec.value_heads)
        return beta if spec.beta == 1.0 else beta * spec.beta

    def _gated(self, y: mx.array, gate: mx.array | None) -> mx.array:
        """y [B, T, HV, V] -> [B, T, HV V]."""
        output, shape = self._spec.output, y.shape
        if gate is not None:
            gate = gate if self._gate_out is None else self._gate_out(gate)
            gate = (silu if output.gate == "silu" else sigmoid)(gate.astype(y.dtype))
            if output.gate_first:
                y, gate = y * gate.reshape(shape), None
        if output.joint:
            y = y.reshape(*shape[:2], -1)
        if self._norm is not None:
            y = self._norm(y)
        y = y.reshape(*shape[:2], -1)
        return (y if gate is None else y * gate).astype(self._dtype)
