"""Comba in flash-linear-attention's layout (Hu et al. 2025, arXiv:2506.02475)."""

from __future__ import annotations

from dataclasses import replace

from mlxlin.models import fla_layout, gated_deltanet
from mlxlin.models.config import Config, given
from mlxlin.models.fla_layout import ATTN, MIXER
from mlxlin.models.rules import Weight
from mlxlin.models.spec import Gate, ModelSpec

SERVES = (("comba", None),)
PREFIXES = fla_layout.PREFIXES
DROPS = fla_layout.DROPS
WEIGHTS = (
    *gated_deltanet.WEIGHTS,
    Weight(MIXER + "reader", ATTN + "decay"),
    Weight(MIXER + "correction", ATTN + "D"),
)


def spec(config: Config) -> ModelSpec:
    """The description of a checkpoint with this config.json.

    use_inner_decay, use_output_correction and correction_factor are not read: the source's model class does not pass
    them to its layer.
    """
    gate: Gate = "sigmoid" if given(config, "use_output_gate", True) else "none"
    mixer = replace(gated_deltanet.mixer(config, gate), rule="comba", beta=1.0)
    return fla_layout.model("comba", config, mixer)
