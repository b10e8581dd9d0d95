"""RetNet in flash-linear-attention's layout (Sun et al. 2023, arXiv:2307.08621)."""

from __future__ import annotations

from mlxlin.models import fla_layout
from mlxlin.models.config import Config, given, only
from mlxlin.models.fla_layout import ATTN, MIXER
from mlxlin.models.rules import Weight
from mlxlin.models.spec import DecaySpec, LinearSpec, ModelSpec, NormSpec, OutputSpec, RopeSpec

SERVES = (("retnet", None),)
PREFIXES = fla_layout.PREFIXES
DROPS = fla_layout.DROPS
WEIGHTS = (
    *fla_layout.SHARED_WEIGHTS,
    Weight(MIXER + "gate.weight", ATTN + "g_proj.weight"),
    Weight(MIXER + "norm.weight", ATTN + "g_norm_swish_gate.weight"),
    Weight(MIXER + "norm.weight", ATTN + "g_norm.weight"),
)


def spec(config: Config) -> ModelSpec:
    """The description of a checkpoint with this config.json."""
    only(config, {"feature_map": (None, "relu", "silu", "swish")})
    heads = given(config, "num_heads", 8)
    key_dim = fla_layout.width_times(config, given(config, "expand_k", 1.0), heads, "expand_k")
    norm = NormSpec(fla_layout.eps(config), affine=given(config, "elementwise_affine", True))
    mixer = LinearSpec(
        rule="decay",
        heads=heads,
        value_heads=heads,
        key_dim=key_dim,
        value_dim=fla_layout.width_times(config, given(config, "expand_v", 2.0), heads, "expand_v"),
        scale=key_dim**-0.5,
        output=OutputSpec(norm, gate="silu" if given(config, "use_output_gate", True) else "none"),
        kv_heads=given(config, "num_kv_heads", heads),
        features=fla_layout.FEATURES[config.get("feature_map")],
        rope=RopeSpec(key_dim),
        decay=DecaySpec("retention"),
    )
    return fla_layout.model("retnet", config, mixer, ratio=2.0)
