"""Qwen3-Next: gated delta net and gated attention layers, most with a mixture of experts."""

from __future__ import annotations

from mlxlin.models import qwen_layout
from mlxlin.models.common_layout import mlp_weights
from mlxlin.models.config import Config, given, need
from mlxlin.models.spec import FeedForwardSpec, MlpSpec, ModelSpec
from mlxlin.models.values import BETA_OF_GROUPS, DECAY_OF_GROUPS, GATE_OF_GROUPS, QKV_OF_GROUPS

SERVES = (("qwen3_next", None),)
PREFIXES = qwen_layout.PREFIXES
DROPS = qwen_layout.DROPS
WEIGHTS = (
    *qwen_layout.SHARED_WEIGHTS,
    *mlp_weights(),
    *qwen_layout.MOE_WEIGHTS,
    qwen_layout.linear_weight("qkv.weight", "in_proj_qkvz.weight", QKV_OF_GROUPS),
    qwen_layout.linear_weight("gate.weight", "in_proj_qkvz.weight", GATE_OF_GROUPS),
    qwen_layout.linear_weight("beta.weight", "in_proj_ba.weight", BETA_OF_GROUPS),
    qwen_layout.linear_weight("decay.weight", "in_proj_ba.weight", DECAY_OF_GROUPS),
)


def spec(config: Config) -> ModelSpec:
    """The description of a checkpoint with this config.json."""
    config = qwen_layout.text_config(config)
    mlps = [_feed_forward(config, index) for index in range(need(config, "num_hidden_layers"))]
    return qwen_layout.model("qwen3_next", config, mlps)


def _feed_forward(config: Config, index: int) -> FeedForwardSpec:
    every, dense = given(config, "decoder_sparse_step", 1), given(config, "mlp_only_layers", [], list[int])
    if index not in dense and given(config, "num_experts", 0) > 0 and (index + 1) % every == 0:
        return qwen_layout.mixture(config)
    return MlpSpec(need(config, "intermediate_size"))
