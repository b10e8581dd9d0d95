"""Tiny random models of different kinds, built from configs of their families."""

from __future__ import annotations

from typing import Any

from mlxlin.backend import mx
from mlxlin.models import Model, find, parameters

VOCAB = 64
HYBRID: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "architectures": ["Qwen3_5ForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}
RECURRENT: dict[str, Any] = {
    "model_type": "gla",
    "architectures": ["GLAForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_heads": 2,
    "expand_k": 0.5,
    "expand_v": 1.0,
    "hidden_ratio": 2,
    "max_position_embeddings": 4096,
}
RWKV7: dict[str, Any] = {
    "model_type": "rwkv7",
    "architectures": ["RWKV7ForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "head_dim": 8,
    "a_low_rank_dim": 8,
    "decay_low_rank_dim": 8,
    "gate_low_rank_dim": 8,
    "v_low_rank_dim": 4,
    "max_position_embeddings": 4096,
}
_ADDED = ("out.weight", "down.weight", "value.weight")
CONFIGS = {"hybrid": HYBRID, "recurrent": RECURRENT, "rwkv7": RWKV7}


def tiny_model(config: dict[str, Any], seed: int = 0) -> Model:
    """A model with random weights, so large that every part matters to the fourth digit, but well conditioned.

    What the parts add to the residual is small beside it, else each layer magnifies the rounding of those before it.
    States last for tens of tokens, as in trained models.
    """
    spec = find(config).spec(config)
    slow = ("A_log", "dt_bias", *(["decay_out.bias"] if spec.family == "rwkv7" else []))
    key = mx.random.key(seed)
    params: dict[str, mx.array] = {}
    for name, parameter in parameters(spec).items():
        key, own = mx.random.split(key)
        noise = mx.random.normal(parameter.shape, key=own)
        scale = 0.03 if name.endswith(_ADDED) else 0.3
        center = -2.0 if name.endswith(slow) else 1.0
        params[name] = noise * scale if len(parameter.shape) > 1 else center + 0.2 * noise
    return Model(spec, params)
