"""Falcon-H1: Mamba-2 and softmax attention beside each other, then a feed-forward part (arXiv:2507.22448).

The config's multipliers (of muP) sit on inputs and outputs of projections. Those of the embedding and the logits stay
factors; the key's is part of the attention's scale; all others are multiplied into the weights.
"""

from __future__ import annotations

from dataclasses import replace

from mlxlin.errors import CheckpointError
from mlxlin.models.common_layout import (
    LAYER,
    ROTARY,
    attention_weights,
    frame_weights,
    grouped_attention,
    head_dim,
    mlp_weights,
)
from mlxlin.models.config import Config, given, need, only, rope_settings, rotary_size
from mlxlin.models.mamba_layout import expanded, mixer_weights
from mlxlin.models.spec import AttentionSpec, FoldedSpec, LayerSpec, LinearSpec, MlpSpec, ModelSpec, NormSpec, RopeSpec
from mlxlin.models.values import folded

SERVES = (("falcon_h1", None),)
PREFIXES = ("model.",)
DROPS = (ROTARY, (r".*\.mup_vector$", "muP multipliers (computed from config.json)"))
_PARTS = (
    *mlp_weights(LAYER + "feed_forward."),
    *attention_weights(part="beside"),
    *mixer_weights(LAYER + "mamba."),
)
WEIGHTS = (
    *frame_weights(norm="final_layernorm", mlp_norm="pre_ff_layernorm"),
    *(replace(rule, operation=folded(rule.target.removeprefix(LAYER), rule.operation)) for rule in _PARTS),
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
    made = expanded(config, eps, width=given(config, "mamba_d_ssm", None, int))
    output = replace(made.output, gate_first=not given(config, "mamba_norm_before_gate", True))
    if not given(config, "mamba_rms_norm", False):
        output = replace(output, norm=None)
    return replace(made, output=output, out_bias=given(config, "projectors_bias", False))


def _attention(config: Config) -> AttentionSpec:
    dim, (rope, base) = head_dim(config), rope_settings(config, 10000.0)
    rotation = RopeSpec(rotary_size(rope, dim, 1.0), base)
    made = grouped_attention(config, dim, rotation)
    return replace(made, scale=made.scale * _factor(config, "key_multiplier"))


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
    values: list[float] = given(config, key, [1.0] * count, list[float])
    if len(values) != count:
        raise CheckpointError(f"config.json: {key} must have {count} numbers.")
    return values
