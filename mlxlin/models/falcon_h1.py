"""Falcon-H1: Mamba-2 and softmax attention beside each other, then a feed-forward part (arXiv:2507.22448).

The config's multipliers (of muP) sit on inputs and outputs of projections. Those of the embedding and the logits stay
factors; the key's is part of the attention's scale; all others are multiplied into the weights.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mlxlin.errors import CheckpointError
from mlxlin.models.config import Config, default_rope, given, need, only
from mlxlin.models.mamba_layout import mixer, mixer_weights
from mlxlin.models.rules import Weight
from mlxlin.models.spec import AttentionSpec, FoldedSpec, LayerSpec, LinearSpec, MlpSpec, ModelSpec, NormSpec, RopeSpec
from mlxlin.models.values import COPY, folded

SERVES = (("falcon_h1", None),)
PREFIXES = ("model.",)
DROPS = (
    (r".*rotary_emb\.inv_freq$", "rotary frequencies (computed)"),
    (r".*\.mup_vector$", "muP multipliers (computed from config.json)"),
)

_LAYER = "layers.{i}."
_KINDS = ("weight", "bias")


def _weight(target: str, source: str) -> tuple[Weight, ...]:
    """Weight and bias of a projection, with their factors."""
    return tuple(
        Weight(f"{_LAYER}{target}.{kind}", f"{_LAYER}{source}.{kind}", folded(f"{target}.{kind}", COPY))
        for kind in _KINDS
    )


WEIGHTS = (
    Weight("embed.weight", "embed_tokens.weight"),
    Weight("norm.weight", "final_layernorm.weight"),
    Weight("head.weight", "lm_head.weight"),
    Weight(_LAYER + "mixer_norm.weight", _LAYER + "input_layernorm.weight"),
    Weight(_LAYER + "mlp_norm.weight", _LAYER + "pre_ff_layernorm.weight"),
    *(w for part in ("gate", "up", "down") for w in _weight(f"mlp.{part}", f"feed_forward.{part}_proj")),
    *(w for part in "qkv" for w in _weight(f"beside.{part}", f"self_attn.{part}_proj")),
    *_weight("beside.out", "self_attn.o_proj"),
    *(
        replace(rule, operation=folded(rule.target.removeprefix(_LAYER), rule.operation))
        for rule in mixer_weights("layers.{i}.mamba.")
    ),
)


def spec(config: Config) -> ModelSpec:
    """The description of a checkpoint with this config.json."""
    only(config, {"hidden_act": ("silu",)})
    norm = NormSpec(float(given(config, "rms_norm_eps", 1e-5)))
    layer = LayerSpec(
        mixer=_mamba(config, norm.eps),
        mlp=MlpSpec(need(config, "intermediate_size"), bias=given(config, "mlp_bias", False)),
        norm=norm,
        beside=_attention(config),
        folded=_folded(config),
    )
    return ModelSpec(
        family="falcon_h1",
        vocab=need(config, "vocab_size"),
        width=need(config, "hidden_size"),
        layers=(layer,) * need(config, "num_hidden_layers"),
        norm=norm,
        tied=given(config, "tie_word_embeddings", False),
        context=given(config, "max_position_embeddings", 8192),
        embed_factor=_factor(config, "embedding_multiplier"),
        logit_factor=_factor(config, "lm_head_multiplier"),
    )


def _mamba(config: Config, eps: float) -> LinearSpec:
    heads = need(config, "mamba_n_heads")
    width = given(config, "mamba_d_ssm", given(config, "mamba_expand", 2) * need(config, "hidden_size"))
    head_dim = given(config, "mamba_d_head", "auto")
    head_dim = width // heads if head_dim == "auto" else head_dim
    if heads * head_dim != width:
        raise CheckpointError("config.json: mamba_n_heads x mamba_d_head is not mamba_d_ssm.")
    made = mixer(
        heads=heads,
        head_dim=head_dim,
        groups=given(config, "mamba_n_groups", 1),
        state_dim=given(config, "mamba_d_state", 256),
        eps=eps,
        taps=given(config, "mamba_d_conv", 4),
        conv_bias=given(config, "mamba_conv_bias", True),
        bias=given(config, "mamba_proj_bias", False),
        limits=config.get("time_step_limit"),
    )
    output = replace(made.output, gate_first=not given(config, "mamba_norm_before_gate", True))
    if not given(config, "mamba_rms_norm", False):
        output = replace(output, norm=None)
    return replace(made, output=output, out_bias=given(config, "projectors_bias", False))


def _attention(config: Config) -> AttentionSpec:
    heads, bias = need(config, "num_attention_heads"), given(config, "attention_bias", False)
    head_dim = given(config, "head_dim", need(config, "hidden_size") // heads)
    rope = given(config, "rope_parameters", given(config, "rope_scaling", {}))
    default_rope(rope)
    base = given(rope, "rope_theta", given(config, "rope_theta", 10000.0))
    return AttentionSpec(
        heads=heads,
        kv_heads=given(config, "num_key_value_heads", heads),
        head_dim=head_dim,
        scale=head_dim**-0.5 * _factor(config, "key_multiplier"),
        rope=RopeSpec(int(head_dim * given(rope, "partial_rotary_factor", 1.0)), float(base)),
        qkv_bias=bias,
        out_bias=bias,
    )


def _folded(config: Config) -> tuple[FoldedSpec, ...]:
    """Factors by parameter. A projection's input does not reach its bias; its output does."""
    z, x, b, c, dt = _factors(config, "ssm_multipliers", 5)
    gate, down = _factors(config, "mlp_multipliers", 2)
    read, write = _factor(config, "ssm_in_multiplier"), _factor(config, "ssm_out_multiplier")
    attended, attending = _factor(config, "attention_out_multiplier"), _factor(config, "attention_in_multiplier")
    outputs = {
        "mixer.gate": (z,),
        "mixer.qkv": (c, b, x),
        "mixer.decay": (dt,),
        "mixer.out": (write,),
        "beside.out": (attended,),
        "mlp.gate": (gate,),
        "mlp.down": (down,),
    }
    inputs = {**dict.fromkeys(("mixer.gate", "mixer.qkv", "mixer.decay"), read)}
    inputs |= dict.fromkeys(("beside.q", "beside.k", "beside.v"), attending)
    found = []
    for name in sorted({*outputs, *inputs}):
        after = outputs.get(name, (1.0,))
        found.append(FoldedSpec(f"{name}.weight", tuple(inputs.get(name, 1.0) * factor for factor in after)))
        found.append(FoldedSpec(f"{name}.bias", after))
    return tuple(fold for fold in found if set(fold.factors) != {1.0})


def _factor(config: Config, key: str) -> float:
    return float(given(config, key, 1.0))


def _factors(config: Config, key: str, count: int) -> list[float]:
    values: list[Any] = given(config, key, [1.0] * count)
    if len(values) != count:
        raise CheckpointError(f"config.json: {key} must have {count} numbers.")
    return [float(value) for value in values]
