"""Gated slot attention in flash-linear-attention's layout (Zhang et al. 2024, arXiv:2409.07146)."""

from __future__ import annotations

from mlxlin.errors import CheckpointError
from mlxlin.models import fla_layout
from mlxlin.models.config import Config, given, need, nullable, only
from mlxlin.models.fla_layout import ATTN, MIXER
from mlxlin.models.rules import Weight
from mlxlin.models.spec import ModelSpec, NormSpec, SlotSpec

SERVES = (("gsa", None),)
PREFIXES = fla_layout.PREFIXES
DROPS = fla_layout.DROPS
WEIGHTS = (
    *fla_layout.SHARED_WEIGHTS,
    Weight(MIXER + "forget.weight", ATTN + "f_proj.weight"),
    Weight(MIXER + "norm.weight", ATTN + "g_norm.weight"),
)
# The source calls a function here that does not hear of the config's epsilon.
_OUTPUT_EPS = 1e-5


def spec(config: Config) -> ModelSpec:
    """The description of a checkpoint with this config.json."""
    only(config, {"feature_map": ("swish", "relu")})
    heads = given(config, "num_heads", 4)
    key_dim = fla_layout.width_times(config, _expansion(config, "k"), heads, "expand_k")
    value_dim = fla_layout.width_times(config, _expansion(config, "v"), heads, "expand_v")
    if heads * value_dim != need(config, "hidden_size"):
        raise CheckpointError("config.json: expand_v is not 1; the norm of the output has the width of the model.")
    mixer = SlotSpec(
        heads=heads,
        kv_heads=given(config, "num_kv_heads", heads),
        key_dim=key_dim,
        value_dim=value_dim,
        slots=nullable(config, "num_slots", 64) or key_dim,
        divisor=float(given(config, "gate_logit_normalizer", 8)),
        norm=NormSpec(_OUTPUT_EPS, affine=given(config, "elementwise_affine", True)),
        features="relu" if config.get("feature_map") == "relu" else "silu",
        conv=fla_layout.taps(config, default=False),
    )
    return fla_layout.model("gsa", config, mixer)


def _expansion(config: Config, part: str) -> float:
    """Stored under its name, and read by the source under a misspelt one."""
    return float(given(config, f"expand_{part}", given(config, f"exapnd_{part}", 1.0)))
