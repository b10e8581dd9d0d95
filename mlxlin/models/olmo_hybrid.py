"""OLMo Hybrid: gated delta net layers with norms before their parts, attention layers with norms behind them.

Norms and convolutions have two spellings: the hub's, and the one transformers writes back (which cuts the
convolution at other places; joined again it is the same).
"""

from __future__ import annotations

from dataclasses import replace

from mlxlin.models.common_layout import (
    ATTENTION,
    LAYER,
    MIXER,
    ROTARY,
    attention_weights,
    grouped_attention,
    head_dim,
    mlp_weights,
)
from mlxlin.models.config import Config, default_rope, given, layer_kinds, need, nullable, only
from mlxlin.models.rules import Weight
from mlxlin.models.spec import (
    AttentionSpec,
    DecaySpec,
    LayerSpec,
    LinearSpec,
    MlpSpec,
    ModelSpec,
    NormSpec,
    OutputSpec,
    RopeSpec,
)
from mlxlin.models.values import CONCAT, CONV

SERVES = (("olmo_hybrid", None),)
PREFIXES = ("model.",)
DROPS = (ROTARY,)

_LINEAR = LAYER + "linear_attn."
_OUTPUT_EPS = 1e-5  # fixed in the source, whatever rms_norm_eps is


def _linear(target: str, source: str) -> Weight:
    return Weight(MIXER + target, _LINEAR + source, kind="linear")


WEIGHTS = (
    Weight("embed.weight", "embed_tokens.weight"),
    Weight("norm.weight", "norm.weight"),
    Weight("head.weight", "lm_head.weight"),
    *(
        Weight(f"{LAYER}{norm}_norm.weight", f"{LAYER}{name}.weight", kind=kind)
        for kind, norm, names in (
            ("linear", "mixer", ("input_layernorm", "attention_layer_norm")),
            ("linear", "mlp", ("post_attention_layernorm", "feedforward_layer_norm")),
            ("attention", "mixer", ("post_attention_layernorm", "feedforward_layer_norm")),
            ("attention", "mlp", ("post_feedforward_layernorm",)),
        )
        for name in names
    ),
    *mlp_weights(),
    *attention_weights(),
    *(Weight(f"{MIXER}{n}_norm.weight", f"{ATTENTION}{n}_norm.weight", kind="attention") for n in "qk"),
    Weight(MIXER + "qkv.weight", tuple(f"{_LINEAR}{p}_proj.weight" for p in "qkv"), CONCAT, kind="linear"),
    Weight(MIXER + "conv.weight", tuple(f"{_LINEAR}{p}_conv1d.weight" for p in "qkv"), CONV, kind="linear"),
    Weight(MIXER + "conv.weight", _LINEAR + "conv1d.weight", CONV, kind="linear"),
    _linear("gate.weight", "g_proj.weight"),
    _linear("beta.weight", "b_proj.weight"),
    _linear("decay.weight", "a_proj.weight"),
    _linear("A_log", "A_log"),
    _linear("dt_bias", "dt_bias"),
    _linear("norm.weight", "o_norm.weight"),
    _linear("out.weight", "o_proj.weight"),
)


def spec(config: Config) -> ModelSpec:
    """The description of a checkpoint with this config.json."""
    only(config, {"hidden_act": ("silu",), "sliding_window": (None,)})
    norm, mlp = NormSpec(float(given(config, "rms_norm_eps", 1e-6))), MlpSpec(need(config, "intermediate_size"))
    layers = {
        "linear_attention": LayerSpec(_linear_mixer(config), mlp, norm),
        "full_attention": LayerSpec(_attention_mixer(config, norm.eps), mlp, norm, post_norm=True),
    }
    kinds = layer_kinds(config, _default_kinds(need(config, "num_hidden_layers")))
    return ModelSpec(
        family="olmo_hybrid",
        vocab=need(config, "vocab_size"),
        width=need(config, "hidden_size"),
        layers=tuple(layers[kind] for kind in kinds),
        norm=norm,
        tied=given(config, "tie_word_embeddings", False),
        context=given(config, "max_position_embeddings", 65536),
    )


def _default_kinds(count: int) -> list[str]:
    kinds = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(count)]
    return kinds if "full_attention" in kinds else [*kinds[:-1], "full_attention"]


def _linear_mixer(config: Config) -> LinearSpec:
    heads = given(config, "linear_num_key_heads", need(config, "num_attention_heads"))
    key_dim = given(config, "linear_key_head_dim", int(0.75 * need(config, "hidden_size") / heads))
    return LinearSpec(
        rule="gated_delta",
        heads=heads,
        value_heads=given(config, "linear_num_value_heads", need(config, "num_attention_heads")),
        key_dim=key_dim,
        value_dim=given(config, "linear_value_head_dim", 2 * key_dim),
        scale=key_dim**-0.5,
        output=OutputSpec(NormSpec(_OUTPUT_EPS), gate="silu"),
        conv=given(config, "linear_conv_kernel_dim", 4),
        qk_activation="silu",
        v_activation="silu",
        qk_norm="l2",
        decay=DecaySpec("softplus"),
        beta=2.0 if given(config, "linear_allow_neg_eigval", True) else 1.0,
    )


def _attention_mixer(config: Config, eps: float) -> AttentionSpec:
    dim = head_dim(config)
    return replace(grouped_attention(config, dim, _rope(config, dim)), qk_norm="full", eps=eps)


def _rope(config: Config, dim: int) -> RopeSpec | None:
    """None where the rotary base is null, as in released checkpoints: the linear layers carry position."""
    rope = given(config, "rope_parameters", {})
    default_rope(rope)
    default_rope(given(config, "rope_scaling", {}))  # where older configs say how the rotation is stretched
    base = nullable(rope if "rope_theta" in rope else config, "rope_theta", 10000.0)
    return None if base is None else RopeSpec(dim, float(base))
