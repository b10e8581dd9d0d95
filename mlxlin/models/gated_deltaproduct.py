"""Gated DeltaProduct in flash-linear-attention's layout (Siems et al. 2025, arXiv:2502.10297)."""

from __future__ import annotations

from mlxlin.models import fla_layout, gated_deltanet
from mlxlin.models.config import Config, given
from mlxlin.models.spec import DecaySpec, LinearSpec, ModelSpec, NormSpec, OutputSpec

SERVES = (("gated_deltaproduct", None),)
PREFIXES = fla_layout.PREFIXES
DROPS = fla_layout.DROPS
# Rows of k, v and beta hold the steps of a token one after the other, as the mixer expects them.
WEIGHTS = gated_deltanet.WEIGHTS


def spec(config: Config) -> ModelSpec:
    """The description of a checkpoint with this config.json."""
    heads, head_dim = given(config, "num_heads", 6), given(config, "head_dim", 256)
    mixer = LinearSpec(
        rule="delta_product",
        heads=heads,
        value_heads=heads,
        key_dim=head_dim,
        value_dim=fla_layout.head_times(head_dim, given(config, "expand_v", 2.0), "expand_v"),
        scale=head_dim**-0.5,
        output=OutputSpec(
            NormSpec(fla_layout.eps(config)), gate="silu" if given(config, "use_output_gate", True) else "none"
        ),
        conv=given(config, "conv_size", 4) if given(config, "use_short_conv", True) else 0,
        qk_activation="silu",
        v_activation="silu",
        qk_norm="l2",
        decay=DecaySpec("softplus") if given(config, "use_forget_gate", False) else None,
        beta=2.0 if given(config, "allow_neg_eigval", False) else 1.0,
        steps=given(config, "num_householder", 1),
    )
    return fla_layout.model("gated_deltaproduct", config, mixer)
