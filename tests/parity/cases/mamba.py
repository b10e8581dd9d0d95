"""Mamba-2 and its hybrids in transformers."""

from __future__ import annotations

from typing import Any

from tests.parity.cases.case import Case, Sizes


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


CASES = {
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
}
