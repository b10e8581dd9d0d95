"""Hybrids of delta attention and latent attention: Kimi Linear and Ling 3."""

from __future__ import annotations

from typing import Any

from tests.parity.cases.case import Case, Sizes


def _latent(size: Sizes) -> dict[str, Any]:
    return {
        "vocab_size": size(64, 131),
        "hidden_size": size(32, 64, 80),
        "intermediate_size": size(40, 88),
        "moe_intermediate_size": size(8, 24),
        "num_hidden_layers": 4,
        "num_attention_heads": size(4, 2),
        "kv_lora_rank": size(12, 16),
        "qk_nope_head_dim": size(12, 8),
        "qk_rope_head_dim": size(8, 4),
        "v_head_dim": size(8, 16),
        "num_experts_per_tok": size(2, 3),
        "routed_scaling_factor": 1.7,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _kimi(size: Sizes, **more: Any) -> dict[str, Any]:
    linear = {"linear_head_dim": size(12, 16), "linear_num_heads": size(3, 2), "num_local_experts": size(6, 9)}
    return {**_latent(size), **linear, "first_k_dense_replace": 1, **more}


def _ling(size: Sizes, **more: Any) -> dict[str, Any]:
    experts = {"num_local_experts": 8, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 2}
    return {
        **_latent(size),
        **experts,
        "head_dim": size(12, 16),
        "layer_group_size": 4,
        "kda_lower_bound": -0.8,
        **more,
    }


_ONE_FULL = ["linear_attention"] * 3 + ["full_attention"]


CASES = {
    "kimi_linear": Case("transformers", "KimiLinear", lambda size: _kimi(size, layer_types=_ONE_FULL)),
    "kimi_linear-ranks": Case(
        "transformers",
        "KimiLinear",
        lambda size: _kimi(
            size, layer_types=_ONE_FULL[::-1], q_lora_rank=size(10, 16), n_group=3, topk_group=2, norm_topk_prob=False
        ),
    ),
    "bailing_hybrid": Case("transformers", "BailingHybrid", _ling),
    "bailing_hybrid-ranks": Case(
        "transformers",
        "BailingHybrid",
        lambda size: _ling(size, q_lora_rank=size(10, 16), kda_safe_gate=False, layer_group_size=2),
    ),
}
