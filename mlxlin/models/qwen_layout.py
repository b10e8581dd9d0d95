"""What the Qwen hybrids (Qwen3-Next, Qwen3.5 and later) have in common: their config keys and tensor names."""

from __future__ import annotations

from collections.abc import Sequence

from mlxlin.errors import CheckpointError
from mlxlin.models.common_layout import MLP, MTP_REASON, ROTARY, single_expert_weights, stacked_expert_weights
from mlxlin.models.config import Config, given, layer_kinds, need, only, rope_settings, rotary_size
from mlxlin.models.rules import Weight
from mlxlin.models.spec import (
    AttentionSpec,
    DecaySpec,
    FeedForwardSpec,
    LayerSpec,
    LinearSpec,
    ModelSpec,
    MoeSpec,
    NormSpec,
    OutputSpec,
    RopeSpec,
)
from mlxlin.models.values import (
    CONV,
    COPY,
    GATE_OF_PAIR,
    ONE_PLUS,
    QUERY_OF_PAIR,
    Operation,
)

PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.")
DROPS = (
    (r"mtp\.|mtp_", MTP_REASON),
    (r"visual\.|vision_tower\.|vision_model\.", "vision tensors (only the text part is read)"),
    ROTARY,
)

_ATTENTION, _LINEAR = "layers.{i}.self_attn.", "layers.{i}.linear_attn."


def attention_weight(target: str, source: str, operation: Operation = COPY) -> Weight:
    """A tensor of a softmax attention layer."""
    return Weight(f"layers.{{i}}.mixer.{target}", _ATTENTION + source, operation, kind="attention")


def linear_weight(target: str, source: str, operation: Operation = COPY) -> Weight:
    """A tensor of a gated delta net layer."""
    return Weight(f"layers.{{i}}.mixer.{target}", _LINEAR + source, operation, kind="linear")


SHARED_WEIGHTS = (
    Weight("embed.weight", "embed_tokens.weight"),
    Weight("norm.weight", "norm.weight", ONE_PLUS),
    Weight("head.weight", "lm_head.weight"),
    Weight("layers.{i}.mixer_norm.weight", "layers.{i}.input_layernorm.weight", ONE_PLUS),
    Weight("layers.{i}.mlp_norm.weight", "layers.{i}.post_attention_layernorm.weight", ONE_PLUS),
    *(
        attention_weight(f"{target}.{kind}", f"{source}_proj.{kind}", operation)
        for target, source, operation in (
            ("q", "q", QUERY_OF_PAIR),
            ("gate", "q", GATE_OF_PAIR),
            ("k", "k", COPY),
            ("v", "v", COPY),
            ("out", "o", COPY),
        )
        for kind in ("weight", "bias")
    ),
    attention_weight("q_norm.weight", "q_norm.weight", ONE_PLUS),
    attention_weight("k_norm.weight", "k_norm.weight", ONE_PLUS),
    linear_weight("conv.weight", "conv1d.weight", CONV),
    linear_weight("A_log", "A_log"),
    linear_weight("dt_bias", "dt_bias"),
    linear_weight("norm.weight", "norm.weight"),
    linear_weight("out.weight", "out_proj.weight"),
)
MOE_WEIGHTS = (
    Weight(MLP + "router.weight", MLP + "gate.weight"),
    *stacked_expert_weights(MLP),
    *single_expert_weights(MLP, "gate_proj", "up_proj", "down_proj"),
    *(Weight(f"{MLP}shared.{p}.weight", f"{MLP}shared_expert.{p}_proj.weight") for p in ("gate", "up", "down")),
    Weight(MLP + "shared_gate.weight", MLP + "shared_expert_gate.weight"),
)
# The projections of a gated delta net layer as Qwen3.5 stores them.
SPLIT_WEIGHTS = (
    linear_weight("qkv.weight", "in_proj_qkv.weight"),
    linear_weight("gate.weight", "in_proj_z.weight"),
    linear_weight("beta.weight", "in_proj_b.weight"),
    linear_weight("decay.weight", "in_proj_a.weight"),
)


