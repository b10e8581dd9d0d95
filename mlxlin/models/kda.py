"""Kimi delta attention in flash-linear-attention's layout (Kimi Team 2025, arXiv:2510.26692)."""

from __future__ import annotations

from mlxlin.errors import UnsupportedError
from mlxlin.models import fla_layout
from mlxlin.models.config import Config, given
from mlxlin.models.fla_layout import ATTN, MIXER
from mlxlin.models.rules import Weight
from mlxlin.models.spec import DecaySpec, LinearSpec, ModelSpec, NormSpec, OutputSpec

SERVES = (("kda", None),)
PREFIXES = fla_layout.PREFIXES
DROPS = fla_layout.DROPS
WEIGHTS = (
    *fla_layout.SHARED_WEIGHTS,
    Weight(MIXER + "decay.weight", ATTN + "f_proj.0.weight"),
    Weight(MIXER + "decay_out.weight", ATTN + "f_proj.1.weight"),
    Weight(MIXER + "gate.weight", ATTN + "g_proj.0.weight"),
    Weight(MIXER + "gate_out.weight", ATTN + "g_proj.1.weight"),
    Weight(MIXER + "gate_out.bias", ATTN + "g_proj.1.bias"),
    Weight(MIXER + "beta.weight", ATTN + "b_proj.weight"),
    Weight(MIXER + "A_log", ATTN + "A_log"),
    Weight(MIXER + "dt_bias", ATTN + "dt_bias"),
    Weight(MIXER + "norm.weight", ATTN + "o_norm.weight"),
)


def spec(config: Config) -> ModelSpec:
    """The description of a checkpoint with this config.json."""
    heads, head_dim = given(config, "num_heads", 16), given(config, "head_dim", 128)
    value_dim = fla_layout.head_times(head_dim, given(config, "expand_v", 1.0), "expand_v")
    mixer = LinearSpec(
        rule="kda",
        heads=heads,
        value_heads=given(config, "num_v_heads", heads),
        key_dim=head_dim,
        value_dim=value_dim,
        scale=head_dim**-0.5,
        output=OutputSpec(NormSpec(fla_layout.eps(config)), gate="sigmoid", rank=value_dim, bias=True),
        conv=fla_layout.taps(config, default=True),
        qk_activation="silu",
        v_activation="silu",
        qk_norm="l2",
        decay=_decay(config, value_dim),
        beta=2.0 if given(config, "allow_neg_eigval", False) else 1.0,
    )
    return fla_layout.model("kda", config, mixer)


def _decay(config: Config, rank: int) -> DecaySpec:
    bound = given(config, "lower_bound", None, float)
    if bound is not None:
        return DecaySpec("sigmoid", vector=True, rank=rank, bound=float(bound))
    if given(config, "safe_gate", False):
        raise UnsupportedError("config.json has safe_gate without lower_bound.")
    return DecaySpec("softplus", vector=True, rank=rank)
