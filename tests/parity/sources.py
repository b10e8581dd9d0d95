"""Tiny random checkpoints written by the source implementations, with what those compute for them.

Runs where torch, transformers and (for the fla cases, in a process of its own) flash-linear-attention are installed:

    MLXLIN_FLA=<folder with fla> python -m tests.parity.sources FOLDER CASE... [--seed N] [--vary]

FOLDER/CASE then holds config.json and model.safetensors as the source saves them, and golden.safetensors: `ids` [2, T]
padded on the right, `lengths` [2], `logits` [2, T, vocab] of each row alone, `greedy` (prompt and continuation of the
first row), and the recurrent matrix `layers.N.S` [2, HV, V, K] behind each row. `--vary` draws other sizes.
"""

from __future__ import annotations

import argparse
import functools
import os
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LENGTHS = (71, 38)
GREEDY_PROMPT, GREEDY_NEW = 21, 12
# How far logits may move when the embeddings move by float32's rounding. Random weights are drawn again until they move
# less: a norm of a nearly vanishing vector, or two experts that score alike, make two correct float32 programs differ.
WELL_CONDITIONED, DRAWS = 1e-5, 100


class Sizes:
    """Numbers of a case: the first choice for a fixture, any of them for a live comparison."""

    def __init__(self, rng: random.Random | None) -> None:
        self._rng = rng

    def __call__(self, *choices: Any) -> Any:
        return choices[0] if self._rng is None else self._rng.choice(choices)


@dataclass(frozen=True)
class Case:
    """A source model: `model` is the prefix of its Config and ForCausalLM classes.

    The source mlx-lm stands for two programs that have to agree, see `tests.parity.bailing_oracle`.

    v_first: whether the source keeps recurrent matrices [B, H, V, K] instead of [B, H, K, V].
    """

    source: str
    model: str
    config: Callable[[Sizes], dict[str, Any]]
    v_first: bool = False


def _fla(model: str, v_first: bool = False, **fixed: Callable[[Sizes], Any] | Any) -> Case:
    def config(size: Sizes) -> dict[str, Any]:
        base = {
            "hidden_size": size(32, 64, 80),
            "num_hidden_layers": size(2, 3),
            "vocab_size": size(64, 131),
            "intermediate_size": size(40, 88),
        }
        return {**base, **{key: value(size) if callable(value) else value for key, value in fixed.items()}}

    return Case("fla", model, config, v_first)


def _hybrid(**more: Any) -> Callable[[Sizes], Any]:
    return lambda size: {"layers": [1], "num_heads": 4, "num_kv_heads": size(2, 1, 4), **more}


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


def _granite(size: Sizes, **more: Any) -> dict[str, Any]:
    width, heads = size((32, 4), (48, 6), (48, 4))
    return {
        "vocab_size": size(64, 131),
        "hidden_size": width,
        "intermediate_size": size(12, 24),
        "shared_intermediate_size": size(20, 40),
        "num_hidden_layers": 3,
        "num_attention_heads": size(4, 2),
        "num_key_value_heads": size(2, 1),
        "layer_types": size(["mamba", "attention", "mamba"], ["attention", "mamba", "mamba"]),
        "num_local_experts": size(6, 8),
        "num_experts_per_tok": size(2, 3),
        "embedding_multiplier": size(3.0, 0.5),
        "residual_multiplier": size(0.6, 0.8),
        "attention_multiplier": size(0.2, 0.4),
        "logits_scaling": size(3.0, 0.7),
        "mamba_n_heads": heads,
        "mamba_n_groups": size(2, 1),
        "mamba_d_state": size(12, 16),
        "mamba_chunk_size": size(16, 32),
        **more,
    }


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


def _mamba(size: Sizes, **more: Any) -> dict[str, Any]:
    width, head_dim, expand = size(32, 64, 96), size(8, 16), size(2, 1)
    return {
        "vocab_size": size(64, 131),
        "hidden_size": width,
        "num_hidden_layers": size(2, 3),
        "num_heads": width * expand // head_dim,
        "head_dim": head_dim,
        "expand": expand,
        "state_size": size(12, 16, 24),
        "n_groups": 2,
        "chunk_size": size(16, 32),
        **more,
    }


