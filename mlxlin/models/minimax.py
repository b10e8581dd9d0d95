"""MiniMax-Text-01: lightning attention and softmax attention in turn, mixtures of experts, weighted residual paths."""

from __future__ import annotations

from mlxlin.models import latent_layout
from mlxlin.models.common_layout import (
    ATTENTION,
    LAYER,
    MIXER,
    MLP,
    ROTARY,
    attention_weights,
    frame_weights,
    head_dim,
    whole_rope,
)
from mlxlin.models.config import Config, given, layer_kinds, need, only
from mlxlin.models.rules import Weight
from mlxlin.models.spec import (
    AttentionSpec,
    BlendSpec,
    DecaySpec,
    LayerSpec,
    LinearSpec,
    ModelSpec,
    MoeSpec,
    NormSpec,
    OutputSpec,
)
from mlxlin.models.values import QKV_OF_HEADS

SERVES = (("minimax", None),)
PREFIXES = ("model.",)
DROPS = (
    (r".*\.self_attn\.(slope_rate|query_decay|key_decay|diagonal_decay)$", "decay factors (computed)"),
    ROTARY,
)
WEIGHTS = (
    *frame_weights(),
    *attention_weights(),
    Weight(MIXER + "qkv.weight", ATTENTION + "qkv_proj.weight", QKV_OF_HEADS, kind="linear"),
    Weight(MIXER + "gate.weight", ATTENTION + "output_gate.weight", kind="linear"),
    Weight(MIXER + "norm.weight", ATTENTION + "norm.weight", kind="linear"),
    Weight(MIXER + "out.weight", ATTENTION + "out_proj.weight", kind="linear"),
    *latent_layout.mixture_weights(LAYER + "block_sparse_moe.", "w1", "w3", "w2"),
    *latent_layout.mixture_weights(MLP, "w1", "w3", "w2"),
)
_SUPPORTED = {
    "hidden_act": ("silu",),
    "rope_scaling": (None,),
    "shared_intermediate_size": (0, None),
}
_OUTPUT_EPS = 1e-6  # fixed in the source, whatever rms_norm_eps is


def spec(config: Config) -> ModelSpec:
    """The description of a checkpoint with this config.json."""
    heads, dim, count = need(config, "num_attention_heads"), head_dim(config), need(config, "num_hidden_layers")
    only(config, {**_SUPPORTED, "rotary_dim": (dim, None)})
    kinds = layer_kinds(config, ["linear_attention" if index % 2 else "full_attention" for index in range(count)])
    attention = AttentionSpec(
        heads=heads,
        kv_heads=given(config, "num_key_value_heads", heads),
        head_dim=dim,
        scale=dim**-0.5,
        rope=whole_rope(config, dim, 1e6),
        window=given(config, "sliding_window", None, int),
    )
    norm = NormSpec(float(given(config, "rms_norm_eps", 1e-5)))
    moe = MoeSpec(
        need(config, "num_local_experts"), need(config, "num_experts_per_tok"), need(config, "intermediate_size")
    )
    return ModelSpec(
        family="minimax",
        vocab=need(config, "vocab_size"),
        width=need(config, "hidden_size"),
        layers=tuple(
            LayerSpec(
                _lightning(heads, dim, index, count) if kind == "linear_attention" else attention,
                moe,
                norm,
                mixer_blend=_blend(config, "linear_attn" if kind == "linear_attention" else "full_attn"),
                mlp_blend=_blend(config, "mlp"),
            )
            for index, kind in enumerate(kinds)
        ),
        norm=norm,
        tied=given(config, "tie_word_embeddings", False),
        context=given(config, "max_position_embeddings", 131072),
    )


def _lightning(heads: int, dim: int, index: int, count: int) -> LinearSpec:
    return LinearSpec(
        rule="decay",
        heads=heads,
        value_heads=heads,
        key_dim=dim,
        value_dim=dim,
        scale=1.0,
        output=OutputSpec(NormSpec(_OUTPUT_EPS), gate="sigmoid", joint=True),
        qk_activation="silu",
        v_activation="silu",
        decay=DecaySpec("geometric", factor=1 - index / (count - 1 + 1e-5) + 1e-5),
    )


def _blend(config: Config, part: str) -> BlendSpec:
    kept, added = (float(given(config, f"{part}_{name}_factor", 1.0)) for name in ("alpha", "beta"))
    return BlendSpec(kept, added)
