"""What flash-linear-attention checkpoints have in common: config keys, tensor names, hybrid attention layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlxlin.errors import CheckpointError
from mlxlin.models.common_layout import KINDS, MIXER, frame_weights, mlp_weights, shared_width
from mlxlin.models.config import Config, given, need, only
from mlxlin.models.rules import Weight
from mlxlin.models.spec import (
    AttentionSpec,
    Features,
    LayerSpec,
    LinearSpec,
    MlpSpec,
    ModelSpec,
    NormSpec,
    RopeSpec,
    SlotSpec,
)
from mlxlin.models.values import CONCAT, CONV

PREFIXES = ("model.",)
DROPS = ((r".*rotary\.inv_freq$", "rotary frequencies (computed)"),)

ATTN = "layers.{i}.attn."
_PROJECTIONS = tuple(ATTN + f"{part}_proj.weight" for part in "qkv")
_CONVOLUTIONS = tuple(ATTN + f"{part}_conv1d.weight" for part in "qkv")

SHARED_WEIGHTS = (
    *frame_weights(embed="embeddings", mixer_norm="attn_norm", mlp_norm="mlp_norm"),
    *mlp_weights(),
    *(Weight(MIXER + f"{p}.{kind}", ATTN + f"{p}_proj.{kind}") for p in "qkv" for kind in KINDS),
    Weight(MIXER + "qkv.weight", _PROJECTIONS, CONCAT),
    Weight(MIXER + "conv.weight", _CONVOLUTIONS, CONV),
    Weight(MIXER + "out.weight", ATTN + "o_proj.weight"),
)
# Refused everywhere: residual connections over blocks, other feed-forward activations, and switches of old versions.
_SUPPORTED = {
    "attnres_block_size": (None,),
    "hidden_act": ("swish", "silu"),
    "norm_first": (False, None),
    "share_conv_kernel": (False, None),
}

# Names of activations as feature maps.
FEATURES: dict[str | None, Features] = {None: "none", "relu": "relu", "silu": "silu", "swish": "silu"}


def eps(config: Config) -> float:
    """Epsilon of every norm, under its new or its old name."""
    return float(given(config, "norm_eps", given(config, "rms_norm_eps", 1e-6)))


def taps(config: Config, *, default: bool) -> int:
    """Width of the short convolution, 0 for none; `default`: whether there is one where the config does not say."""
    size: int = given(config, "conv_size", 4)
    return size if given(config, "use_short_conv", default) else 0


def width_times(config: Config, factor: float, heads: int, key: str) -> int:
    """Dimension of one head where all heads together are `factor` times the model's width.

    Raises:
        CheckpointError: it is not a whole number; names `key`.
    """
    total = need(config, "hidden_size") * factor
    if abs(total - round(total)) > 1e-6 or round(total) % heads or total < heads:
        raise CheckpointError(f"config.json: hidden_size x {key} does not divide into {heads} heads.")
    return int(round(total)) // heads


def head_times(head_dim: int, factor: float, key: str) -> int:
    """`factor` times a head's dimension.

    Raises:
        CheckpointError: it is not a whole number; names `key`.
    """
    total = head_dim * factor
    if abs(total - round(total)) > 1e-6 or total < 1:
        raise CheckpointError(f"config.json: head_dim x {key} is not a whole number.")
    return round(total)


def model(family: str, config: Config, mixer: LinearSpec | SlotSpec, *, ratio: float = 4.0) -> ModelSpec:
    """The whole decoder: `mixer` in every layer except those that `attn` turns into softmax attention.

    `ratio` is the family's default for hidden_ratio.
    """
    only(config, _SUPPORTED)
    norm, mlp, attention = NormSpec(eps(config)), MlpSpec(_hidden(config, ratio)), _attention_layers(config)
    layers = tuple(LayerSpec(attention.get(i, mixer), mlp, norm) for i in range(need(config, "num_hidden_layers")))
    return ModelSpec(
        family=family,
        vocab=need(config, "vocab_size"),
        width=need(config, "hidden_size"),
        layers=layers,
        norm=norm,
        tied=given(config, "tie_word_embeddings", False),
        context=given(config, "max_position_embeddings", 2048),
    )


def _hidden(config: Config, ratio: float) -> int:
    if config.get("intermediate_size") is not None:
        return int(need(config, "intermediate_size"))
    hidden = int(need(config, "hidden_size") * given(config, "hidden_ratio", ratio) * 2 / 3)
    return 256 * ((hidden + 255) // 256)


def _attention_layers(config: Config) -> dict[int, AttentionSpec]:
    """Layer index -> softmax attention, from the `attn` entry: absent, one dictionary, or several."""
    attn = config.get("attn")
    entries: Sequence[Config] = [attn] if isinstance(attn, dict) else given(config, "attn", [], list[dict[str, Any]])
    found: dict[int, AttentionSpec] = {}
    for entry in entries:
        only(entry, {"qk_norm": (False, None)})
        heads = need(entry, "num_heads")
        head_dim = shared_width(need(config, "hidden_size"), heads)
        spec = AttentionSpec(
            heads=heads,
            kv_heads=given(entry, "num_kv_heads", heads),
            head_dim=head_dim,
            scale=head_dim**-0.5,
            rope=RopeSpec(head_dim, float(given(entry, "rope_theta", 10000.0))),
            qkv_bias=given(entry, "qkv_bias", False),
            window=given(entry, "window_size", None, int),
        )
        for index in need(entry, "layers", list[int]):
            if index in found or not 0 <= index < need(config, "num_hidden_layers"):
                raise CheckpointError(f"config.json: attn names layer {index} twice or outside the model.")
            found[index] = spec
    return found