def _bamba(size: Sizes, **more: Any) -> dict[str, Any]:
    width, heads = size(32, 48), size(8, 4)
    return {
        "vocab_size": size(64, 131),
        "hidden_size": width,
        "intermediate_size": size(40, 88),
        "num_hidden_layers": size(3, 4),
        "num_attention_heads": size(2, 4),
        "num_key_value_heads": size(1, 2),
        "attn_layer_indices": [1],
        "mamba_n_heads": heads,
        "mamba_d_state": size(12, 16, 24),
        "mamba_n_groups": size(2, 4),
        "mamba_chunk_size": size(16, 32),
        **more,
    }


def _nemotron(size: Sizes, kinds: list[str], **more: Any) -> dict[str, Any]:
    return {
        "vocab_size": size(64, 131),
        "hidden_size": size(32, 48, 64),
        "intermediate_size": size(40, 88),
        "layers_block_type": kinds,
        "num_attention_heads": size(4, 2),
        "num_key_value_heads": size(2, 1),
        "head_dim": size(12, 16),
        "mamba_num_heads": size(6, 4),
        "mamba_head_dim": size(8, 12),
        "ssm_state_size": size(12, 16),
        "n_groups": 2,
        "chunk_size": size(16, 32),
        # the source keeps time steps above the second of these, NVIDIA's own code within the first
        "time_step_limit": (0.05, float("inf")),
        "time_step_min": 0.05,
        "n_routed_experts": 8,
        "num_experts_per_tok": size(2, 3),
        "moe_intermediate_size": size(8, 24),
        "moe_shared_expert_intermediate_size": size(20, 16),
        "routed_scaling_factor": size(1.7, 2.5),
        **more,
    }


def _falcon(size: Sizes, **more: Any) -> dict[str, Any]:
    heads, head_dim = size(6, 4), size(8, 12)
    return {
        "vocab_size": size(64, 131),
        "hidden_size": size(32, 48),
        "intermediate_size": size(40, 88),
        "num_hidden_layers": size(2, 3),
        "num_attention_heads": size(4, 2),
        "num_key_value_heads": size(2, 1),
        "head_dim": size(12, 16),
        "mamba_d_ssm": heads * head_dim,
        "mamba_n_heads": heads,
        "mamba_d_head": head_dim,
        "mamba_d_state": size(12, 16, 24),
        "mamba_n_groups": 2,
        "mamba_chunk_size": size(16, 32),
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": False,
        "embedding_multiplier": 1.7,
        "lm_head_multiplier": 0.6,
        "key_multiplier": 0.7,
        "attention_in_multiplier": 1.3,
        "attention_out_multiplier": 0.8,
        "ssm_in_multiplier": 1.2,
        "ssm_out_multiplier": 0.9,
        "ssm_multipliers": [0.8, 1.4, 0.7, 1.6, 0.5],
        "mlp_multipliers": [1.5, 0.75],
        **more,
    }


_RANKS: dict[str, Any] = {
    "decay_low_rank_dim": lambda size: size(8, 12),
    "a_low_rank_dim": lambda size: size(12, 8),
    "v_low_rank_dim": lambda size: size(4, 16),
    "gate_low_rank_dim": lambda size: size(16, 4),
}

