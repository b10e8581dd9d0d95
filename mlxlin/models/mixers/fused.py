"""How much of a mixer the kernels run, said in their words."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from mlxlin.metal.mixer import Activation, FusedSpec, finishes
from mlxlin.metal.recurrence import supports
from mlxlin.models.mixers.features import feature_dim
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
)
from mlxlin.recurrences import RULES
from mlxlin.recurrences.reference import NORMALIZER_EPS

_OPERATIONS = "operations, a kernel for the recurrence where there is one"
_POINTWISE: dict[str, tuple[Activation, Activation]] = {
    "silu": ("silu", "silu"),
    "silu_q": ("silu", "none"),
    "relu": ("relu", "relu"),
    "elu": ("elu", "elu"),
}  # of q and of k


@dataclass(frozen=True)
class Fusion:
    """A mixer between its projections and its output projection, as far as one kernel runs it.

    Attributes:
        spec: what the kernel does.
        ready: q, k, v and the decay are made before it, by other operations.
        finished: norm and gate are the kernel's, or a second one's where the norm crosses heads; else operations'.
    """

    spec: FusedSpec
    ready: bool
    finished: bool

    @property
    def outside(self) -> tuple[str, ...]:
        """What is left to other operations, for people."""
        parts = [(self.ready, "queries and keys"), (not self.finished, "norm and gate")]
        return tuple(text for left, text in parts if left)


def fusion(spec: LinearSpec) -> Fusion | None:
    """How the kernels run a mixer; None where they do not know its recurrence."""
    rule = RULES[spec.rule]
    ready, finished = _ready(spec), _finished(spec.output)
    if ready and (rule.reader or spec.skip != "none" or (spec.decay is not None and spec.decay.scales_values)):
        return None
    parts: dict[str, Any] = {"apart": True, "v_activation": "none"} if ready else _inputs(spec)
    fused = FusedSpec(
        spec.heads,
        spec.value_heads,
        feature_dim(spec),
        spec.value_dim,
        write=rule.write,
        decay="none" if spec.decay is None else "channel" if spec.decay.vector else "head",
        reader=rule.reader,
        substeps=spec.steps,
        beta="sigmoid" if spec.beta is not None and spec.beta_projection else "none",
        beta_factor=spec.beta or 1.0,
        normalize=NORMALIZER_EPS if spec.normalize else None,
        skip=spec.skip != "none",
        **parts,
        **(_output(spec.output) if finished else {}),
    )
    return Fusion(fused, ready, finished)


@cache
def time_mixing(spec: Rwkv6Spec) -> FusedSpec:
    """RWKV-6 between its projections and its output projection."""
    H, K, V = spec.heads, spec.key_dim, spec.value_dim
    return FusedSpec(H, H, K, V, "add", "channel", apart=True, decay_kind="exponential", bonus=True)


def _ready(spec: LinearSpec) -> bool:
    """Whether queries and keys have a part that the kernels lack."""
    mapped = spec.features not in ("none", *_POINTWISE)
    mapped = mapped or (spec.features != "none" and spec.qk_activation != "none")
    normed = spec.qk_norm not in ("none", "l2") or spec.simplex_q or spec.simplex_k
    forgets = spec.decay is not None and spec.decay.kind == "forget"
    return mapped or normed or (forgets and (spec.conv > 0 or spec.kv_heads not in (0, spec.heads)))


def _finished(output: OutputSpec) -> bool:
    """Whether there are kernels for norm and gate."""
    norm = output.norm
    return norm is None or (norm.kind == "rms" and output.gate_first <= output.joint)


def _inputs(spec: LinearSpec) -> dict[str, Any]:
    """What precedes the recurrence."""
    decay = spec.decay
    q_map, k_map = _POINTWISE.get(spec.features, (spec.qk_activation, spec.qk_activation))
    return {
        "apart": decay is not None and decay.kind == "forget",
        "repeats": spec.heads // (spec.kv_heads or spec.heads),
        "taps": spec.conv,
        "q_activation": q_map,
        "k_activation": k_map,
        "v_activation": spec.v_activation,
        "rotary": spec.rope.dims if spec.rope is not None else 0,
        "interleaved": spec.rope is not None and spec.rope.interleaved,
        "unit": spec.qk_norm == "l2",
        "scale": spec.scale,
        **({} if decay is None else _decay(decay)),
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
        "joint_groups": output.groups if output.joint and output.norm is not None else 0,
        "eps": 0.0 if output.norm is None else output.norm.eps,
        "gate": output.gate,
        "gate_first": output.gate_first and output.norm is not None,
    }


def decoding(spec: MixerSpec) -> str:
    """What decodes one row of a mixer on Metal between its projections, for people."""
    if isinstance(spec, (AttentionSpec, LatentSpec)):
        return "attention of MLX"
    if isinstance(spec, Rwkv7Spec):
        return "one kernel" if supports(spec.head_dim, spec.head_dim) else _OPERATIONS
    fused = fusion(spec) if isinstance(spec, LinearSpec) else None
    if isinstance(spec, Rwkv6Spec):
        fused = Fusion(time_mixing(spec), ready=False, finished=False)
    if fused is None or not supports(fused.spec.key_dim, fused.spec.value_dim):
        return _OPERATIONS
    whole = finishes(fused.spec, 1) or not fused.spec.norm
    kernel = "one kernel" if whole else "two kernels, the second for the norm"
    return "; ".join([kernel, *(f"operations for {part}" for part in fused.outside)])
