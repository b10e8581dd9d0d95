"""How much of a mixer the kernels run, said in their words."""

from __future__ import annotations

from typing import Any

from mlxlin.metal.mixer import FusedSpec, VectorNorm, finishes
from mlxlin.metal.recurrence import supports
from mlxlin.models.mixers.features import feature_dim, kind_of, learned
from mlxlin.models.spec import (
    FIXED_DECAYS,
    AttentionSpec,
    DecaySpec,
    LatentSpec,
    LinearSpec,
    MixerSpec,
    OutputSpec,
    Rwkv6Spec,
    Rwkv7Spec,
    SlotSpec,
)
from mlxlin.recurrences import RULES
from mlxlin.recurrences.mixer import knows
from mlxlin.recurrences.reference import NORMALIZER_EPS

_OPERATIONS = "operations, a kernel for the recurrence where there is one"


def fusion(spec: LinearSpec) -> FusedSpec | None:
    """What the kernels do of a mixer: all that stands between its projections, or the product of a learned feature map,
    and its output projection; None where its parts come in an order that no family has and the kernels do not know."""
    if not _ordered(spec):
        return None
    rule = RULES[spec.rule]
    return FusedSpec(
        spec.heads,
        spec.value_heads,
        feature_dim(spec),
        spec.value_dim,
        write=rule.write,
        decay="none" if spec.decay is None else "channel" if spec.decay.vector else "head",
        reader=rule.reader,
        substeps=spec.steps,
        apart=learned(spec),
        repeats=spec.heads // (spec.kv_heads or spec.heads),
        taps=spec.conv,
        v_activation=spec.v_activation,
        rotary=spec.rope.dims if spec.rope is not None else 0,
        interleaved=spec.rope is not None and spec.rope.interleaved,
        scale=spec.scale,
        beta="sigmoid" if spec.beta is not None and spec.beta_projection else "none",
        beta_factor=spec.beta or 1.0,
        normalize=NORMALIZER_EPS if spec.normalize else None,
        skip=spec.skip != "none",
        **_vectors(spec),
        **({} if spec.decay is None else _decay(spec.decay)),
        **_output(spec.output),
    )


def time_mixing(spec: Rwkv6Spec) -> FusedSpec:
    """RWKV-6 between its projections and its output projection."""
    return FusedSpec(
        spec.heads,
        spec.heads,
        spec.key_dim,
        spec.value_dim,
        write="add",
        decay="channel",
        apart=True,
        decay_kind="exponential",
        bonus=True,
        norm=True,
        centered=True,
        eps=spec.eps,
        gate="silu",
    )


def slot_attention(spec: SlotSpec) -> FusedSpec:
    """Gated slot attention between its projections and its output projection; behind a convolution has silu first."""
    return FusedSpec(
        spec.heads,
        spec.heads,
        spec.key_dim,
        spec.value_dim,
        write="add",
        decay="channel",
        repeats=spec.heads // spec.kv_heads,
        taps=spec.conv,
        q_activation="silu" if spec.conv else "none",
        k_activation="silu" if spec.conv else "none",
        v_activation="silu_twice" if spec.conv else "silu",
        features=spec.features,
        decay_kind="logsigmoid",
        decay_constant=spec.divisor,
        slots=spec.slots,
        norm=True,
        joint_groups=1,
        eps=spec.norm.eps,
        gate="sigmoid",
        gate_first=True,
        self_gated=True,
    )


def _ordered(spec: LinearSpec) -> bool:
    """Whether the parts of a mixer come in the order of the kernels."""
    output, behind = spec.output, spec.qk_norm == "sum" or spec.simplex_q or spec.simplex_k
    wrong = (
        learned(spec) and (spec.conv > 0 or spec.qk_activation != "none"),
        spec.features == "silu_q" and spec.qk_activation != "none",
        behind and spec.rope is not None,  # the rotation comes first
        spec.qk_norm != "none" and (spec.simplex_q or spec.simplex_k),
        spec.decay is not None and spec.decay.kind == "forget" and (spec.rope is not None or spec.qk_norm != "none"),
        output.norm is not None and output.gate_first and not output.joint,
    )
    return not any(wrong)


def _vectors(spec: LinearSpec) -> dict[str, Any]:
    """What happens to queries and keys. A map that is an activation is theirs where they have no other."""
    features, activation = kind_of(spec), spec.qk_activation
    pointwise = features in ("silu", "relu", "elu") and activation == "none"
    kind = features if pointwise else activation
    norms: tuple[VectorNorm, VectorNorm] = (spec.qk_norm, spec.qk_norm)
    if spec.qk_norm == "none":
        norms = ("simplex" if spec.simplex_q else "none", "simplex" if spec.simplex_k else "none")
    return {
        "q_activation": "silu" if spec.features == "silu_q" else kind,
        "k_activation": kind,
        "features": "none" if pointwise else features,
        "q_norm": norms[0],
        "k_norm": norms[1],
        "qk_eps": spec.qk_eps if spec.qk_norm == "rms" else 0.0,
    }


def _decay(decay: DecaySpec) -> dict[str, Any]:
    return {
        "decay_kind": "given" if decay.kind in FIXED_DECAYS else decay.kind,
        "decay_constant": decay.bound if decay.kind == "sigmoid" else decay.divisor,
        "decay_floor": -float("inf") if decay.floor is None else decay.floor,
        "shortest": decay.shortest,
        "longest": float("inf") if decay.longest is None else decay.longest,
        "scales_values": decay.scales_values,
    }


def _output(output: OutputSpec) -> dict[str, Any]:
    return {
        "norm": output.norm is not None,
        "centered": output.norm is not None and output.norm.kind == "layer",
        "joint_groups": output.groups if output.joint and output.norm is not None else 0,
        "eps": 0.0 if output.norm is None else output.norm.eps,
        "gate": output.gate,
        "gate_first": output.gate_first and output.norm is not None,
    }


def _fused(spec: MixerSpec) -> FusedSpec | None:
    if isinstance(spec, Rwkv6Spec):
        return time_mixing(spec)
    if isinstance(spec, SlotSpec):
        return slot_attention(spec)
    return fusion(spec) if isinstance(spec, LinearSpec) else None


def decoding(spec: MixerSpec) -> str:
    """What decodes one row of a mixer on Metal between its projections, for people."""
    if isinstance(spec, (AttentionSpec, LatentSpec)):
        return "attention of MLX"
    if isinstance(spec, Rwkv7Spec):
        return "one kernel" if supports(spec.head_dim, spec.head_dim) else _OPERATIONS
    fused = _fused(spec)
    if fused is None or not knows(fused):
        return _OPERATIONS
    kernel = "one kernel" if finishes(fused, 1) else "two kernels, the second for the norm"
    products = isinstance(spec, LinearSpec) and learned(spec)
    return f"{kernel}; matrix products for the feature map" if products else kernel
