"""LFM2: gated short convolutions, and full attention in some layers."""

from __future__ import annotations

from collections.abc import Sequence

from mlxlin.errors import CheckpointError
from mlxlin.models.common_layout import (
    ATTENTION,
    KINDS,
    LAYER,
    MIXER,
    MLP,
    frame_weights,
    head_dim,
    mlp_weights,
    whole_rope,
)
from mlxlin.models.config import Config, given, layer_kinds, need, nullable, only
from mlxlin.models.rules import Weight
from mlxlin.models.spec import (
    AttentionSpec,
    FeedForwardSpec,
    GatedConvSpec,
    LayerSpec,
    MixerSpec,
    MlpSpec,
    ModelSpec,
    NormSpec,
)
from mlxlin.models.values import CONV

SERVES = (("lfm2", None),)
PREFIXES = ("model.",)
DROPS = ((r".*(rotary|pos)_emb\.(original_)?inv_freq$", "rotary frequencies (computed)"),)

_CONV, _FEED_FORWARD = LAYER + "conv.", LAYER + "feed_forward."
WEIGHTS = (
    # embedding_norm is that of the last layer's output, whatever its name says
    *frame_weights(norm="embedding_norm", mixer_norm="operator_norm", mlp_norm="ffn_norm"),
    *(
        Weight(f"{MLP}{target}.weight", f"{_FEED_FORWARD}{source}.weight")
        for target, source in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
    ),
    *mlp_weights(_FEED_FORWARD),
    *(Weight(f"{MIXER}{p}.weight", f"{ATTENTION}{p}_proj.weight", kind="attention") for p in ("q", "k", "v", "out")),
    *(Weight(f"{MIXER}{p}_norm.weight", f"{ATTENTION}{p}_layernorm.weight", kind="attention") for p in "qk"),
    *(
        Weight(f"{MIXER}{part}.{kind}", f"{_CONV}{part}_proj.{kind}", kind="gated_conv")
        for part in ("in", "out")
        for kind in KINDS
    ),
    Weight(MIXER + "conv.weight", _CONV + "conv.weight", CONV, kind="gated_conv"),
    Weight(MIXER + "conv.bias", _CONV + "conv.bias", kind="gated_conv"),
)


def spec(config: Config) -> ModelSpec:
    """The description of a checkpoint with this config.json."""
    return model("lfm2", config, [MlpSpec(_hidden(config))] * need(config, "num_hidden_layers"))


def model(family: str, config: Config, mlps: Sequence[FeedForwardSpec]) -> ModelSpec:
    """The whole decoder, with one feed-forward part for each layer."""
    width, norm = need(config, "hidden_size"), NormSpec(float(given(config, "norm_eps", 1e-5)))
    same_width = {key: (width, None) for key in ("block_dim", "conv_dim", "conv_dim_out")}
    only(config, {"block_use_swiglu": (True, None), "use_pos_enc": (True, None), **same_width})
    mixers: dict[str, MixerSpec] = {
        "conv": GatedConvSpec(given(config, "conv_L_cache", 3), given(config, "conv_bias", False)),
        "full_attention": _attention(config, norm.eps),
    }
    layers = [LayerSpec(mixers[kind], mlp, norm) for kind, mlp in zip(_layer_kinds(config), mlps, strict=True)]
    return ModelSpec(
        family=family,
        vocab=need(config, "vocab_size"),
        width=width,
        layers=tuple(layers),
        norm=norm,
        tied=given(config, "tie_embedding", given(config, "tie_word_embeddings", True)),
        context=given(config, "max_position_embeddings", 128000),
    )


def _layer_kinds(config: Config) -> list[str]:
    """conv or full_attention for each layer; older configs list the attention layers' indices."""
    count, full = need(config, "num_hidden_layers"), given(config, "full_attn_idxs", None, list[int])
    derived = None if full is None else ["full_attention" if i in full else "conv" for i in range(count)]
    kinds = layer_kinds(config, derived, ("conv", "full_attention"))
    if derived is not None and kinds != derived:
        raise CheckpointError("config.json: layer_types contradicts full_attn_idxs.")
    return kinds


def _attention(config: Config, eps: float) -> AttentionSpec:
    dim = head_dim(config)
    return AttentionSpec(
        heads=need(config, "num_attention_heads"),
        kv_heads=given(config, "num_key_value_heads", 8),
        head_dim=dim,
        scale=dim**-0.5,
        rope=whole_rope(config, dim, 1e6),
        qk_norm="head",
        eps=eps,
    )


def _hidden(config: Config) -> int:
    """Width of the feed-forward parts; configs may give that of an ungated one with as many weights."""
    hidden = int(given(config, "block_ff_dim", 0) or need(config, "intermediate_size"))
    if not given(config, "block_auto_adjust_ff_dim", True):
        return hidden
    hidden, factor = int(2 * hidden / 3), nullable(config, "block_ffn_dim_multiplier", 1.0)
    if factor is None:
        return hidden
    multiple: int = given(config, "block_multiple_of", 256)
    return -(-int(factor * hidden) // multiple) * multiple
