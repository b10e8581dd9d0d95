"""DeltaNet in flash-linear-attention's layout (Yang et al. 2024, arXiv:2406.06484)."""

from __future__ import annotations

from mlxlin.models import fla_layout
from mlxlin.models.config import Config, given, only
from mlxlin.models.fla_layout import ATTN, MIXER
from mlxlin.models.rules import Weight
from mlxlin.models.spec import LinearSpec, ModelSpec, NormSpec, OutputSpec

SERVES = (("delta_net", None),)
PREFIXES = fla_layout.PREFIXES
DROPS = fla_layout.DROPS
WEIGHTS = (
    *fla_layout.SHARED_WEIGHTS,
    Weight(MIXER + "gate.weight", ATTN + "g_proj.weight"),
    Weight(MIXER + "beta.weight", ATTN + "b_proj.weight"),
    Weight(MIXER + "norm.weight", ATTN + "o_norm.weight"),
)


def spec(config: Config) -> ModelSpec:
    """The description of a checkpoint with this config.json."""
    only(config, {"qk_activation": ("silu", "relu", "elu", "identity"), "qk_norm": ("l2", "sum")})
    heads, activation = given(config, "num_heads", 16), given(config, "qk_activation", "silu")
    key_dim = fla_layout.width_times(config, given(config, "expand_k", 1.0), heads, "expand_k")
    mixer = LinearSpec(
        rule="delta",
        heads=heads,
        value_heads=heads,
        key_dim=key_dim,
        value_dim=fla_layout.width_times(config, given(config, "expand_v", 1.0), heads, "expand_v"),
        scale=key_dim**-0.5,
        output=OutputSpec(
            NormSpec(fla_layout.eps(config)), gate="silu" if given(config, "use_gate", False) else "none"
        ),
        conv=fla_layout.taps(config, default=True),
        qk_activation="silu" if activation == "silu" else "none",
        v_activation="silu",
        features=activation if activation in ("relu", "elu") else "none",
        qk_norm=given(config, "qk_norm", "l2"),
        beta=2.0 if given(config, "allow_neg_eigval", False) else 1.0,
        beta_projection=given(config, "use_beta", True),
    )
    return fla_layout.model("delta_net", config, mixer)
