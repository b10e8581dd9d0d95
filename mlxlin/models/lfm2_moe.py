"""LFM2 with a mixture of experts behind its first layers."""

from __future__ import annotations

from mlxlin.models import lfm2
from mlxlin.models.common_layout import LAYER, MLP, single_expert_weights, stacked_expert_weights
from mlxlin.models.config import Config, given, need
from mlxlin.models.rules import Weight
from mlxlin.models.spec import MlpSpec, ModelSpec, MoeSpec

SERVES = (("lfm2_moe", None),)
PREFIXES = lfm2.PREFIXES
DROPS = lfm2.DROPS

_MOE = LAYER + "feed_forward."
WEIGHTS = (
    *lfm2.WEIGHTS,
    Weight(MLP + "router.weight", _MOE + "gate.weight"),
    Weight(MLP + "correction", _MOE + "expert_bias"),
    *single_expert_weights(_MOE, "w1", "w3", "w2"),
    *stacked_expert_weights(_MOE),
)
_SUM_EPS = 1e-6  # fixed in the source


def spec(config: Config) -> ModelSpec:
    """The description of a checkpoint with this config.json."""
    dense, mixture = MlpSpec(need(config, "intermediate_size")), _mixture(config)
    count, first = need(config, "num_hidden_layers"), given(config, "num_dense_layers", 2, zero=True)
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
