"""Ling 3: delta attention with a bounded decay, gated latent attention with rotary embedding, grouped experts."""

from __future__ import annotations

from mlxlin.errors import UnsupportedError
from mlxlin.models import bailing_layout, latent_layout
from mlxlin.models.bailing_layout import ATTENTION
from mlxlin.models.common_layout import MIXER
from mlxlin.models.config import Config, given, need, only, rope_settings
from mlxlin.models.rules import Weight
from mlxlin.models.spec import DecaySpec, LinearSpec, ModelSpec, NormSpec, OutputSpec, RopeSpec

# Ling and Ring 2.5 share the model type; they are another architecture (lightning attention).
SERVES = (("bailing_hybrid", "BailingMoeV3ForCausalLM"), ("bailing_hybrid", "BailingHybridForCausalLM"))
PREFIXES = bailing_layout.PREFIXES
DROPS = bailing_layout.DROPS
WEIGHTS = (
    *bailing_layout.SHARED_WEIGHTS,
    *latent_layout.latent_weights(ATTENTION, "dense.weight"),
    *latent_layout.delta_weights(ATTENTION, "dense.weight"),
    Weight(MIXER + "out.weight", ATTENTION + "o_proj.weight"),
    Weight(MIXER + "gate.weight", ATTENTION + "g_proj.weight"),
    Weight(MIXER + "decay.weight", ATTENTION + "f_proj.weight", kind="linear"),
)
_SUPPORTED = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "no_kda_lora": (True,),
    "rope_interleave": (True,),
    "rope_scaling": (None,),
}


def spec(config: Config) -> ModelSpec:
    """The description of a checkpoint with this config.json."""
    only(config, _SUPPORTED)
    _, base = rope_settings(config, 6e6)
    norm = NormSpec(float(given(config, "rms_norm_eps", 1e-6)))
    turning = RopeSpec(need(config, "qk_rope_head_dim"), base, interleaved=True)
    return latent_layout.delta_model(
        "bailing_hybrid",
        config,
        norm=norm,
        delta=_delta_mixer(config, norm),
        latent=latent_layout.latent_mixer(config, rope=turning, gate=True),
        derived_kinds=_derived_kinds(config),
        dense_first=2,
        context=262144,
    )


def _delta_mixer(config: Config, norm: NormSpec) -> LinearSpec:
    heads, dim = need(config, "num_attention_heads"), given(config, "linear_head_dim", given(config, "head_dim", 128))
    bounded = given(config, "kda_safe_gate", True)
    bound = float(given(config, "kda_lower_bound", -5.0))
    return latent_layout.delta_mixer(
        heads,
        dim,
        conv=given(config, "short_conv_kernel_size", 4),
        decay=DecaySpec("sigmoid", vector=True, bound=bound) if bounded else DecaySpec("softplus", vector=True),
        output=OutputSpec(norm, gate="sigmoid"),
    )


def _derived_kinds(config: Config) -> list[str]:
    """The last layer of each group is full attention."""
    count, group = need(config, "num_hidden_layers"), given(config, "layer_group_size", 6)
    if count % group and config.get("layer_types") is None:
        raise UnsupportedError(
            f"config.json has num_hidden_layers = {count}, not a multiple of layer_group_size = {group}, "
            "and no layer_types."
        )
    return ["full_attention" if (i + 1) % group == 0 else "linear_attention" for i in range(count)]
