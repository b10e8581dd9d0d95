"""Bamba: Mamba-2 layers with a few of softmax attention, each with a feed-forward part (IBM, Princeton, CMU, UIUC)."""

from __future__ import annotations

from collections.abc import Collection

from mlxlin.errors import CheckpointError
from mlxlin.models.config import Config, default_rope, given, need, only
from mlxlin.models.mamba_layout import expanded, mixer_weights
from mlxlin.models.rules import Weight
from mlxlin.models.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, NormSpec, RopeSpec

SERVES = (("bamba", None),)
PREFIXES = ("model.",)
DROPS = ((r".*rotary_emb\.inv_freq$", "rotary frequencies (computed)"),)

_LAYER, _ATTENTION = "layers.{i}.", "layers.{i}.self_attn."
_KINDS = ("weight", "bias")
WEIGHTS = (
    Weight("embed.weight", "embed_tokens.weight"),
    Weight("norm.weight", "final_layernorm.weight"),
    Weight("head.weight", "lm_head.weight"),
    Weight(_LAYER + "mixer_norm.weight", _LAYER + "input_layernorm.weight"),
    Weight(_LAYER + "mlp_norm.weight", _LAYER + "pre_ff_layernorm.weight"),
    *(
        Weight(f"{_LAYER}mlp.{part}.{kind}", f"{_LAYER}feed_forward.{part}_proj.{kind}")
        for part in ("gate", "up", "down")
        for kind in _KINDS
    ),
    *(
        Weight(f"{_LAYER}mixer.{target}.{kind}", f"{_ATTENTION}{source}_proj.{kind}", kind="attention")
        for target, source in (("q", "q"), ("k", "k"), ("v", "v"), ("out", "o"))
        for kind in _KINDS
    ),
    *mixer_weights("layers.{i}.mamba."),
)


def spec(config: Config) -> ModelSpec:
    """The description of a checkpoint with this config.json."""
    only(config, {"hidden_act": ("silu",)})
    count, norm = need(config, "num_hidden_layers"), NormSpec(float(given(config, "rms_norm_eps", 1e-5)))
    mlp = MlpSpec(need(config, "intermediate_size"), bias=given(config, "mlp_bias", False))
    recurrent = LayerSpec(expanded(config, norm.eps), mlp, norm)
    attention = LayerSpec(_attention(config), mlp, norm)
    chosen = _attention_layers(config, count)
    return ModelSpec(
        family="bamba",
        vocab=need(config, "vocab_size"),
        width=need(config, "hidden_size"),
        layers=tuple(attention if index in chosen else recurrent for index in range(count)),
        norm=norm,
        tied=given(config, "tie_word_embeddings", False),
        context=given(config, "max_position_embeddings", 262144),
    )


def _attention_layers(config: Config, count: int) -> Collection[int]:
    """Indices of the layers with softmax attention."""
    chosen: list[int] = given(config, "attn_layer_indices", [])
    if any(not 0 <= index < count for index in chosen):
        raise CheckpointError(f"config.json: attn_layer_indices names a layer outside the {count} of the model.")
    return chosen


def _attention(config: Config) -> AttentionSpec:
    heads, bias = need(config, "num_attention_heads"), given(config, "attention_bias", False)
    head_dim = given(config, "head_dim", need(config, "hidden_size") // heads)
    rope = given(config, "rope_parameters", given(config, "rope_scaling", {}))
    default_rope(rope)
    base = given(rope, "rope_theta", given(config, "rope_theta", 10000.0))
    return AttentionSpec(
        heads=heads,
        kv_heads=given(config, "num_key_value_heads", heads),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=RopeSpec(int(head_dim * given(rope, "partial_rotary_factor", 0.5)), float(base)),
        qkv_bias=bias,
        out_bias=bias,
    )
