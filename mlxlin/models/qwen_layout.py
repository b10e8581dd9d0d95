"""What the Qwen hybrids (Qwen3-Next, Qwen3.5 and later) have in common: their config keys and tensor names."""

from __future__ import annotations

from collections.abc import Sequence

from mlxlin.errors import CheckpointError
from mlxlin.models.config import Config, default_rope, given, need, only
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
    FIRST_HALF,
    GATE_OF_PAIR,
    ONE_PLUS,
    QUERY_OF_PAIR,
    SECOND_HALF,
    STACK,
    Operation,
)

PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.")
DROPS = (
    (r"mtp\.|mtp_", "MTP tensors (multi-token prediction head)"),
    (r"visual\.|vision_tower\.|vision_model\.", "vision tensors (only the text part is read)"),
    (r".*rotary_emb\.inv_freq$", "rotary frequencies (computed)"),
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
# A mixture's experts: each by itself, all in one tensor, or as MLX tools stack them.
MOE_WEIGHTS = (
    Weight("layers.{i}.mlp.router.weight", "layers.{i}.mlp.gate.weight"),
    Weight("layers.{i}.mlp.shared_gate.weight", "layers.{i}.mlp.shared_expert_gate.weight"),
    *(
        rule
        for part, half in (("gate", FIRST_HALF), ("up", SECOND_HALF))
        for rule in (
            Weight(f"layers.{{i}}.mlp.experts.{part}.weight", "layers.{i}.mlp.experts.gate_up_proj", half),
            Weight(f"layers.{{i}}.mlp.shared.{part}.weight", f"layers.{{i}}.mlp.shared_expert.{part}_proj.weight"),
        )
    ),
    Weight("layers.{i}.mlp.experts.down.weight", "layers.{i}.mlp.experts.down_proj"),
    Weight("layers.{i}.mlp.shared.down.weight", "layers.{i}.mlp.shared_expert.down_proj.weight"),
    *(
        rule
        for part in ("gate", "up", "down")
        for rule in (
            Weight(
                f"layers.{{i}}.mlp.experts.{part}.weight", f"layers.{{i}}.mlp.experts.{{e}}.{part}_proj.weight", STACK
            ),
            Weight(f"layers.{{i}}.mlp.experts.{part}.weight", f"layers.{{i}}.mlp.switch_mlp.{part}_proj.weight"),
        )
    ),
)
# The projections of a gated delta net layer as Qwen3.5 stores them.
SPLIT_WEIGHTS = (
    linear_weight("qkv.weight", "in_proj_qkv.weight"),
    linear_weight("gate.weight", "in_proj_z.weight"),
    linear_weight("beta.weight", "in_proj_b.weight"),
    linear_weight("decay.weight", "in_proj_a.weight"),
)
MLP_WEIGHTS = tuple(
    Weight(f"layers.{{i}}.mlp.{part}.weight", f"layers.{{i}}.mlp.{part}_proj.weight") for part in ("gate", "up", "down")
)


def text_config(config: Config) -> Config:
    """The language model's part of a config, with tied embeddings where either level says so."""
    text = config.get("text_config", config)
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
    types = given(config, "layer_types", derived)
    if len(types) != count or not set(types) <= {"linear_attention", "full_attention"}:
        raise CheckpointError(f"config.json: layer_types must name linear_attention or full_attention {count} times.")
    if interval is not None and types != derived:
        raise CheckpointError(f"config.json: layer_types contradicts full_attention_interval = {interval}.")
    return list(types)


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
    rope = given(config, "rope_parameters", given(config, "rope_scaling", {}))
    # Sections of multimodal positions: text has one position, for which they make no difference.
    default_rope(rope, ignored=("mrope_section", "mrope_interleaved"))
    share = given(rope, "partial_rotary_factor", given(config, "partial_rotary_factor", 0.25))
    base = given(rope, "rope_theta", given(config, "rope_theta", 10000.0))
    return RopeSpec(int(head_dim * share), float(base))


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
