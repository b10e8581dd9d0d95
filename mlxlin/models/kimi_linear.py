"""Kimi Linear: delta attention with a decay per channel, latent attention without rotary embedding, experts."""

from __future__ import annotations

from mlxlin.errors import CheckpointError
from mlxlin.models import latent_layout
from mlxlin.models.config import Config, given, need, only
from mlxlin.models.latent_layout import LAYER, MIXER
from mlxlin.models.rules import Weight
from mlxlin.models.spec import DecaySpec, LayerSpec, LinearSpec, MixerSpec, ModelSpec, NormSpec, OutputSpec

SERVES = (("kimi_linear", None),)
PREFIXES = ("model.",)
DROPS = ((r"mtp\.", "MTP tensors (multi-token prediction head)"),)

_ATTENTION, _MOE = LAYER + "self_attn.", LAYER + "block_sparse_moe."
WEIGHTS = (
    Weight("embed.weight", "embed_tokens.weight"),
    Weight("norm.weight", "norm.weight"),
    Weight("head.weight", "lm_head.weight"),
    Weight(LAYER + "mixer_norm.weight", LAYER + "input_layernorm.weight"),
    Weight(LAYER + "mlp_norm.weight", LAYER + "post_attention_layernorm.weight"),
    *latent_layout.MLP_WEIGHTS,
    # transformers writes the dense parts under the mixtures' name
    *(Weight(f"{LAYER}mlp.{p}.weight", f"{_MOE}{p}_proj.weight") for p in ("gate", "up", "down")),
    *latent_layout.mixture_weights(_MOE, "w1", "w3", "w2"),
    Weight(LAYER + "mlp.correction", _MOE + "gate.e_score_correction_bias"),
    *latent_layout.latent_weights(_ATTENTION, "o_proj.weight"),
    *latent_layout.delta_weights(_ATTENTION, "o_proj.weight"),
    Weight(MIXER + "decay.weight", _ATTENTION + "f_a_proj.weight", kind="linear"),
    Weight(MIXER + "decay_out.weight", _ATTENTION + "f_b_proj.weight", kind="linear"),
    Weight(MIXER + "gate.weight", _ATTENTION + "g_a_proj.weight", kind="linear"),
    Weight(MIXER + "gate_out.weight", _ATTENTION + "g_b_proj.weight", kind="linear"),
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
    mixers: dict[str, MixerSpec] = {
        "linear_attention": _delta_mixer(config, norm),
        "full_attention": latent_layout.latent_mixer(config, rope=None, gate=False),
    }
    kinds = latent_layout.layer_kinds(config, _derived_kinds(config))
    mlps = latent_layout.feed_forwards(config, given(config, "first_k_dense_replace", 1))
    return ModelSpec(
        family="kimi_linear",
        vocab=need(config, "vocab_size"),
        width=need(config, "hidden_size"),
        layers=tuple(LayerSpec(mixers[kind], mlp, norm) for kind, mlp in zip(kinds, mlps, strict=True)),
        norm=norm,
        tied=given(config, "tie_word_embeddings", False),
        context=latent_layout.either(config, "model_max_length", "max_position_embeddings", 1048576),
    )


def _delta_mixer(config: Config, norm: NormSpec) -> LinearSpec:
    hub = given(config, "linear_attn_config", {})
    heads = given(hub, "num_heads", given(config, "linear_num_heads", 32))
    dim = given(hub, "head_dim", given(config, "linear_head_dim", 128))
    return LinearSpec(
        rule="kda",
        heads=heads,
        value_heads=heads,
        key_dim=dim,
        value_dim=dim,
        scale=dim**-0.5,
        output=OutputSpec(norm, gate="sigmoid", rank=dim),
        conv=given(hub, "short_conv_kernel_size", given(config, "linear_conv_kernel_dim", 4)),
        qk_activation="silu",
        v_activation="silu",
        qk_norm="l2",
        decay=DecaySpec("softplus", vector=True, rank=dim),
        beta=1.0,
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