def text_config(config: Config) -> Config:
    """The language model's part of a config, with tied embeddings where either level says so."""
    text = given(config, "text_config", config, dict)
    tied = bool(given(text, "tie_word_embeddings", False) or given(config, "tie_word_embeddings", False))
    return {**text, "tie_word_embeddings": tied}


def layer_types(config: Config) -> list[str]:
    """One of linear_attention and full_attention for each layer; `layer_types` decides, else the interval.

    Raises:
        CheckpointError: the two contradict each other, or the list does not fit.
    """
    count, interval = need(config, "num_hidden_layers"), config.get("full_attention_interval")
    every = given(config, "full_attention_interval", 4)
    derived = ["full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(count)]
    types = layer_kinds(config, derived)
    if interval is not None and types != derived:
        raise CheckpointError(f"config.json: layer_types contradicts full_attention_interval = {interval}.")
    return types


def linear_mixer(config: Config) -> LinearSpec:
    """The gated delta net layers."""
    key_dim = need(config, "linear_key_head_dim")
    return LinearSpec(
        rule="gated_delta",
        heads=need(config, "linear_num_key_heads"),
        value_heads=need(config, "linear_num_value_heads"),
        key_dim=key_dim,
        value_dim=need(config, "linear_value_head_dim"),
        scale=key_dim**-0.5,
        output=OutputSpec(NormSpec(_eps(config)), gate="silu"),
        conv=given(config, "linear_conv_kernel_dim", 4),
        qk_activation="silu",
        v_activation="silu",
        qk_norm="l2",
        decay=DecaySpec("softplus"),
        beta=1.0,
    )


def attention_mixer(config: Config) -> AttentionSpec:
    """The softmax attention layers."""
    heads, bias = need(config, "num_attention_heads"), given(config, "attention_bias", False)
    head_dim = given(config, "head_dim", 256)
    return AttentionSpec(
        heads=heads,
        kv_heads=given(config, "num_key_value_heads", heads),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=_rope(config, head_dim),
        qk_norm="head",
        eps=_eps(config),
        gate=True,
        qkv_bias=bias,
        out_bias=bias,
    )


def mixture(config: Config) -> MoeSpec:
    """The mixture of experts of one layer."""
    return MoeSpec(
        experts=need(config, "num_experts"),
        active=need(config, "num_experts_per_tok"),
        hidden=need(config, "moe_intermediate_size"),
        normalized=given(config, "norm_topk_prob", True),
        shared=need(config, "shared_expert_intermediate_size"),
        shared_gate=True,
    )


def _rope(config: Config, head_dim: int) -> RopeSpec:
    # Sections of multimodal positions: text has one position, for which they make no difference.
    rope, base = rope_settings(config, 10000.0, ignored=("mrope_section", "mrope_interleaved"))
    share = given(config, "partial_rotary_factor", 0.25)
    return RopeSpec(rotary_size(rope, head_dim, share), base)


def _eps(config: Config) -> float:
    return float(given(config, "rms_norm_eps", 1e-6))


def model(family: str, config: Config, mlp: Sequence[FeedForwardSpec]) -> ModelSpec:
    """The whole decoder, with one feed-forward part for each layer."""
    only(config, {"hidden_act": ("silu",), "use_sliding_window": (False, None), "sliding_window": (None,)})
    mixers: dict[str, LinearSpec | AttentionSpec] = {
        "linear_attention": linear_mixer(config),
        "full_attention": attention_mixer(config),
    }
    norm = NormSpec(_eps(config))
    layers = [LayerSpec(mixers[t], part, norm) for t, part in zip(layer_types(config), mlp, strict=True)]
    return ModelSpec(
        family=family,
        vocab=need(config, "vocab_size"),
        width=need(config, "hidden_size"),
        layers=tuple(layers),
        norm=norm,
        tied=config["tie_word_embeddings"],
        context=given(config, "max_position_embeddings", 32768),
    )
