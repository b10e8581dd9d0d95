"""Gated DeltaNet in flash-linear-attention's layout (Yang et al. 2024, arXiv:2412.06464)."""

from __future__ import annotations

from mlxlin.models import fla_layout
from mlxlin.models.config import Config, given, only
from mlxlin.models.fla_layout import ATTN, MIXER
from mlxlin.models.rules import Weight
from mlxlin.models.spec import DecaySpec, Gate, LinearSpec, ModelSpec, NormSpec, OutputSpec

SERVES = (("gated_deltanet", None),)
PREFIXES = fla_layout.PREFIXES
DROPS = fla_layout.DROPS
WEIGHTS = (
    *fla_layout.SHARED_WEIGHTS,
    Weight(MIXER + "gate.weight", ATTN + "g_proj.weight"),
    Weight(MIXER + "beta.weight", ATTN + "b_proj.weight"),
    Weight(MIXER + "decay.weight", ATTN + "a_proj.weight"),
    Weight(MIXER + "A_log", ATTN + "A_log"),
    Weight(MIXER + "dt_bias", ATTN + "dt_bias"),
    Weight(MIXER + "norm.weight", ATTN + "o_norm.weight"),
)
_GATES: dict[str, Gate] = {"swish": "silu", "silu": "silu", "sigmoid": "sigmoid"}


def spec(config: Config) -> ModelSpec:
    """The description of a checkpoint with this config.json."""
    only(config, {"output_gate_activation": (*_GATES, None)})
    activation = _GATES[given(config, "output_gate_activation", "swish")]
    gate = activation if given(config, "use_gate", True) else "none"
    return fla_layout.model("gated_deltanet", config, mixer(config, gate))


def mixer(config: Config, gate: Gate) -> LinearSpec:
    """The recurrent layers, with this gate on their outputs; also where Comba and Gated DeltaProduct start from."""
    heads, head_dim = given(config, "num_heads", 6), given(config, "head_dim", 256)
    return LinearSpec(
        rule="gated_delta",
        heads=heads,
        value_heads=given(config, "num_v_heads", heads),
        key_dim=head_dim,
        value_dim=fla_layout.head_times(head_dim, given(config, "expand_v", 2.0), "expand_v"),
        scale=head_dim**-0.5,
        output=OutputSpec(NormSpec(fla_layout.eps(config)), gate=gate),
        conv=fla_layout.taps(config, default=True),
        qk_activation="silu",
        v_activation="silu",
        qk_norm="l2",
        decay=DecaySpec("softplus"),
        beta=2.0 if given(config, "allow_neg_eigval", False) else 1.0,
    )
