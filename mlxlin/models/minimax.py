"""MiniMax-Text-01: lightning attention and softmax attention in turn, mixtures of experts, weighted residual paths."""

from __future__ import annotations

from mlxlin.models import latent_layout
from mlxlin.models.config import Config, default_rope, given, need, only
from mlxlin.models.latent_layout import LAYER, MIXER
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
    RopeSpec,
)
from mlxlin.models.values import QKV_OF_HEADS

SERVES = (("minimax", None),)
PREFIXES = ("model.",)
_ATTENTION = LAYER + "self_attn."
DROPS = (
    (r".*\.self_attn\.(slope_rate|query_decay|key_decay|diagonal_decay)$", "decay factors (computed)"),
    (r".*rotary_emb\.inv_freq$", "rotary frequencies (computed)"),
)
WEIGHTS = (
    Weight("embed.weight", "embed_tokens.weight"),
    Weight("norm.weight", "norm.weight"),
    Weight("head.weight", "lm_head.weight"),
    Weight(LAYER + "mixer_norm.weight", LAYER + "input_layernorm.weight"),
    Weight(LAYER + "mlp_norm.weight", LAYER + "post_attention_layernorm.weight"),
    *(Weight(f"{MIXER}{p}.weight", f"{_ATTENTION}{p}_proj.weight", kind="attention") for p in "qkv"),
    Weight(MIXER + "out.weight", _ATTENTION + "o_proj.weight", kind="attention"),
    Weight(MIXER + "qkv.weight", _ATTENTION + "qkv_proj.weight", QKV_OF_HEADS, kind="linear"),
    Weight(MIXER + "gate.weight", _ATTENTION + "output_gate.weight", kind="linear"),
    Weight(MIXER + "norm.weight", _ATTENTION + "norm.weight", kind="linear"),
    Weight(MIXER + "out.weight", _ATTENTION + "out_proj.weight", kind="linear"),
    *latent_layout.mixture_weights(LAYER + "block_sparse_moe.", "w1", "w3", "w2"),
    *latent_layout.mixture_weights(LAYER + "mlp.", "w1", "w3", "w2"),
)
_SUPPORTED = {
    "hidden_act": ("silu",),
    "partial_rotary_factor": (1, None),
    "rope_scaling": (None,),
    "shared_intermediate_size": (0, None),
}
_OUTPUT_EPS = 1e-6  # fixed in the source, whatever rms_norm_eps is


def spec(config: Config) -> ModelSpec:
    """The description of a checkpoint with this config.json."""
    rope = given(config, "rope_parameters", {})
    default_rope(rope)
    heads = need(config, "num_attention_heads")
    head_dim = given(config, "head_dim", need(config, "hidden_size") // heads)
    only(config, {**_SUPPORTED, "rotary_dim": (head_dim, None)})
    only(rope, _SUPPORTED)
    count = need(config, "num_hidden_layers")
    kinds = latent_layout.layer_kinds(
        config, ["linear_attention" if index % 2 else "full_attention" for index in range(count)]
    )
    base = float(given(rope, "rope_theta", given(config, "rope_theta", 1e6)))
    attention = AttentionSpec(
        heads=heads,
        kv_heads=given(config, "num_key_value_heads", heads),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=RopeSpec(head_dim, base),
        window=config.get("sliding_window"),
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
                _lightning(heads, head_dim, index, count) if kind == "linear_attention" else attention,
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
    kept, added = (float(given(config, f"{part}_{name}_factor", 1)) for name in ("alpha", "beta"))
    return BlendSpec(kept, added)
