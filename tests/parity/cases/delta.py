"""Hybrids of the gated delta rule and softmax attention: Qwen and OLMo."""

from __future__ import annotations

from typing import Any

from tests.parity.cases.case import Case, Sizes


def _qwen(size: Sizes) -> dict[str, Any]:
    return {
        "vocab_size": size(64, 131),
        "hidden_size": size(32, 64, 80),
        "intermediate_size": size(40, 88),
        "num_hidden_layers": 4,
        "num_attention_heads": size(4, 6),
        "num_key_value_heads": size(2, 1),
        "head_dim": size(16, 24),
        "linear_key_head_dim": size(12, 16, 20),
        "linear_value_head_dim": size(16, 8, 24),
        "linear_num_key_heads": size(2, 1),
        "linear_num_value_heads": size(4, 2, 6),
    }


def _experts(size: Sizes) -> dict[str, Any]:
    return {
        **_qwen(size),
        "num_experts": size(4, 8),
        "num_experts_per_tok": size(2, 3),
        "moe_intermediate_size": size(8, 24),
        "shared_expert_intermediate_size": size(12, 16),
    }


def _olmo(size: Sizes, **more: Any) -> dict[str, Any]:
    return {
        "vocab_size": size(64, 131),
        "hidden_size": size(32, 64, 96),
        "intermediate_size": size(40, 88),
        "num_hidden_layers": 4,
        "num_attention_heads": size(4, 2),
        "linear_num_key_heads": 2,
        "linear_num_value_heads": size(4, 6),
        "linear_key_head_dim": size(12, 16),
        "pad_token_id": 0,
        "eos_token_id": 1,
        **more,
    }


_NO_ROPE = {"rope_type": "default", "rope_theta": None}


CASES = {
    "qwen3_5": Case("transformers", "Qwen3_5Text", _qwen),
    "qwen3_5-layout": Case(
        "transformers",
        "Qwen3_5Text",
        lambda size: {
            **_qwen(size),
            "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"],
            "tie_word_embeddings": True,
            "attention_bias": True,
            "linear_conv_kernel_dim": size(3, 2),
        },
    ),
    "qwen3_5_moe": Case("transformers", "Qwen3_5MoeText", _experts),
    "qwen3_next": Case(
        "transformers",
        "Qwen3Next",
        lambda size: {**_experts(size), "mlp_only_layers": [1], "norm_topk_prob": size(True, False)},
    ),
    "olmo_hybrid": Case("transformers", "OlmoHybrid", lambda size: _olmo(size, rope_parameters=_NO_ROPE)),
    "olmo_hybrid-rope": Case(
        "transformers",
        "OlmoHybrid",
        lambda size: _olmo(
            size,
            rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
            linear_allow_neg_eigval=False,
            num_key_value_heads=2,
            layer_types=["full_attention", "linear_attention"] * 2,
            tie_word_embeddings=True,
        ),
    ),
}
