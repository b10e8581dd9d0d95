"""What Kimi Linear and Ling 3 have in common: delta attention, latent attention and grouped routing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlxlin.errors import CheckpointError
from mlxlin.models.config import Config, given, need
from mlxlin.models.rules import Weight
from mlxlin.models.spec import FeedForwardSpec, LatentSpec, MlpSpec, MoeSpec, RopeSpec
from mlxlin.models.values import (
    COLUMNS_OF_HEADS,
    CONCAT,
    CONV,
    FIRST_HALF,
    FLAT,
    KEYS_OF_HEADS,
    ROWS_OF_HEADS,
    SECOND_HALF,
    STACK,
    VALUES_OF_HEADS,
)

LAYER, MIXER = "layers.{i}.", "layers.{i}.mixer."


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
    stored = {"gate": gate, "up": up, "down": down}
    return (
        Weight(LAYER + "mlp.router.weight", moe + "gate.weight"),
        *(Weight(f"{LAYER}mlp.experts.{p}.weight", f"{moe}experts.{{e}}.{n}.weight", STACK) for p, n in stored.items()),
        Weight(LAYER + "mlp.experts.gate.weight", moe + "experts.gate_up_proj", FIRST_HALF),
        Weight(LAYER + "mlp.experts.up.weight", moe + "experts.gate_up_proj", SECOND_HALF),
        Weight(LAYER + "mlp.experts.down.weight", moe + "experts.down_proj"),
        *(Weight(f"{LAYER}mlp.experts.{p}.weight", f"{moe}switch_mlp.{p}_proj.weight") for p in stored),
        *(Weight(f"{LAYER}mlp.shared.{p}.weight", f"{moe}shared_experts.{p}_proj.weight") for p in stored),
    )


MLP_WEIGHTS = tuple(Weight(f"{LAYER}mlp.{p}.weight", f"{LAYER}mlp.{p}_proj.weight") for p in ("gate", "up", "down"))


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
    kinds = given(config, "mlp_layer_types", ["dense" if i < dense_first else "sparse" for i in range(count)])
    if len(kinds) != count or not set(kinds) <= {"dense", "sparse"}:
        raise CheckpointError(f"config.json: mlp_layer_types must name dense or sparse {count} times.")
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
        factor=float(need(config, "routed_scaling_factor")),
        shared=hidden * either(config, "num_shared_experts", "n_shared_experts", 0),
    )


def either(config: Config, one: str, other: str, default: Any = None) -> Any:
    """The value of a key with two spellings."""
    value = given(config, one, given(config, other, default))
    return need(config, one) if value is None else value


def layer_kinds(config: Config, derived: Sequence[str]) -> list[str]:
    """linear_attention or full_attention for each layer: `layer_types` where it is given, else `derived`."""
    kinds = given(config, "layer_types", list(derived))
    if len(kinds) != need(config, "num_hidden_layers") or not set(kinds) <= {"linear_attention", "full_attention"}:
        raise CheckpointError("config.json: layer_types must name linear_attention or full_attention for each layer.")
    return list(kinds)
