"""RWKV-6 as flash-linear-attention names it (Peng et al. 2024, arXiv:2404.05892)."""

from __future__ import annotations

from mlxlin.models import fla_layout
from mlxlin.models.config import Config, given, need, only
from mlxlin.models.fla_layout import ATTN, MIXER
from mlxlin.models.rules import Weight
from mlxlin.models.rwkv7 import PARTS, SHARED_WEIGHTS, channels
from mlxlin.models.spec import ChannelMixSpec, LayerSpec, ModelSpec, NormSpec, Rwkv6Spec

SERVES = (("rwkv6", None),)
PREFIXES = fla_layout.PREFIXES
DROPS = fla_layout.DROPS

_MLP, _FFN = "layers.{i}.mlp.", "layers.{i}.ffn."
WEIGHTS = (
    *SHARED_WEIGHTS,
    Weight(MIXER + "first_mix", ATTN + "x_proj.0.mu"),
    Weight(MIXER + "mix", ATTN + "x_bias"),
    Weight(MIXER + "mix_in.weight", ATTN + "x_proj.0.linear.weight"),
    Weight(MIXER + "mix_out.weight", ATTN + "x_proj.2.weight"),
    *(Weight(f"{MIXER}{name}.weight", f"{ATTN}{name}_proj.linear.weight") for name in "rkv"),
    Weight(MIXER + "gate.weight", ATTN + "g_proj.linear.weight"),
    Weight(MIXER + "decay.weight", ATTN + "w_proj.linear.lora.0.weight"),
    *(Weight(f"{MIXER}decay_out.{part}", f"{ATTN}w_proj.linear.lora.2.{part}") for part in PARTS),
    Weight(MIXER + "bonus", ATTN + "bonus"),
    *(Weight(f"{MIXER}norm.{part}", f"{ATTN}g_norm.{part}") for part in PARTS),
    Weight(MIXER + "out.weight", ATTN + "o_proj.weight"),
    Weight(_MLP + "mix", _FFN + "key.mu"),
    Weight(_MLP + "key.weight", _FFN + "key.linear.weight"),
    Weight(_MLP + "value.weight", _FFN + "value.weight"),
    Weight(_MLP + "gate_mix", _FFN + "receptance.mu"),
    Weight(_MLP + "gate.weight", _FFN + "receptance.linear.weight"),
)


def spec(config: Config) -> ModelSpec:
    """The description of a checkpoint with this config.json."""
    only(config, {"attn": (None, {}, []), "hidden_act": ("sqrelu",), "norm_first": (True,), "norm_bias": (True,)})
    heads, eps = given(config, "num_heads", 4), float(given(config, "norm_eps", 1e-5))
    norm = NormSpec(eps, kind="layer")
    mixer = Rwkv6Spec(
        heads=heads,
        key_dim=fla_layout.width_times(config, given(config, "expand_k", 0.5), heads, "expand_k"),
        value_dim=fla_layout.width_times(config, given(config, "expand_v", 1.0), heads, "expand_v"),
        mix_rank=given(config, "proj_low_rank_dim", 32),
        decay_rank=given(config, "gate_low_rank_dim", 64),
        eps=eps,
    )
    layer = LayerSpec(mixer, ChannelMixSpec(channels(config, 3.5), gated=True), norm)
    return ModelSpec(
        family="rwkv6",
        vocab=need(config, "vocab_size"),
        width=need(config, "hidden_size"),
        layers=(layer,) * need(config, "num_hidden_layers"),
        norm=norm,
        tied=given(config, "tie_word_embeddings", False),
        context=given(config, "max_position_embeddings", 2048),
        embed_norm=norm,
    )
