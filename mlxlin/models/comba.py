"""Comba in flash-linear-attention's layout (Hu et al. 2025, arXiv:2506.02475)."""

from __future__ import annotations

from mlxlin.models import fla_layout
from mlxlin.models.config import Config, given
from mlxlin.models.fla_layout import ATTN, MIXER
from mlxlin.models.rules import Weight
from mlxlin.models.spec import DecaySpec, LinearSpec, ModelSpec, NormSpec, OutputSpec

SERVES = (("comba", None),)
PREFIXES = fla_layout.PREFIXES
DROPS = fla_layout.DROPS
WEIGHTS = (
    *fla_layout.SHARED_WEIGHTS,
    Weight(MIXER + "gate.weight", ATTN + "g_proj.weight"),
    Weight(MIXER + "beta.weight", ATTN + "b_proj.weight"),
    Weight(MIXER + "decay.weight", ATTN + "a_proj.weight"),
    Weight(MIXER + "A_log", ATTN + "A_log"),
    Weight(MIXER + "dt_bias", ATTN + "dt_bias"),
    Weight(MIXER + "reader", ATTN + "decay"),
    Weight(MIXER + "correction", ATTN + "D"),
    Weight(MIXER + "norm.weight", ATTN + "o_norm.weight"),
)


def spec(config: Config) -> ModelSpec:
    """The description of a checkpoint with this config.json.

    use_inner_decay, use_output_correction and correction_factor are not read: the source's model class does not pass
    them to its layer.
    """
    heads, head_dim = given(config, "num_heads", 6), given(config, "head_dim", 256)
    mixer = LinearSpec(
        rule="comba",
        heads=heads,
        value_heads=given(config, "num_v_heads", heads),
        key_dim=head_dim,
        value_dim=fla_layout.head_times(head_dim, given(config, "expand_v", 2.0), "expand_v"),
        scale=head_dim**-0.5,
        output=OutputSpec(
            NormSpec(fla_layout.eps(config)), gate="sigmoid" if given(config, "use_output_gate", True) else "none"
        ),
        conv=given(config, "conv_size", 4) if given(config, "use_short_conv", True) else 0,
        qk_activation="silu",
        v_activation="silu",
        qk_norm="l2",
        decay=DecaySpec("softplus"),
        beta=1.0,
    )
    return fla_layout.model("comba", config, mixer)
