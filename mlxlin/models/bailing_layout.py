"""What Ring 2.0, Ling 2.5 and Ling 3 have in common: tensor names; lightning attention of the first two."""

from __future__ import annotations

from mlxlin.errors import CheckpointError
from mlxlin.models import latent_layout
from mlxlin.models.common_layout import LAYER, MIXER, MLP, MTP, MTP_REASON, frame_weights, head_dim, mlp_weights
from mlxlin.models.config import Config, given, need, only, rotary_size
from mlxlin.models.rules import BEYOND, Weight
from mlxlin.models.spec import (
    DecaySpec,
    LayerSpec,
    LinearSpec,
    MixerSpec,
    ModelSpec,
    NormSpec,
    OutputSpec,
    RopeSpec,
)

PREFIXES = ("model.",)
DROPS = (MTP, (BEYOND, MTP_REASON))

ATTENTION = LAYER + "attention."
SHARED_WEIGHTS = (
    *frame_weights(embed="word_embeddings"),
    *mlp_weights(),
    *latent_layout.mixture_weights(MLP, "gate_proj", "up_proj", "down_proj"),
    Weight(MLP + "router.weight", MLP + "gate.gate_proj.weight"),  # as MLX tools write it
    Weight(MLP + "correction", MLP + "gate.expert_bias"),
)
LIGHTNING_WEIGHTS = (
    Weight(MIXER + "qkv.weight", ATTENTION + "query_key_value.weight", kind="linear"),
    Weight(MIXER + "q_norm.weight", ATTENTION + "query_layernorm.weight", kind="linear"),
    Weight(MIXER + "k_norm.weight", ATTENTION + "key_layernorm.weight", kind="linear"),
    Weight(MIXER + "gate.weight", ATTENTION + "g_proj.weight", kind="linear"),
    Weight(MIXER + "norm.weight", ATTENTION + "g_norm.weight", kind="linear"),
    Weight(MIXER + "out.weight", ATTENTION + "dense.weight", kind="linear"),
)
_SUPPORTED = {
    "hidden_act": ("silu",),
    "use_bias": (False, None),
    "use_qkv_bias": (False, None),
    "use_rmsnorm": (True, None),
    "norm_head": (False, None),
    "norm_softmax": (False, None),
    "linear_silu": (False, None),
    "use_linear_silu": (False, None),
    "linear_rope": (True, None),
    "rope_scaling": (None,),
    "rope_traditional": (False, None),
    "rope_interleave": (True, None),
    "score_function": ("sigmoid", None),
    "scoring_func": ("sigmoid", None),
    "norm_topk_prob": (True, None),
    "moe_router_enable_expert_bias": (True, None),
    "moe_router_enable_routed_scaling": (True, None),
    "moe_router_enable_shared_expert": (True, None),
}


def lightning_model(family: str, config: Config, full: MixerSpec) -> ModelSpec:
    """The whole decoder: lightning attention, and `full` in the last layer of each group and behind the last group."""
    heads = need(config, "num_attention_heads")
    hidden = need(config, "moe_intermediate_size")
    sizes = {
        "moe_shared_expert_intermediate_size": (hidden, None),
        "num_kv_heads_for_linear_attn": (heads, None),
        "num_experts_per_tok": tuple(range(2, need(config, "num_experts") + 1)),  # the source does not normalise one
    }
    only(config, {**_SUPPORTED, **sizes})
    norm = NormSpec(float(given(config, "rms_norm_eps", 1e-6)))
    count, group = need(config, "num_hidden_layers"), need(config, "layer_group_size")
    mlps = latent_layout.feed_forwards(config, given(config, "first_k_dense_replace", 0))
    layers = []
    for index, mlp in enumerate(mlps):
        last = (index + 1) % group == 0 or index >= count // group * group
        layers.append(LayerSpec(full if last else _lightning(config, norm, index), mlp, norm))
    return ModelSpec(
        family=family,
        vocab=need(config, "vocab_size"),
        width=need(config, "hidden_size"),
        layers=tuple(layers),
        norm=norm,
        tied=given(config, "tie_word_embeddings", False),
        context=given(config, "max_position_embeddings", 32768),
    )


def rope(config: Config, dims: int, *, interleaved: bool = False) -> RopeSpec:
    """The rotation of the first `dims` channels of a head."""
    return RopeSpec(dims, float(need(config, "rope_theta", float)), interleaved=interleaved)


def rotated(config: Config) -> int:
    """How many channels of a head are turned, but in latent attention."""
    return rotary_size(config, head_dim(config), need(config, "partial_rotary_factor", float))


def _lightning(config: Config, norm: NormSpec, index: int) -> LinearSpec:
    """Layer `index`. Its decay counts the layers from -1, and no checkpoint stores it.

    So do the authors' published code (modeling_bailing_moe_v2_5.py), their training framework, which at first counted
    from 0 and was put right (inclusionAI/AReaL, mcore/lightning_attention.py), and what is proposed for transformers
    (huggingface/transformers#46713). SGLang, vLLM and mlx-lm's Ling 2.5 count from 0.
    """
    heads, dim, count = need(config, "num_attention_heads"), head_dim(config), need(config, "num_hidden_layers")
    groups = need(config, "group_norm_size")
    if heads * dim % groups:
        raise CheckpointError(f"config.json: group_norm_size {groups} does not divide {heads} heads of {dim}.")
    return LinearSpec(
        rule="decay",
        heads=heads,
        value_heads=heads,
        key_dim=dim,
        value_dim=dim,
        scale=dim**-0.5,
        output=OutputSpec(norm, gate="sigmoid", joint=True, groups=groups),
        qk_norm="rms" if need(config, "use_qk_norm", bool) else "none",
        qk_eps=norm.eps,
        rope=rope(config, rotated(config)),
        decay=DecaySpec("alibi", factor=1 - (index - 1) / max(count - 1, 1) + 1e-5),
    )
