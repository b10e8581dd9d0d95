"""Gated DeltaProduct in flash-linear-attention's layout (Siems et al. 2025, arXiv:2502.10297)."""

from __future__ import annotations

from dataclasses import replace

from mlxlin.models import fla_layout, gated_deltanet
from mlxlin.models.config import Config, given
from mlxlin.models.spec import Gate, ModelSpec

SERVES = (("gated_deltaproduct", None),)
PREFIXES = fla_layout.PREFIXES
DROPS = fla_layout.DROPS
# Rows of k, v and beta hold the steps of a token one after the other, as the mixer expects them.
WEIGHTS = gated_deltanet.WEIGHTS


def spec(config: Config) -> ModelSpec:
    """The description of a checkpoint with this config.json."""
    gate: Gate = "silu" if given(config, "use_output_gate", True) else "none"
    one = gated_deltanet.mixer(config, gate)
    mixer = replace(
        one,
        rule="delta_product",
        value_heads=one.heads,
        decay=one.decay if given(config, "use_forget_gate", False) else None,
        steps=given(config, "num_householder", 1),
    )
    return fla_layout.model("gated_deltaproduct", config, mixer)
