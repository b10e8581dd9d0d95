"""What Kimi Linear and Ling 3 have in common: delta attention, latent attention and grouped routing."""

from __future__ import annotations

from collections.abc import Sequence

from mlxlin.models.common_layout import MIXER, MLP, single_expert_weights, stacked_expert_weights
from mlxlin.models.config import Config, either, given, layer_kinds, need
from mlxlin.models.rules import Weight
from mlxlin.models.spec import (
    DecaySpec,
    FeedForwardSpec,
    LatentSpec,
    LayerSpec,
    LinearSpec,
    MixerSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    NormSpec,
    OutputSpec,
    RopeSpec,
)
from mlxlin.models.values import (
    COLUMNS_OF_HEADS,
    CONCAT,
    CONV,
    FLAT,
    KEYS_OF_HEADS,
    ROWS_OF_HEADS,
    VALUES_OF_HEADS,
)


def delta_weights(attention: str, out: str) -> tuple[Weight, ...]:
    """Kimi delta attention under the module name `attention`; `out` is its output projection."""
    projections = tuple(f"{attention}{p}_proj.weight" for p in "qkv")
    convolutions = tuple(f"{attention}{p}_conv1d.weight" for p in "qkv")
    named = {"beta.weight": "b_proj.weight", "norm.weight": "o_norm.weight", "out.weight": out}
    return (
        Weight(MIXER + "qkv.weight", projections, CONCAT, kind="linear"),
        Weight(MIXER + "conv.weight", convolutions, CONV, kind="linear"),
        Weight(MIXER + "A_log", attention + "A_log", FLAT, kind="linear"),
        Weight(MIXER + "dt_bias", attention + "dt_bias", FLAT, kind="linear"),
        *(Weight(MIXER + target, attention + source, kind="linear") for target, source in named.items()),
    )


def latent_weights(attention: str, out: str) -> tuple[Weight, ...]:
    """Multi-head latent attention under the module name `attention`; `out` is its output projection."""
    named = {
        "q.weight": ("q_proj.weight", "q_b_proj.weight"),
        "q_in.weight": ("q_a_proj.weight",),
        "q_norm.weight": ("q_a_layernorm.weight",),
        "kv.weight": ("kv_a_proj_with_mqa.weight",),
        "kv_norm.weight": ("kv_a_layernorm.weight",),
        "out.weight": (out,),
    }
    return (
        *(Weight(MIXER + t, attention + source, kind="latent") for t, sources in named.items() for source in sources),
        Weight(MIXER + "keys.weight", attention + "kv_b_proj.weight", KEYS_OF_HEADS, kind="latent"),
        Weight(MIXER + "values.weight", attention + "kv_b_proj.weight", VALUES_OF_HEADS, kind="latent"),
        # as MLX tools write them: one matrix per head, that of the keys moved to the query's side
        Weight(MIXER + "keys.weight", attention + "embed_q.weight", COLUMNS_OF_HEADS, kind="latent"),
        Weight(MIXER + "values.weight", attention + "unembed_out.weight", ROWS_OF_HEADS, kind="latent"),
    )


def mixture_weights(moe: str, gate: str, up: str, down: str) -> tuple[Weight, ...]:
    """A mixture of experts under the module name `moe`, whose experts' projections have the given names."""
    return (
        Weight(MLP + "router.weight", moe + "gate.weight"),
        *single_expert_weights(moe, gate, up, down),
        *stacked_expert_weights(moe),
        *(Weight(f"{MLP}shared.{p}.weight", f"{moe}shared_experts.{p}_proj.weight") for p in ("gate", "up", "down")),
    )


def delta_model(
    family: str,
    config: Config,
    *,
    norm: NormSpec,
    delta: LinearSpec,
    latent: LatentSpec,
    derived_kinds: Sequence[str],
    dense_first: int,
    context: int,
) -> ModelSpec:
    """The whole decoder: delta attention and latent attention, `derived_kinds` where the config has no layer types.

    `dense_first`, `context`: the family's defaults.
    """
    mixers: dict[str, MixerSpec] = {"linear_attention": delta, "full_attention": latent}
    kinds = layer_kinds(config, derived_kinds)
    mlps = feed_forwards(config, given(config, "first_k_dense_replace", dense_first, zero=True))
    return ModelSpec(
        family=family,
        vocab=need(config, "vocab_size"),
        width=need(config, "hidden_size"),
        layers=tuple(LayerSpec(mixers[kind], mlp, norm) for kind, mlp in zip(kinds, mlps, strict=True)),
        norm=norm,
        tied=given(config, "tie_word_embeddings", False),
        context=either(config, "model_max_length", "max_position_embeddings", context),
    )


def delta_mixer(heads: int, dim: int, *, conv: int, decay: DecaySpec, output: OutputSpec) -> LinearSpec:
    """Kimi delta attention, with heads of `dim`."""
    return LinearSpec(
        rule="kda",
        heads=heads,
        value_heads=heads,
        key_dim=dim,
        value_dim=dim,
        scale=dim**-0.5,
        output=output,
        conv=conv,
        qk_activation="silu",
        v_activation="silu",
        qk_norm="l2",
        decay=decay,
        beta=1.0,
    )


def latent_mixer(config: Config, *, rope: RopeSpec | None, gate: bool) -> LatentSpec:
    """The latent attention layers."""
    plain, rotary = need(config, "qk_nope_head_dim"), need(config, "qk_rope_head_dim")
    return LatentSpec(
        heads=need(config, "num_attention_heads"),
        plain_dim=plain,
        rotary_dim=rotary,
        value_dim=need(config, "v_head_dim"),
        kv_rank=need(config, "kv_lora_rank"),
        scale=(plain + rotary) ** -0.5,
        q_rank=given(config, "q_lora_rank", 0),
        rope=rope,
        gate=gate,
    )


def feed_forwards(config: Config, dense_first: int) -> list[FeedForwardSpec]:
    """Dense parts in the first layers, mixtures in the others, unless `mlp_layer_types` says otherwise.

    Keys have two spellings, the hub's and transformers'.
    """
    count = need(config, "num_hidden_layers")
    derived = ["dense" if i < dense_first else "sparse" for i in range(count)]
    kinds = layer_kinds(config, derived, ("dense", "sparse"), "mlp_layer_types")
    dense = MlpSpec(need(config, "intermediate_size"))
    return [dense if kind == "dense" else _mixture(config) for kind in kinds]


def _mixture(config: Config) -> MoeSpec:
    hidden = need(config, "moe_intermediate_size")
    return MoeSpec(
        experts=either(config, "num_experts", "num_local_experts"),
        active=either(config, "num_experts_per_token", "num_experts_per_tok"),
        hidden=hidden,
        score="sigmoid",
        correction=True,
        exact_router=True,
        groups=either(config, "num_expert_group", "n_group", 1),
        groups_kept=given(config, "topk_group", 1),
        normalized=either(config, "moe_renormalize", "norm_topk_prob", True),
        factor=float(need(config, "routed_scaling_factor", float)),
        shared=hidden * either(config, "num_shared_experts", "n_shared_experts", 0),
    )
