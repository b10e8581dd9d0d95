"""Bamba: Mamba-2 layers with a few of softmax attention, each with a feed-forward part (IBM, Princeton, CMU, UIUC)."""

from __future__ import annotations

from collections.abc import Collection

from mlxlin.errors import CheckpointError
from mlxlin.models.common_layout import (
    LAYER,
    ROTARY,
    attention_weights,
    frame_weights,
    grouped_attention,
    head_dim,
    mlp_weights,
)
from mlxlin.models.config import Config, given, need, only, rope_settings, rotary_size
from mlxlin.models.mamba_layout import expanded, mixer_weights
from mlxlin.models.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, NormSpec, RopeSpec

SERVES = (("bamba", None),)
PREFIXES = ("model.",)
DROPS = (ROTARY,)
WEIGHTS = (
    *frame_weights(norm="final_layernorm", mlp_norm="pre_ff_layernorm"),
    *mlp_weights(LAYER + "feed_forward."),
    *attention_weights(),
    *mixer_weights(LAYER + "mamba."),
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
    chosen: list[int] = given(config, "attn_layer_indices", [], list[int])
    if any(not 0 <= index < count for index in chosen):
        raise CheckpointError(f"config.json: attn_layer_indices names a layer outside the {count} of the model.")
    return chosen


def _attention(config: Config) -> AttentionSpec:
    dim, (rope, base) = head_dim(config), rope_settings(config, 10000.0)
    return grouped_attention(config, dim, RopeSpec(rotary_size(rope, dim, 0.5), base))
