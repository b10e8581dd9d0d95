"""Which mixers the kernels can run, said in their words."""

from __future__ import annotations

from mlxlin.metal.mixer import FusedSpec
from mlxlin.models.spec import DecaySpec, LinearSpec
from mlxlin.recurrences import RULES


def fused_spec(spec: LinearSpec) -> FusedSpec | None:
    """The mixer between its projections and its output projection; None where it has a part the kernels lack."""
    norm, decay = spec.output.norm, spec.decay
    plain = spec.features == "none" and spec.rope is None and spec.kv_heads in (0, spec.heads)
    plain = plain and not spec.normalize and spec.qk_norm in ("none", "l2") and not (spec.simplex_q or spec.simplex_k)
    given_beta = spec.beta is not None and not spec.beta_projection
    other_norm = norm is not None and (norm.kind != "rms" or not norm.affine or spec.output.joint)
    steps = decay is not None and (decay.scales_values or decay.shortest > 0.0 or decay.longest is not None)
    other_parts = steps or RULES[spec.rule].reader or spec.skip != "none" or spec.output.gate_first
    kind = "given" if decay is None else decay.kind
    if kind == "retention" or kind == "geometric" or kind == "alibi":
        kind = "given"
    if not plain or given_beta or other_norm or other_parts or kind == "forget":
        return None
    return FusedSpec(
        spec.heads,
        spec.value_heads,
        spec.key_dim,
        spec.value_dim,
        write=RULES[spec.rule].write,
        decay="none" if decay is None else "channel" if decay.vector else "head",
        substeps=spec.steps,
        taps=spec.conv,
        qk_activation=spec.qk_activation,
        v_activation=spec.v_activation,
        unit=spec.qk_norm == "l2",
        scale=spec.scale,
        decay_kind=kind,
        decay_constant=_constant(decay),
        decay_floor=-float("inf") if decay is None or decay.floor is None else decay.floor,
        beta="none" if spec.beta is None else "sigmoid",
        beta_factor=spec.beta or 1.0,
        norm=norm is not None,
        eps=norm.eps if norm is not None else 0.0,
        gate=spec.output.gate,
    )


def _constant(decay: DecaySpec | None) -> float:
    if decay is None:
        return 1.0
    return decay.bound if decay.kind == "sigmoid" else decay.divisor
