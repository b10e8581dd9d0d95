"""Gated linear attention in flash-linear-attention's layout (Yang et al. 2023, arXiv:2312.06635)."""

from __future__ import annotations

from mlxlin.models import fla_layout
from mlxlin.models.config import Config, given, only
from mlxlin.models.fla_layout import ATTN, MIXER
from mlxlin.models.rules import Weight
from mlxlin.models.spec import DecaySpec, LinearSpec, ModelSpec, NormSpec, OutputSpec

SERVES = (("gla", None),)
PREFIXES = fla_layout.PREFIXES
DROPS = fla_layout.DROPS
WEIGHTS = (
    *fla_layout.SHARED_WEIGHTS,
    Weight(MIXER + "gate.weight", ATTN + "g_proj.weight"),
    Weight(MIXER + "decay.weight", ATTN + "gk_proj.0.weight"),
    Weight(MIXER + "decay_out.weight", ATTN + "gk_proj.1.weight"),
    Weight(MIXER + "decay_out.bias", ATTN + "gk_proj.1.bias"),
    Weight(MIXER + "norm.weight", ATTN + "g_norm_swish_gate.weight"),
    Weight(MIXER + "norm.weight", ATTN + "g_norm.weight"),
)
# The source's model class passes neither to its layer, whatever the config says.
_GATE_RANK = 16
_GATE_DIVISOR = 16.0


def spec(config: Config) -> ModelSpec:
    """The description of a checkpoint with this config.json."""
    only(config, {"feature_map": (None, "relu", "silu", "swish"), "use_gk": (True,), "use_gv": (False,)})
    heads = given(config, "num_heads", 4)
    key_dim = fla_layout.width_times(config, given(config, "expand_k", 0.5), heads, "expand_k")
    norm = NormSpec(fla_layout.eps(config), affine=given(config, "elementwise_affine", True))
    conv = fla_layout.taps(config, default=False)
    mixer = LinearSpec(
        rule="gated",
        heads=heads,
        value_heads=heads,
        key_dim=key_dim,
        value_dim=fla_layout.width_times(config, given(config, "expand_v", 1.0), heads, "expand_v"),
        scale=key_dim**-0.5,
        output=OutputSpec(norm, gate="silu" if given(config, "use_output_gate", True) else "none"),
        kv_heads=given(config, "num_kv_heads", heads),
        conv=conv,
        qk_activation="silu" if conv else "none",
        v_activation="silu" if conv else "none",
        features=fla_layout.FEATURES[config.get("feature_map")],
        decay=DecaySpec(
            "logsigmoid",
            vector=True,
            rank=_GATE_RANK,
            divisor=_GATE_DIVISOR,
            floor=given(config, "clamp_min", None, float),
        ),
    )
    return fla_layout.model("gla", config, mixer)
