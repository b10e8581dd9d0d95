"""Granite 4: Mamba-2 layers with a few of softmax attention, dense or with experts, scaled for muP (IBM).

The feed-forward part that all tokens share is the only one of the dense models.
"""

from __future__ import annotations

from mlxlin.errors import CheckpointError
from mlxlin.models.config import Config, default_rope, given, need, only
from mlxlin.models.mamba_layout import expanded, mixer_weights
from mlxlin.models.rules import Weight
from mlxlin.models.spec import (
    AttentionSpec,
    BlendSpec,
    FeedForwardSpec,
    LayerSpec,
    MixerSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    NormSpec,
    RopeSpec,
)
from mlxlin.models.values import FIRST_HALF, SECOND_HALF

SERVES = (("granitemoehybrid", None),)
PREFIXES = ("model.",)
DROPS = ((r".*rotary_emb\.inv_freq$", "rotary frequencies (computed)"),)

_LAYER, _MLP = "layers.{i}.", "layers.{i}.mlp."
_ATTENTION, _MOE, _SHARED = "layers.{i}.self_attn.", "layers.{i}.block_sparse_moe.", "layers.{i}.shared_mlp."
_PARTS = ("gate", "up", "down")


def _halved(target: str, source: str, out: str) -> tuple[Weight, ...]:
    """A feed-forward part whose gate and up projection are the halves of one matrix."""
    return (
        Weight(f"{_MLP}{target}gate.weight", source, FIRST_HALF),
        Weight(f"{_MLP}{target}up.weight", source, SECOND_HALF),
        Weight(f"{_MLP}{target}down.weight", out),
    )


WEIGHTS = (
    Weight("embed.weight", "embed_tokens.weight"),
    Weight("norm.weight", "norm.weight"),
    Weight("head.weight", "lm_head.weight"),
    Weight(_LAYER + "mixer_norm.weight", _LAYER + "input_layernorm.weight"),
    Weight(_LAYER + "mlp_norm.weight", _LAYER + "post_attention_layernorm.weight"),
    *mixer_weights("layers.{i}.mamba."),
    *(
        Weight(f"{_LAYER}mixer.{target}.{kind}", f"{_ATTENTION}{source}_proj.{kind}", kind="attention")
        for target, source in (("q", "q"), ("k", "k"), ("v", "v"), ("out", "o"))
        for kind in ("weight", "bias")
    ),
    *(
        rule
        for target in ("", "shared.")
        for rule in _halved(target, _SHARED + "input_linear.weight", _SHARED + "output_linear.weight")
    ),
    # Experts as the hub has them, as transformers names them in memory, and as MLX tools stack them.
    *_halved("experts.", _MOE + "input_linear.weight", _MOE + "output_linear.weight"),
    *_halved("experts.", _MOE + "experts.gate_up_proj", _MOE + "experts.down_proj"),
    *(Weight(f"{_MLP}experts.{part}.weight", f"{_MOE}switch_mlp.{part}_proj.weight") for part in _PARTS),
    Weight(_MLP + "router.weight", _MOE + "router.layer.weight"),
    Weight(_MLP + "router.weight", _MOE + "router.weight"),
    *(Weight(f"{_MLP}{part}.weight", f"{_MLP}{part}_proj.weight") for part in _PARTS),  # MLX tools, dense
)
_KINDS = {"mamba": "linear_attention", "attention": "full_attention"}  # the hub's names -> transformers'
_SUPPORTED = {
    "hidden_act": ("silu",),
    "normalization_function": ("rmsnorm", None),
    "position_embedding_type": ("rope", "nope", None),
    "mlp_bias": (False, None),
}


def spec(config: Config) -> ModelSpec:
    """The description of a checkpoint with this config.json."""
    only(config, _SUPPORTED)
    norm, kinds = NormSpec(float(given(config, "rms_norm_eps", 1e-6))), _layer_kinds(config)
    mixers: dict[str, MixerSpec] = {"full_attention": _attention(config)}
    if "linear_attention" in kinds:
        mixers["linear_attention"] = expanded(config, norm.eps)
    added, mlp = _factor(config, "residual_multiplier"), _feed_forward(config)
    blend = None if added == 1.0 else BlendSpec(None, added)
    return ModelSpec(
        family="granitemoehybrid",
        vocab=need(config, "vocab_size"),
        width=need(config, "hidden_size"),
        layers=tuple(LayerSpec(mixers[kind], mlp, norm, mixer_blend=blend, mlp_blend=blend) for kind in kinds),
        norm=norm,
        tied=given(config, "tie_word_embeddings", False),
        context=given(config, "max_position_embeddings", 2048),
        embed_factor=_factor(config, "embedding_multiplier"),
        logit_factor=1 / _factor(config, "logits_scaling"),
    )


def _factor(config: Config, key: str) -> float:
    return float(given(config, key, 1.0))


def _layer_kinds(config: Config) -> list[str]:
    """linear_attention or full_attention for each layer."""
    count, named = need(config, "num_hidden_layers"), config.get("layers_block_type")
    kinds = [_KINDS.get(kind, kind) for kind in given(config, "layer_types", named) or need(config, "layer_types")]
    if len(kinds) != count or not set(kinds) <= set(_KINDS.values()):
        raise CheckpointError(f"config.json: layer_types must name mamba or attention {count} times.")
    return kinds


def _attention(config: Config) -> AttentionSpec:
    heads, bias = need(config, "num_attention_heads"), given(config, "attention_bias", False)
    head_dim = given(config, "head_dim", need(config, "hidden_size") // heads)
    return AttentionSpec(
        heads=heads,
        kv_heads=given(config, "num_key_value_heads", heads),
        head_dim=head_dim,
        scale=_factor(config, "attention_multiplier"),
        rope=_rope(config, head_dim) if config.get("position_embedding_type") == "rope" else None,
        qkv_bias=bias,
        out_bias=bias,
    )


def _rope(config: Config, head_dim: int) -> RopeSpec:
    rope = given(config, "rope_parameters", given(config, "rope_scaling", {}))
    default_rope(rope)
    for place in (config, rope):
        only(place, {"partial_rotary_factor": (1.0, None)})
    return RopeSpec(head_dim, float(given(rope, "rope_theta", given(config, "rope_theta", 10000.0))))


def _feed_forward(config: Config) -> FeedForwardSpec:
    shared, experts = given(config, "shared_intermediate_size", 1024), config.get("num_local_experts", 8)
    if not experts:
        return MlpSpec(shared)
    return MoeSpec(
        experts=experts,
        active=given(config, "num_experts_per_tok", 2),
        hidden=need(config, "intermediate_size"),
        shared=shared,
    )
