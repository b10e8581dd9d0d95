"""Mamba-2 alone, as its authors, transformers and flash-linear-attention write it (Dao & Gu 2024, arXiv:2405.21060)."""

from __future__ import annotations

from dataclasses import replace

from mlxlin.errors import CheckpointError
from mlxlin.models.config import Config, given, need, only
from mlxlin.models.mamba_layout import mixer, mixer_weights
from mlxlin.models.rules import Weight
from mlxlin.models.spec import LayerSpec, LinearSpec, ModelSpec, NormSpec

SERVES = (("mamba2", None),)
PREFIXES = ("backbone.", "model.")
DROPS: tuple[tuple[str, str], ...] = ()
WEIGHTS = (
    Weight("embed.weight", "embeddings.weight"),
    Weight("embed.weight", "embedding.weight"),
    Weight("norm.weight", "norm_f.weight"),
    Weight("head.weight", "lm_head.weight"),
    Weight("layers.{i}.mixer_norm.weight", "layers.{i}.norm.weight"),
    *mixer_weights("layers.{i}.mixer."),
)
_RENAMED = {
    "headdim": "head_dim",
    "d_state": "state_size",
    "d_conv": "conv_kernel",
    "ngroups": "n_groups",
    "bias": "use_bias",
    "conv_bias": "use_conv_bias",
}
_UNLIMITED = 1 << 20  # nothing in the model ends with a length, and configs do not name the one it was trained on


def spec(config: Config) -> ModelSpec:
    """The description of a checkpoint with this config.json."""
    config = _authors(config) if "ssm_cfg" in config else config
    only(config, {"hidden_act": ("silu", "swish")})
    norm = NormSpec(float(given(config, "layer_norm_epsilon", given(config, "norm_eps", 1e-5))))
    layer = LayerSpec(_mixer(config, norm.eps), None, norm)
    return ModelSpec(
        family="mamba2",
        vocab=need(config, "vocab_size"),
        width=need(config, "hidden_size"),
        layers=(layer,) * need(config, "num_hidden_layers"),
        norm=norm,
        tied=given(config, "tie_word_embeddings", False),
        context=given(config, "max_position_embeddings", _UNLIMITED),
    )


def _authors(config: Config) -> Config:
    """The config of the authors' code in the words of flash-linear-attention, whose switches are the same."""
    only(config, {"attn_layer_idx": ([], None), "d_intermediate": (0, None), "rms_norm": (True,)})
    vocab, multiple = need(config, "vocab_size"), given(config, "pad_vocab_size_multiple", 8)
    mixer_keys = {_RENAMED.get(key, key): value for key, value in need(config, "ssm_cfg", dict).items()}
    return {
        **mixer_keys,
        "norm_eps": 1e-5,
        "hidden_size": need(config, "d_model"),
        "num_hidden_layers": need(config, "n_layer"),
        "vocab_size": -(-vocab // multiple) * multiple,
        "tie_word_embeddings": given(config, "tie_embeddings", True),
    }


def _mixer(config: Config, eps: float) -> LinearSpec:
    fla = "norm_eps" in config
    head_dim = given(config, "head_dim", 64)
    width = int(given(config, "expand", 2.0) * need(config, "hidden_size"))
    if width % head_dim or given(config, "num_heads", width // head_dim) * head_dim != width:
        raise CheckpointError("config.json: num_heads x head_dim is not hidden_size x expand.")
    spec = mixer(
        heads=width // head_dim,
        head_dim=head_dim,
        groups=given(config, "n_groups", 1 if fla else 8),
        state_dim=given(config, "state_size", 128),
        eps=eps,
        taps=given(config, "conv_kernel", 4),
        conv_bias=given(config, "use_conv_bias", True),
        bias=given(config, "use_bias", False),
        limits=config.get("dt_limit" if fla else "time_step_limit"),
    )
    return _switched(spec, config) if fla else spec


def _switched(spec: LinearSpec, config: Config) -> LinearSpec:
    """`spec` with what only flash-linear-attention obeys; transformers stores some of these keys and ignores them."""
    output = replace(spec.output, gate_first=not given(config, "norm_before_gate", False))
    if not given(config, "rmsnorm", True):
        output = replace(output, norm=None)
    return replace(spec, output=output, skip="channel" if given(config, "D_has_hdim", False) else "head")
