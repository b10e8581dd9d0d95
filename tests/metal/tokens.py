"""What one decoded token of a whole model costs in dispatches, by part of the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any
from unittest import mock

from mlxlin.backend import mx
from mlxlin.models import Model, find, moe, parameters
from mlxlin.models.params import QuantSpec
from mlxlin.sampling import Sampler, Sampling
from tests.tiny import HYBRID, RWKV7

from .graphs import dispatches, exported, metal_in_name

# three layers of a recurrence and one of attention, of sizes that the kernels take
DENSE = HYBRID | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 32,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
}
EXPERTS = DENSE | {
    "model_type": "qwen3_5_moe_text",
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
MAMBA = {
    "model_type": "mamba2",
    "architectures": ["Mamba2ForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_heads": 16,
    "head_dim": 32,
    "expand": 2,
    "state_size": 64,
    "n_groups": 2,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "use_bias": False,
    "hidden_act": "silu",
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": False,
}
# families of flash-linear-attention
COMBA = {
    "model_type": "comba",
    "architectures": ["CombaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_heads": 16,
    "head_dim": 32,
    "expand_v": 1.0,
}
LINEAR_ATTENTION = {
    "model_type": "linear_attn",
    "architectures": ["LinearAttentionForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 512,
    "intermediate_size": 64,
    "num_heads": 16,
    "norm_k": True,
}
HGRN2 = {
    "model_type": "hgrn2",
    "architectures": ["HGRN2ForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "expand_ratio": 32,
    "use_short_conv": True,
}
SLOTS = {
    "model_type": "gsa",
    "architectures": ["GSAForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_heads": 4,
    "num_kv_heads": 2,
    "num_slots": 32,
    "use_short_conv": True,
    "conv_size": 4,
}
RWKV6 = {
    "model_type": "rwkv6",
    "architectures": ["RWKV6ForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 512,
    "intermediate_size": 64,
    "num_heads": 16,
    "expand_k": 1.0,
    "proj_low_rank_dim": 32,
    "gate_low_rank_dim": 32,
}
RANKS = {f"{part}_low_rank_dim": 32 for part in ("a", "decay", "gate", "v")}
TIME_MIX = RWKV7 | RANKS | {"hidden_size": 64, "head_dim": 32, "intermediate_size": 64}
_BITS = {"matrix": 4, "embedding": 4, "head": 4, "gate": 8}  # by role, as a converted checkpoint has them


def model_of(config: Mapping[str, Any], packed: bool) -> Model:
    """A bfloat16 model of zeros, in 4 bits where `packed`."""
    spec = find(dict(config)).spec(dict(config))
    params: dict[str, mx.array] = {}
    packing: dict[str, QuantSpec] = {}
    for name, parameter in parameters(spec).items():
        weight = mx.zeros(parameter.shape, dtype=mx.bfloat16)
        if not packed or parameter.role not in _BITS:
            params[name] = weight
            continue
        stem = name.removesuffix(".weight")
        packing[stem] = QuantSpec(_BITS[parameter.role], 32)
        parts = mx.quantize(weight, group_size=32, bits=_BITS[parameter.role])
        params |= dict(zip((name, f"{stem}.scales", f"{stem}.biases"), parts, strict=True))
    return Model(spec, params, packing)


def token_dispatches(config: Mapping[str, Any], packed: bool = False, sampling: Sampling | None = None) -> Counter[str]:
    """Of one token behind others, up to its logits or, with `sampling`, up to the next token."""
    _, state = model_of(config, packed)(mx.array([[1, 2, 3]]), logits="none")
    mx.eval(*state.arrays().values())
    sampler = None if sampling is None else Sampler(sampling)
    if sampler is not None:  # random numbers are drawn in blocks: not for this token
        mx.eval(sampler(mx.zeros((1, 1, config["vocab_size"]))))
    with mock.patch.object(moe, "on_metal", lambda: True):  # experts as Metal keeps them
        model = model_of(config, packed)
    with metal_in_name():

        def call(token: mx.array) -> list[mx.array]:
            logits, new = model(token, state)
            assert logits is not None
            return [logits if sampler is None else sampler(logits), *new.arrays().values()]

        return dispatches(exported(call, mx.array([[4]])))


def prompt_dispatches(config: Mapping[str, Any], length: int) -> Counter[str]:
    """Of a prompt, up to the logits of its last token; no token is looked at."""
    with metal_in_name(), mock.patch.object(Model, "_token_array", lambda self, tokens: tokens):
        model = model_of(config, packed=False)

        def call(tokens: mx.array) -> list[mx.array]:
            logits, new = model(tokens, logits="last")
            assert logits is not None
            return [logits, *new.arrays().values()]

        return dispatches(exported(call, mx.zeros((1, length), dtype=mx.int32)))


def layer_dispatches(config: Mapping[str, Any], packed: bool = False) -> dict[str, Counter[str]]:
    """By part: a linear layer, an attention layer, and the rest."""
    two, three, four = (token_dispatches({**config, "num_hidden_layers": n}, packed) for n in (2, 3, 4))
    linear = three - two
    return {"linear layer": linear, "attention layer": four - three, "rest": two - linear - linear}
