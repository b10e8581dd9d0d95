"""What checkpoints of many families have in common: tensor names around the mixers, experts, softmax attention."""

from __future__ import annotations

from mlxlin.errors import CheckpointError
from mlxlin.models.config import Config, given, need, only, rope_settings
from mlxlin.models.rules import Weight
from mlxlin.models.spec import AttentionSpec, RopeSpec
from mlxlin.models.values import FIRST_HALF, SECOND_HALF, STACK

LAYER, MIXER, MLP = "layers.{i}.", "layers.{i}.mixer.", "layers.{i}.mlp."
ATTENTION = LAYER + "self_attn."
KINDS = ("weight", "bias")  # a rule for a bias that the model does not have does nothing
_FEED_FORWARD = ("gate", "up", "down")

# Tensors to drop.
ROTARY = (r".*rotary_emb\.inv_freq$", "rotary frequencies (computed)")
MTP_REASON = "MTP tensors (multi-token prediction head)"
MTP = (r"mtp\.", MTP_REASON)


def frame_weights(
    *,
    embed: str = "embed_tokens",
    norm: str = "norm",
    mixer_norm: str = "input_layernorm",
    mlp_norm: str = "post_attention_layernorm",
) -> tuple[Weight, ...]:
    """What is around the parts of the layers, by the names that the checkpoint has for it."""
    return (
        Weight("embed.weight", f"{embed}.weight"),
        Weight("norm.weight", f"{norm}.weight"),
        Weight("head.weight", "lm_head.weight"),
        Weight(LAYER + "mixer_norm.weight", f"{LAYER}{mixer_norm}.weight"),
        Weight(LAYER + "mlp_norm.weight", f"{LAYER}{mlp_norm}.weight"),
    )


def mlp_weights(source: str = MLP) -> tuple[Weight, ...]:
    """A feed-forward part stored under `source`."""
    return tuple(
        Weight(f"{MLP}{part}.{kind}", f"{source}{part}_proj.{kind}") for part in _FEED_FORWARD for kind in KINDS
    )


def single_expert_weights(moe: str, gate: str, up: str, down: str) -> tuple[Weight, ...]:
    """The experts of the mixture stored under `moe`, each by itself, with these names of the three projections."""
    stored = {"gate": gate, "up": up, "down": down}
    return tuple(
        Weight(f"{MLP}experts.{part}.weight", f"{moe}experts.{{e}}.{name}.weight", STACK)
        for part, name in stored.items()
    )


def stacked_expert_weights(moe: str) -> tuple[Weight, ...]:
    """All experts of the mixture stored under `moe` in one tensor, as transformers or as MLX tools stack them."""
    return (
        Weight(MLP + "experts.gate.weight", moe + "experts.gate_up_proj", FIRST_HALF),
        Weight(MLP + "experts.up.weight", moe + "experts.gate_up_proj", SECOND_HALF),
        Weight(MLP + "experts.down.weight", moe + "experts.down_proj"),
        *(Weight(f"{MLP}experts.{part}.weight", f"{moe}switch_mlp.{part}_proj.weight") for part in _FEED_FORWARD),
    )


def attention_weights(source: str = ATTENTION, part: str = "mixer") -> tuple[Weight, ...]:
    """The projections of softmax attention stored under `source`, as a layer's `mixer` or as what is `beside` it."""
    return tuple(
        Weight(
            f"{LAYER}{part}.{target}.{kind}",
            f"{source}{name}_proj.{kind}",
            kind="attention" if part == "mixer" else "",
        )
        for target, name in (("q", "q"), ("k", "k"), ("v", "v"), ("out", "o"))
        for kind in KINDS
    )


def head_dim(config: Config) -> int:
    """Dimension of an attention head; heads fill the width where nothing is said."""
    if config.get("head_dim") is not None:
        return int(need(config, "head_dim"))
    return shared_width(need(config, "hidden_size"), need(config, "num_attention_heads"))


def shared_width(width: int, heads: int) -> int:
    """Dimension of each of the heads that fill the width.

    Raises:
        CheckpointError: they do not divide it.
    """
    if width % heads:
        raise CheckpointError(f"config.json: hidden_size {width} does not divide into {heads} heads.")
    return width // heads


def grouped_attention(config: Config, dim: int, rope: RopeSpec | None) -> AttentionSpec:
    """Softmax attention with heads of `dim`, with one switch for the biases of all projections."""
    heads, bias = need(config, "num_attention_heads"), given(config, "attention_bias", False)
    return AttentionSpec(
        heads=heads,
        kv_heads=given(config, "num_key_value_heads", heads),
        head_dim=dim,
        scale=dim**-0.5,
        rope=rope,
        qkv_bias=bias,
        out_bias=bias,
    )


def whole_rope(config: Config, dim: int, default_base: float) -> RopeSpec:
    """The rotation of whole heads.

    Raises:
        UnsupportedError: of parts of them, or scaled.
    """
    rope, base = rope_settings(config, default_base)
    for place in (config, rope):
        only(place, {"partial_rotary_factor": (1.0, None)})
    return RopeSpec(dim, base)
