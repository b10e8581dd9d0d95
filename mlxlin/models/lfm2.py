"""LFM2: gated short convolutions, and full attention in some layers."""

from __future__ import annotations

from collections.abc import Sequence

from mlxlin.errors import CheckpointError
from mlxlin.models.config import Config, default_rope, given, need, only
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
    RopeSpec,
)
from mlxlin.models.values import CONV

SERVES = (("lfm2", None),)
PREFIXES = ("model.",)
DROPS = ((r".*(rotary|pos)_emb\.(original_)?inv_freq$", "rotary frequencies (computed)"),)

_LAYER, _MIXER = "layers.{i}.", "layers.{i}.mixer."
_CONV, _ATTENTION = "layers.{i}.conv.", "layers.{i}.self_attn."
WEIGHTS = (
    Weight("embed.weight", "embed_tokens.weight"),
    Weight("norm.weight", "embedding_norm.weight"),  # of the last layer's output, whatever its name says
    Weight("head.weight", "lm_head.weight"),
    Weight(_LAYER + "mixer_norm.weight", _LAYER + "operator_norm.weight"),
    Weight(_LAYER + "mlp_norm.weight", _LAYER + "ffn_norm.weight"),
    *(
        Weight(f"{_LAYER}mlp.{target}.weight", f"{_LAYER}feed_forward.{source}.weight")
        for target, sources in (("gate", ("w1", "gate_proj")), ("up", ("w3", "up_proj")), ("down", ("w2", "down_proj")))
        for source in sources
    ),
    *(Weight(f"{_MIXER}{p}.weight", f"{_ATTENTION}{p}_proj.weight", kind="attention") for p in ("q", "k", "v", "out")),
    *(Weight(f"{_MIXER}{p}_norm.weight", f"{_ATTENTION}{p}_layernorm.weight", kind="attention") for p in "qk"),
    *(
        Weight(f"{_MIXER}{part}.{kind}", f"{_CONV}{part}_proj.{kind}", kind="gated_conv")
        for part in ("in", "out")
        for kind in ("weight", "bias")
    ),
    Weight(_MIXER + "conv.weight", _CONV + "conv.weight", CONV, kind="gated_conv"),
    Weight(_MIXER + "conv.bias", _CONV + "conv.bias", kind="gated_conv"),
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
        "full_attention": _attention(config, width, norm.eps),
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
    count, full = need(config, "num_hidden_layers"), config.get("full_attn_idxs")
    derived = None if full is None else ["full_attention" if i in full else "conv" for i in range(count)]
    kinds = need(config, "layer_types") if derived is None else given(config, "layer_types", derived)
    if len(kinds) != count or not set(kinds) <= {"conv", "full_attention"}:
        raise CheckpointError(f"config.json: layer_types must name conv or full_attention {count} times.")
    if derived is not None and kinds != derived:
        raise CheckpointError("config.json: layer_types contradicts full_attn_idxs.")
    return list(kinds)


def _attention(config: Config, width: int, eps: float) -> AttentionSpec:
    heads = need(config, "num_attention_heads")
    head_dim = given(config, "head_dim", width // heads)
    rope = given(config, "rope_parameters", given(config, "rope_scaling", {}))
    default_rope(rope)
    for place in (config, rope):
        only(place, {"partial_rotary_factor": (1.0, None)})
    return AttentionSpec(
        heads=heads,
        kv_heads=given(config, "num_key_value_heads", 8),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=RopeSpec(head_dim, float(given(rope, "rope_theta", given(config, "rope_theta", 1e6)))),
        qk_norm="head",
        eps=eps,
    )


def _hidden(config: Config) -> int:
    """Width of the feed-forward parts; configs may give that of an ungated one with as many weights."""
    hidden = int(given(config, "block_ff_dim", 0) or need(config, "intermediate_size"))
    if not given(config, "block_auto_adjust_ff_dim", True):
        return hidden
    hidden, factor = int(2 * hidden / 3), config.get("block_ffn_dim_multiplier", 1.0)
    if factor is None:
        return hidden
    multiple: int = given(config, "block_multiple_of", 256)
    return -(-int(factor * hidden) // multiple) * multiple
