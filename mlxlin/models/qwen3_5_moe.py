"""Qwen3.5, 3.6 and 3.8 with a mixture of experts in every layer; the text part of multimodal checkpoints too."""

from __future__ import annotations

from mlxlin.models import qwen_layout
from mlxlin.models.config import Config, need, only
from mlxlin.models.spec import ModelSpec

SERVES = (("qwen3_5_moe", None), ("qwen3_5_moe_text", None))
PREFIXES = qwen_layout.PREFIXES
DROPS = qwen_layout.DROPS
WEIGHTS = (*qwen_layout.SHARED_WEIGHTS, *qwen_layout.SPLIT_WEIGHTS, *qwen_layout.MOE_WEIGHTS)


def spec(config: Config) -> ModelSpec:
    """The description of a checkpoint with this config.json."""
    text = qwen_layout.text_config(config)
    only(text, {"norm_topk_prob": (True,), "mlp_only_layers": (None, [])})
    return qwen_layout.model("qwen3_5_moe", text, [qwen_layout.mixture(text)] * need(text, "num_hidden_layers"))
