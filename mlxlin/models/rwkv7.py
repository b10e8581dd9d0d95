"""RWKV-7 as flash-linear-attention and as BlinkDL's `.pth` files name it (Peng et al. 2025, arXiv:2503.14456)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mlxlin.errors import CheckpointError
from mlxlin.models import fla_layout
from mlxlin.models.common_layout import shared_width
from mlxlin.models.config import Config, given, need, nullable, only
from mlxlin.models.fla_layout import ATTN, MIXER
from mlxlin.models.rules import Weight
from mlxlin.models.spec import ChannelMixSpec, LayerSpec, ModelSpec, NormSpec, Rwkv7Spec
from mlxlin.models.ties import Tensor
from mlxlin.models.values import FLAT, ROWS, TRANSPOSED

SERVES = (("rwkv7", None),)
PREFIXES = fla_layout.PREFIXES
DROPS = ((r"blocks\.0\.att\.v[012]$", "value mixing of the first layer (never used)"),)

_MIXES = "rwkvag"  # in the order of the mixer's rows
_MLP, _BLOCK = "layers.{i}.mlp.", "blocks.{i}."
_LOW_RANK = {"decay": "w", "rate": "a", "value": "v", "gate": "g"}
_VECTORS = ("k_k", "k_a", "r_k")
PARTS = ("weight", "bias")

SHARED_WEIGHTS = (
    Weight("embed.weight", "embeddings.weight"),
    *(Weight(f"embed_norm.{part}", f"layers.0.pre_norm.{part}") for part in PARTS),
    *(Weight(f"norm.{part}", f"norm.{part}") for part in PARTS),
    Weight("head.weight", "lm_head.weight"),
    *(Weight(f"layers.{{i}}.mixer_norm.{part}", f"layers.{{i}}.attn_norm.{part}") for part in PARTS),
    *(Weight(f"layers.{{i}}.mlp_norm.{part}", f"layers.{{i}}.ffn_norm.{part}") for part in PARTS),
)
_FLA_WEIGHTS = (
    *SHARED_WEIGHTS,
    Weight(MIXER + "mix", tuple(ATTN + f"x_{name}" for name in _MIXES), ROWS),
    Weight(MIXER + "mix", ATTN + "x_x"),  # the first version kept all six in one tensor
    *(Weight(MIXER + f"{name}.weight", ATTN + f"{name}_proj.weight") for name in "rkv"),
    Weight(MIXER + "out.weight", ATTN + "o_proj.weight"),
    *(Weight(MIXER + f"{ours}.weight", ATTN + f"{theirs}_lora.lora.0.weight") for ours, theirs in _LOW_RANK.items()),
    *(
        Weight(MIXER + f"{ours}_out.{part}", ATTN + f"{theirs}_lora.lora.2.{part}")
        for ours, theirs in _LOW_RANK.items()
        for part in PARTS
    ),
    *(Weight(MIXER + name, ATTN + name, FLAT) for name in _VECTORS),
    *(Weight(MIXER + f"norm.{part}", ATTN + f"g_norm.{part}") for part in PARTS),
    Weight(_MLP + "mix", "layers.{i}.ffn.x_k", FLAT),
    *(Weight(_MLP + f"{name}.weight", f"layers.{{i}}.ffn.{name}.weight") for name in ("key", "value")),
)
_BLINK_WEIGHTS = (
    Weight("embed.weight", "emb.weight"),
    *(Weight(f"embed_norm.{part}", f"blocks.0.ln0.{part}") for part in PARTS),
    *(Weight(f"norm.{part}", f"ln_out.{part}") for part in PARTS),
    Weight("head.weight", "head.weight"),
    *(Weight(f"layers.{{i}}.mixer_norm.{part}", _BLOCK + f"ln1.{part}") for part in PARTS),
    *(Weight(f"layers.{{i}}.mlp_norm.{part}", _BLOCK + f"ln2.{part}") for part in PARTS),
    Weight(MIXER + "mix", tuple(_BLOCK + f"att.x_{name}" for name in _MIXES), ROWS),
    *(
        Weight(MIXER + f"{ours}.weight", _BLOCK + f"att.{theirs}.weight")
        for ours, theirs in {"r": "receptance", "k": "key", "v": "value", "out": "output"}.items()
    ),
    *(
        Weight(MIXER + target, _BLOCK + f"att.{theirs}{number}", operation)
        for ours, theirs in _LOW_RANK.items()
        for target, number, operation in (
            (f"{ours}_out.bias", 0, FLAT),
            (f"{ours}.weight", 1, TRANSPOSED),
            (f"{ours}_out.weight", 2, TRANSPOSED),
        )
    ),
    *(Weight(MIXER + name, _BLOCK + f"att.{name}", FLAT) for name in _VECTORS),
    *(Weight(MIXER + f"norm.{part}", _BLOCK + f"att.ln_x.{part}") for part in PARTS),
    Weight(_MLP + "mix", _BLOCK + "ffn.x_k", FLAT),
    *(Weight(_MLP + f"{name}.weight", _BLOCK + f"ffn.{name}.weight") for name in ("key", "value")),
)
WEIGHTS = _FLA_WEIGHTS + _BLINK_WEIGHTS

_CONTEXT = 4096  # that released models were trained for at least
# Under the root of the sum of squares: the source's fused kernel and its plain form differ.
_FUSED_KEY_EPS, _PLAIN_KEY_EPS = 1e-6, 1e-24


def spec(config: Config) -> ModelSpec:
    """The description of a checkpoint with this config.json."""
    only(config, {"attn": (None, {}, []), "hidden_act": ("sqrelu",), "norm_first": (True,), "norm_bias": (True,)})
    width, count = need(config, "hidden_size"), need(config, "num_hidden_layers")
    heads = given(config, "num_heads", 0)
    head_dim = given(config, "head_dim", 0) or (shared_width(width, heads) if heads else 64)
    value_dim = config.get("value_dim")
    if value_dim not in (None, width, [width] * count) or width % head_dim:
        raise CheckpointError(f"config.json: head_dim {head_dim} and value_dim {value_dim} do not fit width {width}.")
    eps = float(given(config, "norm_eps", 1e-5))
    norm = NormSpec(eps, kind="layer")
    mixer = Rwkv7Spec(
        heads=width // head_dim,
        head_dim=head_dim,
        decay_rank=_rank(config, "decay", 64, 2.5 * head_dim / 64),
        rate_rank=_rank(config, "a", 64, 2.5 * head_dim / 64),
        value_rank=_rank(config, "v", 16, 1.7 * head_dim / 64),
        gate_rank=_rank(config, "gate", 128, 5.0),
        eps=head_dim * eps,
        key_eps=_FUSED_KEY_EPS if given(config, "fuse_norm", True) else _PLAIN_KEY_EPS,
    )
    layer = LayerSpec(mixer, ChannelMixSpec(channels(config, 4)), norm)
    return ModelSpec(
        family="rwkv7",
        vocab=need(config, "vocab_size"),
        width=width,
        layers=(replace(layer, mixer=replace(mixer, value_rank=0)), *[layer] * (count - 1)),
        norm=norm,
        tied=given(config, "tie_word_embeddings", False),
        context=given(config, "max_position_embeddings", 2048),
        embed_norm=norm,
    )


def _rank(config: Config, name: str, absent: int, factor: float) -> int:
    """Of a low-rank projection: a null in config.json means one that grows with the width."""
    key = f"{name}_low_rank_dim"
    rank: int | None = nullable(config, key, absent)
    if rank is not None:
        return rank
    width: int = need(config, "hidden_size")
    return max(32, round(factor * math.sqrt(width) / 32) * 32)


def channels(config: Config, ratio: float) -> int:
    """Width of the channel mixing; `ratio` is the family's default for hidden_ratio."""
    if config.get("intermediate_size") is not None:
        return int(need(config, "intermediate_size"))
    hidden = int(need(config, "hidden_size") * given(config, "hidden_ratio", ratio))
    return 32 * ((hidden + 31) // 32)


def config_of(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The config of a bare `.pth` file, from the shapes of its tensors; {} where it is no RWKV-7."""
    if not {"emb.weight", "blocks.0.att.r_k", "blocks.0.ffn.key.weight"} <= set(tensors):
        return {}
    vocab, width = tensors["emb.weight"].shape
    last = max(int(name.split(".")[1]) for name in tensors if name.startswith("blocks."))
    found: dict[str, Any] = {
        "model_type": "rwkv7",
        "hidden_size": width,
        "vocab_size": vocab,
        "num_hidden_layers": last + 1,
        "head_dim": tensors["blocks.0.att.r_k"].shape[-1],
        "intermediate_size": tensors["blocks.0.ffn.key.weight"].shape[0],
        "max_position_embeddings": _CONTEXT,
        "fuse_norm": False,
    }
    for name, matrix in {"decay": "w1", "a": "a1", "v": "v1", "gate": "g1"}.items():
        if (tensor := tensors.get(f"blocks.{last}.att.{matrix}")) is not None:
            found[f"{name}_low_rank_dim"] = tensor.shape[1]
    return found
