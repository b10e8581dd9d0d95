"""Ling and Ring 2.5: lightning attention with normalised keys, latent attention, grouped experts."""

from __future__ import annotations

from mlxlin.models import bailing_layout, latent_layout
from mlxlin.models.bailing_layout import ATTENTION
from mlxlin.models.config import Config, need
from mlxlin.models.spec import ModelSpec

# The model type is Ling 3's too, which has another architecture.
SERVES = (("bailing_hybrid", "BailingMoeV2_5ForCausalLM"),)
PREFIXES = bailing_layout.PREFIXES
DROPS = bailing_layout.DROPS
WEIGHTS = (
    *bailing_layout.SHARED_WEIGHTS,
    *bailing_layout.LIGHTNING_WEIGHTS,
    *latent_layout.latent_weights(ATTENTION, "dense.weight"),
)


def spec(config: Config) -> ModelSpec:
    """The description of a checkpoint with this config.json."""
    turning = bailing_layout.rope(config, need(config, "qk_rope_head_dim"), interleaved=True)
    latent = latent_layout.latent_mixer(config, rope=turning, gate=False)
    return bailing_layout.lightning_model("bailing_moe_v2_5", config, latent)
