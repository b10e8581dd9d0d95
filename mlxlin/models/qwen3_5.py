"""Qwen3.5, 3.6 and 3.8, dense: gated delta net layers with gated softmax attention between them.

Also reads the text part of the multimodal checkpoints, and what MLX tools made of them.
"""

from __future__ import annotations

from mlxlin.models import qwen_layout
from mlxlin.models.common_layout import mlp_weights
from mlxlin.models.config import Config, need
from mlxlin.models.spec import MlpSpec, ModelSpec

SERVES = (("qwen3_5", None), ("qwen3_5_text", None))
PREFIXES = qwen_layout.PREFIXES
DROPS = qwen_layout.DROPS

WEIGHTS = (*qwen_layout.SHARED_WEIGHTS, *qwen_layout.SPLIT_WEIGHTS, *mlp_weights())


def spec(config: Config) -> ModelSpec:
    """The description of a checkpoint with this config.json."""
    text = qwen_layout.text_config(config)
    mlp = MlpSpec(need(text, "intermediate_size"))
    return qwen_layout.model("qwen3_5", text, [mlp] * need(text, "num_hidden_layers"))
