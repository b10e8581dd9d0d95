"""Hybrids of gated short convolutions: LFM2."""

from __future__ import annotations

from typing import Any

from tests.parity.cases.case import Case, Sizes


def _lfm2(size: Sizes, **more: Any) -> dict[str, Any]:
    kinds = [["conv", "full_attention", "conv"], ["conv", "conv", "full_attention"], ["full_attention", "conv", "conv"]]
    return {
        "vocab_size": size(64, 131),
        "hidden_size": size(32, 64, 48),
        "intermediate_size": size(80, 120),
        "block_multiple_of": size(16, 8),
        "num_hidden_layers": 3,
        "num_attention_heads": size(4, 2),
        "num_key_value_heads": size(2, 1),
        "conv_L_cache": size(3, 4, 2),
        "layer_types": size(*kinds),
        **more,
    }


def _lfm2_experts(size: Sizes, **more: Any) -> dict[str, Any]:
    own = {
        "moe_intermediate_size": size(8, 24),
        "num_experts": size(6, 8),
        "num_experts_per_tok": size(2, 3),
        "num_dense_layers": size(1, 2),
        "routed_scaling_factor": size(1.7, 1.0),
    }
    return {key: value for key, value in _lfm2(size, **own, **more).items() if key != "block_multiple_of"}


CASES = {
    "lfm2": Case("transformers", "Lfm2", _lfm2),
    "lfm2-bias": Case(
        "transformers",
        "Lfm2",
        lambda size: {
            **{key: value for key, value in _lfm2(size, conv_bias=True).items() if key != "layer_types"},
            "full_attn_idxs": [size(2, 0, 1)],
            "tie_embedding": False,
            "block_ff_dim": size(60, 100),
            "block_ffn_dim_multiplier": size(1.3, 0.7),
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        },
    ),
    "lfm2-plain": Case("transformers", "Lfm2", lambda size: _lfm2(size, block_auto_adjust_ff_dim=False)),
    "lfm2_moe": Case("transformers", "Lfm2Moe", _lfm2_experts),
    "lfm2_moe-plain": Case(
        "transformers",
        "Lfm2Moe",
        lambda size: _lfm2_experts(size, use_expert_bias=False, norm_topk_prob=False, conv_bias=True),
    ),
}
