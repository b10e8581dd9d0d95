"""Granite 4: Mamba-2 layers with a few of softmax attention, dense or with experts, scaled for muP (IBM).

The feed-forward part that all tokens share is the only one of the dense models.
"""

from __future__ import annotations

from dataclasses import replace

from mlxlin.errors import CheckpointError
from mlxlin.models.common_layout import (
    LAYER,
    MLP,
    ROTARY,
    attention_weights,
    frame_weights,
    grouped_attention,
    head_dim,
    mlp_weights,
    stacked_expert_weights,
    whole_rope,
)
from mlxlin.models.config import Config, given, need, nullable, only
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
)
from mlxlin.models.values import FIRST_HALF, SECOND_HALF

SERVES = (("granitemoehybrid", None),)
PREFIXES = ("model.",)
DROPS = (ROTARY,)

_MOE, _SHARED = LAYER + "block_sparse_moe.", LAYER + "shared_mlp."


def _halved(target: str, source: str) -> tuple[Weight, ...]:
    """A feed-forward part whose gate and up projection are the halves of one matrix."""
    return (
        Weight(f"{MLP}{target}gate.weight", source + "input_linear.weight", FIRST_HALF),
        Weight(f"{MLP}{target}up.weight", source + "input_linear.weight", SECOND_HALF),
        Weight(f"{MLP}{target}down.weight", source + "output_linear.weight"),
    )


WEIGHTS = (
    *frame_weights(),
    *mixer_weights(LAYER + "mamba."),
    *attention_weights(),
    *_halved("", _SHARED),
    *_halved("shared.", _SHARED),
    *_halved("experts.", _MOE),  # as the hub has them
    *stacked_expert_weights(_MOE),
    Weight(MLP + "router.weight", _MOE + "router.layer.weight"),
    Weight(MLP + "router.weight", _MOE + "router.weight"),
    *mlp_weights(),  # of dense models, as MLX tools write it
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
    count, named = need(config, "num_hidden_layers"), given(config, "layers_block_type", None, list[str])
    stated = given(config, "layer_types", named, list[str]) or need(config, "layer_types", list[str])
    kinds = [_KINDS.get(kind, kind) for kind in stated]
    if len(kinds) != count or not set(kinds) <= set(_KINDS.values()):
        raise CheckpointError(f"config.json: layer_types must name mamba or attention {count} times.")
    return kinds


def _attention(config: Config) -> AttentionSpec:
    dim = head_dim(config)
    rope = whole_rope(config, dim, 10000.0) if config.get("position_embedding_type") == "rope" else None
    return replace(grouped_attention(config, dim, rope), scale=_factor(config, "attention_multiplier"))


def _feed_forward(config: Config) -> FeedForwardSpec:
    shared = given(config, "shared_intermediate_size", 1024, zero=True)
    experts = nullable(config, "num_local_experts", 8, zero=True)
    if not experts:
        return MlpSpec(shared)
    return MoeSpec(
        experts=experts,
        active=given(config, "num_experts_per_tok", 2),
        hidden=need(config, "intermediate_size"),
        shared=shared,
    )
