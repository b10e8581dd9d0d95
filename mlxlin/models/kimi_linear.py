"""Kimi Linear: delta attention with a decay per channel, latent attention without rotary embedding, experts."""

from __future__ import annotations

from mlxlin.errors import CheckpointError
from mlxlin.models import latent_layout
from mlxlin.models.common_layout import ATTENTION, LAYER, MIXER, MTP, frame_weights, mlp_weights
from mlxlin.models.config import Config, given, need, only
from mlxlin.models.rules import Weight
from mlxlin.models.spec import DecaySpec, LinearSpec, ModelSpec, NormSpec, OutputSpec

SERVES = (("kimi_linear", None),)
PREFIXES = ("model.",)
DROPS = (MTP,)

_MOE = LAYER + "block_sparse_moe."
WEIGHTS = (
    *frame_weights(),
    *mlp_weights(),
    *mlp_weights(_MOE),  # transformers writes the dense parts under the mixtures' name
    *latent_layout.mixture_weights(_MOE, "w1", "w3", "w2"),
    Weight(LAYER + "mlp.correction", _MOE + "gate.e_score_correction_bias"),
    *latent_layout.latent_weights(ATTENTION, "o_proj.weight"),
    *latent_layout.delta_weights(ATTENTION, "o_proj.weight"),
    Weight(MIXER + "decay.weight", ATTENTION + "f_a_proj.weight", kind="linear"),
    Weight(MIXER + "decay_out.weight", ATTENTION + "f_b_proj.weight", kind="linear"),
    Weight(MIXER + "gate.weight", ATTENTION + "g_a_proj.weight", kind="linear"),
    Weight(MIXER + "gate_out.weight", ATTENTION + "g_b_proj.weight", kind="linear"),
)
_SUPPORTED = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mla_use_nope": (True,),
    "moe_router_activation_func": ("sigmoid",),
    "moe_layer_freq": (1,),
}


def spec(config: Config) -> ModelSpec:
    """The description of a checkpoint with this config.json."""
    only(config, _SUPPORTED)
    norm = NormSpec(float(given(config, "rms_norm_eps", 1e-5)))
    return latent_layout.delta_model(
        "kimi_linear",
        config,
        norm=norm,
        delta=_delta_mixer(config, norm),
        latent=latent_layout.latent_mixer(config, rope=None, gate=False),
        derived_kinds=_derived_kinds(config),
        dense_first=1,
        context=1048576,
    )


def _delta_mixer(config: Config, norm: NormSpec) -> LinearSpec:
    hub = given(config, "linear_attn_config", {})
    heads = given(hub, "num_heads", given(config, "linear_num_heads", 32))
    dim = given(hub, "head_dim", given(config, "linear_head_dim", 128))
    return latent_layout.delta_mixer(
        heads,
        dim,
        conv=given(hub, "short_conv_kernel_size", given(config, "linear_conv_kernel_dim", 4)),
        decay=DecaySpec("softplus", vector=True, rank=dim),
        output=OutputSpec(norm, gate="sigmoid", rank=dim),
    )


def _derived_kinds(config: Config) -> list[str]:
    """From the hub's lists, which count layers from one; else every fourth layer after the first."""
    hub, count = given(config, "linear_attn_config", {}), need(config, "num_hidden_layers")
    full, linear = hub.get("full_attn_layers"), hub.get("kda_layers")
    if full is None or linear is None:
        return ["full_attention" if i and i % 4 == 0 else "linear_attention" for i in range(count)]
    if sorted([*full, *linear]) != list(range(1, count + 1)):
        raise CheckpointError("config.json: full_attn_layers and kda_layers do not name every layer once.")
    return ["full_attention" if i + 1 in full else "linear_attention" for i in range(count)]
