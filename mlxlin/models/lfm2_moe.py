"""LFM2 with a mixture of experts behind its first layers."""

from __future__ import annotations

from mlxlin.models import lfm2
from mlxlin.models.config import Config, given, need
from mlxlin.models.rules import Weight
from mlxlin.models.spec import MlpSpec, ModelSpec, MoeSpec
from mlxlin.models.values import FIRST_HALF, SECOND_HALF, STACK

SERVES = (("lfm2_moe", None),)
PREFIXES = lfm2.PREFIXES
DROPS = lfm2.DROPS

_MLP, _MOE = "layers.{i}.mlp.", "layers.{i}.feed_forward."
# Experts: each by itself, all in one tensor, or as MLX tools stack them.
WEIGHTS = (
    *lfm2.WEIGHTS,
    Weight(_MLP + "router.weight", _MOE + "gate.weight"),
    Weight(_MLP + "correction", _MOE + "expert_bias"),
    *(
        Weight(f"{_MLP}experts.{part}.weight", f"{_MOE}experts.{{e}}.{source}.weight", STACK)
        for part, source in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
    ),
    Weight(_MLP + "experts.gate.weight", _MOE + "experts.gate_up_proj", FIRST_HALF),
    Weight(_MLP + "experts.up.weight", _MOE + "experts.gate_up_proj", SECOND_HALF),
    Weight(_MLP + "experts.down.weight", _MOE + "experts.down_proj"),
    *(Weight(f"{_MLP}experts.{p}.weight", f"{_MOE}switch_mlp.{p}_proj.weight") for p in ("gate", "up", "down")),
)
_SUM_EPS = 1e-6  # fixed in the source


def spec(config: Config) -> ModelSpec:
    """The description of a checkpoint with this config.json."""
    dense, mixture = MlpSpec(need(config, "intermediate_size")), _mixture(config)
    count, first = need(config, "num_hidden_layers"), given(config, "num_dense_layers", 2)
    return lfm2.model("lfm2_moe", config, [dense if i < first else mixture for i in range(count)])


def _mixture(config: Config) -> MoeSpec:
    return MoeSpec(
        experts=need(config, "num_experts"),
        active=need(config, "num_experts_per_tok"),
        hidden=need(config, "moe_intermediate_size"),
        score="sigmoid",
        correction=given(config, "use_expert_bias", True),
        normalized=given(config, "norm_topk_prob", True),
        sum_eps=_SUM_EPS,
        factor=float(given(config, "routed_scaling_factor", 1.0)),
    )
