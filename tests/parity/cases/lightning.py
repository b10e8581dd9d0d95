"""Hybrids of lightning attention: Ring 2.0 and Ling 2.5 of inclusionAI, and MiniMax."""

from __future__ import annotations

from typing import Any

from tests.parity.cases.case import Case, Sizes


def _bailing(size: Sizes, **more: Any) -> dict[str, Any]:
    """Ring 2.0 linear and what Ling 2.5 has of it; mlx-lm wants heads x head_dim to be the width."""
    width, heads, kv_heads = size((32, 4, 2), (48, 3, 1), (96, 6, 3))
    return {
        "vocab_size": size(64, 131),
        "hidden_size": width,
        "intermediate_size": size(40, 88),
        "moe_intermediate_size": size(8, 24),
        "num_hidden_layers": 4,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": width // heads,
        "layer_group_size": size(3, 2, 4),
        "group_norm_size": size(2, 4, 1),
        "partial_rotary_factor": 0.5,
        "rope_theta": 5000.0,
        "rms_norm_eps": 1e-6,
        "use_qk_norm": True,
        "num_experts": 8,
        "num_experts_per_tok": size(2, 3),
        "num_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.7,
        "score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "first_k_dense_replace": size(1, 0, 2),
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        **more,
    }


def _bailing_latent(size: Sizes, **more: Any) -> dict[str, Any]:
    width, heads, dim = size((32, 3, 12), (64, 4, 8), (40, 6, 16))
    own = {"hidden_size": width, "num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": dim}
    ranks = {"kv_lora_rank": size(12, 16), "q_lora_rank": None, "qk_rope_head_dim": dim // 2}
    dims = {"qk_nope_head_dim": size(12, 8), "v_head_dim": size(8, 16), "rope_interleave": True}
    return _bailing(size, **{**own, **ranks, **dims, **more})


def _minimax(size: Sizes, **more: Any) -> dict[str, Any]:
    return {
        "vocab_size": size(64, 131),
        "hidden_size": size(32, 64, 80),
        "intermediate_size": size(16, 24),
        "num_hidden_layers": size(3, 4),
        "num_attention_heads": size(4, 6),
        "num_key_value_heads": size(2, 1),
        "head_dim": size(12, 16, 20),
        "num_local_experts": size(4, 6),
        "block_size": size(16, 8, 128),  # only how the source computes
        "full_attn_alpha_factor": 1.3,
        "full_attn_beta_factor": 0.8,
        "linear_attn_alpha_factor": 0.9,
        "linear_attn_beta_factor": 1.2,
        "mlp_alpha_factor": 0.7,
        "mlp_beta_factor": 1.1,
        **more,
    }


CASES = {
    "bailing_moe_linear": Case("mlx-lm", "BailingMoeLinearV2", _bailing),
    "bailing_moe_linear-plain": Case(
        "mlx-lm",
        "BailingMoeLinearV2",
        lambda size: _bailing(
            size,
            num_hidden_layers=5,
            layer_group_size=2,
            use_qk_norm=False,
            n_group=1,
            topk_group=1,
            num_shared_experts=0,
            tie_word_embeddings=True,
        ),
    ),
    "bailing_moe_v2_5": Case("mlx-lm", "BailingMoeV2_5", _bailing_latent),
    "bailing_moe_v2_5-ranks": Case(
        "mlx-lm",
        "BailingMoeV2_5",
        lambda size: _bailing_latent(
            size, q_lora_rank=size(10, 16), use_qk_norm=False, num_shared_experts=2, layer_group_size=size(4, 3)
        ),
    ),
    "minimax": Case("transformers", "MiniMax", _minimax),
    "minimax-window": Case(
        "transformers",
        "MiniMax",
        lambda size: _minimax(
            size,
            num_attention_heads=size(6, 3),
            num_key_value_heads=3,
            num_hidden_layers=3,
            layer_types=["linear_attention", "full_attention", "linear_attention"],
            sliding_window=size(9, 16),
            tie_word_embeddings=True,
            num_experts_per_tok=3,
            rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        ),
    ),
}