_NO_ROPE = {"rope_type": "default", "rope_theta": None}
_ONE_FULL = ["linear_attention"] * 3 + ["full_attention"]
CASES: dict[str, Case] = {
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
    "mamba2": Case("transformers", "Mamba2", _mamba, v_first=True),
    "mamba2-bias": Case(
        "transformers",
        "Mamba2",
        lambda size: _mamba(
            size,
            n_groups=1,
            use_bias=True,
            use_conv_bias=False,
            conv_kernel=size(3, 2),
            tie_word_embeddings=True,
            time_step_limit=(0.1, 0.3),
            layer_norm_epsilon=1e-3,
        ),
        v_first=True,
    ),
    "bamba": Case("transformers", "Bamba", _bamba, v_first=True),
    "bamba-bias": Case(
        "transformers",
        "Bamba",
        lambda size: _bamba(
            size,
            num_hidden_layers=2,
            num_attention_heads=2,
            attn_layer_indices=[0],
            attention_bias=True,
            mlp_bias=True,
            mamba_proj_bias=True,
            mamba_conv_bias=False,
            mamba_n_groups=1,
            mamba_expand=1,
            mamba_d_conv=size(3, 4),
            rope_parameters={"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.75},
            time_step_limit=(0.0, 0.25),
            tie_word_embeddings=True,
        ),
        v_first=True,
    ),
    "nemotron_h": Case(
        "transformers",
        "NemotronH",
        lambda size: _nemotron(size, ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"]),
        v_first=True,
    ),
    "nemotron_h-moe": Case(
        "transformers",
        "NemotronH",
        lambda size: _nemotron(
            size,
            ["moe", "linear_attention", "full_attention", "moe"],
            n_group=4,
            topk_group=2,
            norm_topk_prob=size(True, False),
            routed_scaling_factor=size(1.2, 2.5),
        ),
        v_first=True,
    ),
    "nemotron_h-latent": Case(
        "transformers",
        "NemotronH",
        lambda size: _nemotron(
            size,
            ["linear_attention", "moe", "mlp", "full_attention"],
            moe_latent_size=size(16, 20),
            norm_topk_prob=False,
            mlp_bias=True,
            use_bias=True,
            use_conv_bias=False,
            n_groups=1,
        ),
        v_first=True,
    ),
    "falcon_h1": Case("transformers", "FalconH1", _falcon, v_first=True),
    "falcon_h1-bias": Case(
        "transformers",
        "FalconH1",
        lambda size: _falcon(
            size,
            mamba_norm_before_gate=True,
            mamba_proj_bias=True,
            projectors_bias=True,
            attention_bias=True,
            mlp_bias=True,
            mamba_conv_bias=False,
            mamba_d_conv=size(3, 2),
            time_step_limit=(0.05, 0.4),
            rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
            tie_word_embeddings=True,
        ),
        v_first=True,
    ),
    "falcon_h1-normless": Case(
        "transformers",
        "FalconH1",
        lambda size: _falcon(size, mamba_rms_norm=False, mamba_n_groups=1, num_hidden_layers=2),
        v_first=True,
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
    "granitemoehybrid": Case("transformers", "GraniteMoeHybrid", _granite, v_first=True),
    "granitemoehybrid-dense": Case(
        "transformers",
        "GraniteMoeHybrid",
        lambda size: _granite(
            size,
            num_local_experts=0,
            position_embedding_type="rope",
            rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
            attention_bias=True,
            mamba_proj_bias=True,
            mamba_conv_bias=False,
            mamba_d_conv=size(3, 2),
            tie_word_embeddings=True,
        ),
        v_first=True,
    ),
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
    "gated_deltanet": _fla("GatedDeltaNet", True, num_heads=2, head_dim=16, expand_v=1.5),
    "gated_deltanet-hybrid": _fla(
        "GatedDeltaNet",
        True,
        num_heads=2,
        num_v_heads=lambda s: s(4, 6),
        head_dim=16,
        expand_v=1,
        attn=_hybrid(),
        allow_neg_eigval=True,
        output_gate_activation="sigmoid",
        tie_word_embeddings=True,
    ),  # fmt: skip
    "gated_deltanet-plain": _fla("GatedDeltaNet", True, num_heads=3, head_dim=12, use_gate=False, use_short_conv=False),
    "gated_deltaproduct": _fla(
        "GatedDeltaProduct",
        num_heads=2,
        head_dim=16,
        expand_v=1.5,
        num_householder=lambda s: s(3, 2, 4),
        use_forget_gate=True,
        allow_neg_eigval=True,
        attn=_hybrid(),
    ),
    "gated_deltaproduct-plain": _fla(
        "GatedDeltaProduct",
        num_heads=lambda s: s(2, 3),
        head_dim=12,
        expand_v=1,
        num_householder=2,
        use_output_gate=False,
        use_short_conv=False,
    ),
    "gated_deltaproduct-single": _fla("GatedDeltaProduct", num_heads=2, head_dim=16, tie_word_embeddings=True),
    "delta_net": _fla("DeltaNet", num_heads=2, expand_v=2.0),
    "delta_net-gate": _fla(
        "DeltaNet",
        num_heads=2,
        use_gate=True,
        qk_activation="relu",
        qk_norm="sum",
        allow_neg_eigval=True,
        attn=lambda s: [{"layers": [0], "num_heads": 4, "qkv_bias": True}],
    ),  # fmt: skip
    "delta_net-elu": _fla("DeltaNet", num_heads=2, qk_activation="elu", use_beta=False, conv_size=3),
    "delta_net-identity": _fla("DeltaNet", num_heads=2, qk_activation="identity", use_short_conv=False),
    "gla": _fla("GLA", True, num_heads=2, expand_k=0.5),
    "gla-gqa": _fla(
        "GLA",
        True,
        num_heads=4,
        num_kv_heads=lambda s: s(2, 1),
        use_short_conv=True,
        clamp_min=-0.05,
        feature_map="relu",
        tie_word_embeddings=True,
    ),  # fmt: skip
    "gla-hybrid": _fla(
        "GLA",
        True,
        num_heads=2,
        fuse_norm=False,
        elementwise_affine=False,
        attn=_hybrid(window_size=16, rope_theta=5000.0),
    ),  # fmt: skip
    "gla-nogate": _fla("GLA", True, num_heads=2, use_output_gate=False),
    "hgrn2": _fla("HGRN2", True, expand_ratio=16, attn=_hybrid(), num_hidden_layers=lambda s: s(3, 4)),
    "hgrn2-conv": _fla(
        "HGRN2",
        True,
        expand_ratio=lambda s: s(8, 16),
        use_short_conv=True,
        use_lower_bound=False,
        tie_word_embeddings=True,
    ),
    "hgrn2-heads": _fla("HGRN2", True, expand_ratio=None, num_heads=lambda s: s(2, 4), elementwise_affine=False),
    # One group: fla's fallback in torch gives head h group h % groups when it reads a prompt, unlike its kernels.
    "mamba2-fla": _fla(
        "Mamba2", True, head_dim=lambda s: s(16, 8), state_size=lambda s: s(12, 24), D_has_hdim=True, use_bias=True
    ),
    "mamba2-switches": _fla(
        "Mamba2",
        True,
        head_dim=8,
        state_size=16,
        norm_before_gate=True,
        use_conv_bias=False,
        expand=lambda s: s(1, 2),
        conv_kernel=3,
        dt_limit=(0.05, 0.2),
        tie_word_embeddings=True,
    ),
    "mamba2-normless": _fla("Mamba2", True, head_dim=16, state_size=8, rmsnorm=False),
    "comba": _fla("Comba", num_heads=2, head_dim=lambda s: s(12, 16), expand_v=1.5),
    "comba-hybrid": _fla(
        "Comba",
        num_heads=2,
        num_v_heads=lambda s: s(4, 6),
        head_dim=lambda s: s(16, 8),
        expand_v=1,
        attn=_hybrid(),
        use_output_gate=False,
        tie_word_embeddings=True,
    ),
    "comba-plain": _fla("Comba", num_heads=3, head_dim=12, use_short_conv=False),
    "gsa": _fla("GSA", num_heads=2, num_slots=lambda s: s(12, 16, 20), exapnd_k=lambda s: s(1.5, 0.5)),
    "gsa-gqa": _fla(
        "GSA",
        num_heads=4,
        num_kv_heads=lambda s: s(2, 1),
        num_slots=lambda s: s(6, 12),
        use_short_conv=True,
        feature_map="relu",
        gate_logit_normalizer=4,
        tie_word_embeddings=True,
    ),
    "gsa-hybrid": _fla(
        "GSA", num_heads=2, num_slots=None, exapnd_k=0.5, elementwise_affine=False, attn=_hybrid(window_size=16)
    ),
    "rwkv6": _fla("RWKV6", num_heads=2, proj_low_rank_dim=lambda s: s(6, 8), gate_low_rank_dim=lambda s: s(10, 16)),
    "rwkv6-square": _fla(
        "RWKV6",
        num_heads=4,
        expand_k=1,
        expand_v=lambda s: s(1.5, 0.5),
        proj_low_rank_dim=4,
        gate_low_rank_dim=8,
        fuse_norm=False,
        tie_word_embeddings=True,
    ),
    "rwkv7": _fla("RWKV7", head_dim=16, **_RANKS),
    "rwkv7-norms": _fla("RWKV7", head_dim=8, fuse_norm=False, tie_word_embeddings=True, **_RANKS),
    "retnet": _fla("RetNet", num_heads=2),
    "retnet-gqa": _fla("RetNet", num_heads=4, num_kv_heads=2, fuse_norm=False, attn=_hybrid(), feature_map="relu"),
    "linear_attn": _fla("LinearAttention", num_heads=2, expand_v=1.5),
    "linear_attn-tied": _fla("LinearAttention", num_heads=2, num_kv_heads=1, tie_feature_map_qk=True),
    "linear_attn-elu": _fla("LinearAttention", num_heads=2, feature_map="elu", norm_feature_map=True),
    "linear_attn-hedgehog": _fla(
        "LinearAttention", num_heads=2, feature_map="hedgehog", norm_feature_map=True, norm_q=True, norm_k=True
    ),
    "linear_attn-t2r": _fla("LinearAttention", num_heads=2, feature_map="t2r", attn=_hybrid()),
    "linear_attn-dpfp": _fla("LinearAttention", num_heads=4, feature_map="dpfp", norm_k=True, elementwise_affine=False),
    "linear_attn-relu": _fla("LinearAttention", num_heads=2, feature_map="relu", norm_q=True),
    "linear_attn-identity": _fla("LinearAttention", num_heads=2, feature_map="identity"),
    "kda": _fla("KDA", True, num_heads=2, head_dim=16, expand_v=1.5),
    "kda-bound": _fla(
        "KDA",
        True,
        num_heads=2,
        num_v_heads=4,
        head_dim=12,
        safe_gate=True,
        lower_bound=lambda s: s(-0.8, -1.5),
        allow_neg_eigval=True,
    ),
    "kda-hybrid": _fla("KDA", True, num_heads=2, head_dim=16, use_short_conv=False, attn=_hybrid()),
}


def write(name: str, folder: Path, seed: int, vary: bool) -> None:
    """Make the checkpoint and what its source computes for it."""
    case = CASES[name]
    if case.source == "mlx-lm":
        _write_bailing(case, folder, seed, vary)
        return
    import torch

    torch.manual_seed(seed)
    torch.set_num_threads(1)
    module = _source(case.source)
    config = getattr(module, f"{case.model}Config")(**case.config(Sizes(random.Random(seed) if vary else None)))
    model_name = case.model.removesuffix("Text")
    model = getattr(module, f"{model_name}ForCausalLM")(config).eval()
    initial = {key: value.clone() for key, value in model.state_dict().items()}
    ids = torch.randint(0, config.vocab_size, (len(LENGTHS), max(LENGTHS)))
    sensitivity, weights = _drawn(model, initial, ids)
    for _ in range(DRAWS):
        if sensitivity < WELL_CONDITIONED:
            break
        sensitivity, weights = min((sensitivity, weights), _drawn(model, initial, ids), key=lambda drawn: drawn[0])
    model.load_state_dict(weights)
    folder.mkdir(parents=True, exist_ok=True)
    _save_checkpoint(model, case, config, folder)
    with torch.no_grad():
        golden = _golden(model, case, config, ids)
    golden["sensitivity"] = torch.tensor(sensitivity)
    _save(golden, folder / "golden.safetensors")


def _write_bailing(case: Case, folder: Path, seed: int, vary: bool) -> None:
    from tests.parity import bailing_oracle

    kind = {"BailingMoeLinearV2": "bailing_moe_linear", "BailingMoeV2_5": "bailing_hybrid"}[case.model]
    config = case.config(Sizes(random.Random(seed) if vary else None))
    config = {"model_type": kind, "architectures": [f"{case.model}ForCausalLM"], **config}
    bailing_oracle.write(config, folder, seed, LENGTHS, GREEDY_PROMPT, GREEDY_NEW)


def _save_checkpoint(model: Any, case: Case, config: Any, folder: Path) -> None:
    """As the source's save_pretrained writes it; that of fla's models refuses weights shared by two names."""
    if case.source == "transformers":
        model.save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        return
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    _save(
        {name: tensor.clone() for name, tensor in model.state_dict().items() if name not in tied},
        folder / "model.safetensors",
    )


@functools.cache
def _source(name: str) -> Any:
    if name == "fla":
        sys.path.insert(0, os.environ["MLXLIN_FLA"])
        from tests.parity import fla_oracle

        fla_oracle.install()
        import fla.models

        return fla.models
    import transformers

    return transformers


# Projections whose outputs are added to the residual.
_OUTPUTS = (
    "o_proj.weight",
    "out_proj.weight",
    "down_proj.weight",
    "experts.down_proj",
    "w2.weight",
    "output_linear.weight",
)


def _randomise(model: Any) -> None:
    """Weights as random as possible with signals of order one; no parameter keeps its initial value."""
    import torch

    for name, buffer in model.named_buffers():
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            buffer.copy_(torch.randn(buffer.shape) * 0.1)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape)
        with torch.no_grad():
            if name.endswith(("A_log", "dt_bias")):  # states that last for tens of tokens, as in trained models
                parameter.copy_(noise * 0.6 - 1.5)
            elif name.endswith(("norm.weight", "lower_bounds")) or parameter.ndim < 2:
                parameter.add_(noise * 0.3)
            else:
                # Parts that add to the residual stay below it, else rounding errors grow from layer to layer.
                gain = 0.1 if name.endswith(_OUTPUTS) else 1.2
                parameter.copy_(noise * gain / parameter.shape[-1] ** 0.5)


def _drawn(model: Any, initial: dict[str, Any], ids: Any) -> tuple[float, dict[str, Any]]:
    """Random weights and how sensitive the logits are under them."""
    model.load_state_dict(initial)
    _randomise(model)
    return _sensitivity(model, ids), {key: value.clone() for key, value in model.state_dict().items()}


def _sensitivity(model: Any, ids: Any) -> float:
    """Largest change of a logit when every embedding changes by one part in ten million."""
    import torch

    embedding = model.get_input_embeddings().weight
    before = embedding.detach().clone()
    with torch.no_grad():
        plain = model(ids, use_cache=False).logits
        embedding.mul_(1 + 1e-7 * torch.randn(before.shape))
        moved = model(ids, use_cache=False).logits
        embedding.copy_(before)
    return float((moved - plain).abs().max())


def _golden(model: Any, case: Case, config: Any, ids: Any) -> dict[str, Any]:
    import torch

    vocab = config.vocab_size
    logits = torch.zeros(*ids.shape, vocab)
    states: list[dict[str, Any]] = []
    for row, length in enumerate(LENGTHS):
        out = model(ids[row : row + 1, :length], use_cache=True)
        logits[row, :length] = out.logits[0].float()
        states.append(_recurrent_states(out, case, config.num_hidden_layers))
        ids[row, length:] = 0
    greedy = ids[:1, :GREEDY_PROMPT]
    for _ in range(GREEDY_NEW):
        best = model(greedy, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
        greedy = torch.cat([greedy, best], 1)
    stacked = {key: torch.cat([state[key] for state in states]) for key in states[0]}
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    return {"ids": ids.int(), "lengths": lengths, "logits": logits, "greedy": greedy[0].int(), **stacked}


def _recurrent_states(out: Any, case: Case, layers: int) -> dict[str, Any]:
    found, entry = {}, 0  # of mlxlin's state, which has two entries for a layer with two mixers
    for index in range(layers):
        if case.source == "fla":
            state = out.past_key_values[index]["recurrent_state"]
            state = state[0] if isinstance(state, (tuple, list)) else state
        else:
            state = _transformers_state(out.cache, index)
        if state is not None:
            found[f"layers.{entry}.S"] = (state if case.v_first else state.transpose(-1, -2)).float().contiguous()
        entry += 2 if case.model == "FalconH1" else 1
    return found


def _transformers_state(cache: Any, index: int) -> Any:
    """The recurrent matrix of a layer, None where it attends."""
    if hasattr(cache, "linear_cache"):  # MiniMax's, with an empty list where a layer attends
        return next((state for state in cache.linear_cache[index : index + 1] if len(state)), None)
    layer = cache.layers[index]
    return layer.recurrent_states[0] if hasattr(layer, "recurrent_states") else None


def _save(tensors: dict[str, Any], path: Path) -> None:
    from safetensors.torch import save_file

    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("cases", nargs="+", choices=sorted(CASES), metavar="CASE")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vary", action="store_true")
    options = parser.parse_args()
    for name in options.cases:
        write(name, options.folder / name, options.seed, options.vary)
        print(name, flush=True)


if __name__ == "__main__":
    main()
