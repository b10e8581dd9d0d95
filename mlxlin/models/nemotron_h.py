"""Nemotron-H: layers that are one part each, of Mamba-2, softmax attention, feed-forward or mixture (arXiv:2504.03624).

Layers are named by a string (M, *, -, E) or by a list. Attention has no positional embedding. As in NVIDIA's own code,
time steps are kept within `time_step_limit`; transformers 5 reads `time_step_min` instead, and only in prompts.
"""

from __future__ import annotations

from mlxlin.errors import CheckpointError
from mlxlin.models.common_layout import KINDS, LAYER, MLP, MTP, attention_weights, frame_weights, grouped_attention
from mlxlin.models.config import Config, either, given, need, only
from mlxlin.models.mamba_layout import mixer, mixer_weights
from mlxlin.models.rules import Weight
from mlxlin.models.spec import AttentionSpec, LayerSpec, LinearSpec, MlpSpec, ModelSpec, MoeSpec, NormSpec
from mlxlin.models.values import STACK

SERVES = (("nemotron_h", None),)
PREFIXES = ("backbone.", "model.")
DROPS = (MTP,)

_SOURCE = LAYER + "mixer."
_EXPERTS = (("up", "fc1"), ("down", "fc2"))
WEIGHTS = (
    *frame_weights(embed="embeddings", norm="norm_f", mixer_norm="norm", mlp_norm="norm"),
    *mixer_weights(_SOURCE),
    *attention_weights(_SOURCE),
    *(
        Weight(f"{MLP}{target}.{kind}", f"{_SOURCE}{source}.{kind}")
        for target, source in (
            ("up", "up_proj"),
            ("down", "down_proj"),
            ("shared.up", "shared_experts.up_proj"),
            ("shared.down", "shared_experts.down_proj"),
            ("latent_in", "fc1_latent_proj"),
            ("latent_out", "fc2_latent_proj"),
        )
        for kind in KINDS
    ),
    Weight(MLP + "router.weight", _SOURCE + "gate.weight"),
    Weight(MLP + "correction", _SOURCE + "gate.e_score_correction_bias"),
    *(Weight(f"{MLP}experts.{p}.weight", f"{_SOURCE}experts.{{e}}.{p}_proj.weight", STACK) for p, _ in _EXPERTS),
    *(Weight(f"{MLP}experts.{part}.weight", f"{_SOURCE}experts.{part}_proj") for part, _ in _EXPERTS),
    *(Weight(f"{MLP}experts.{part}.weight", f"{_SOURCE}switch_mlp.{fc}.weight") for part, fc in _EXPERTS),
)
_LETTERS = {"M": "linear", "*": "attention", "-": "mlp", "E": "moe"}
_NAMES = {"linear_attention": "linear", "mamba": "linear", "full_attention": "attention"}


def spec(config: Config) -> ModelSpec:
    """The description of a checkpoint with this config.json."""
    only(config, {"mlp_hidden_act": ("relu2",), "mamba_hidden_act": ("silu",), "sliding_window": (None,)})
    norm = NormSpec(float(given(config, "layer_norm_epsilon", given(config, "norm_eps", 1e-5))))
    kinds = _kinds(config)
    layers = {kind: _layer(kind, config, norm) for kind in set(kinds)}
    return ModelSpec(
        family="nemotron_h",
        vocab=need(config, "vocab_size"),
        width=need(config, "hidden_size"),
        layers=tuple(layers[kind] for kind in kinds),
        norm=norm,
        tied=given(config, "tie_word_embeddings", False),
        context=given(config, "max_position_embeddings", 4096),
    )


def _kinds(config: Config) -> list[str]:
    """Kind of each layer; the list decides where both spellings are there."""
    named = given(config, "layers_block_type", given(config, "layer_types", None, list[str]), list[str])
    kinds = list(need(config, "hybrid_override_pattern", str)) if named is None else named
    known = [_LETTERS.get(kind) if named is None else _NAMES.get(kind, kind) for kind in kinds]
    if unknown := [kind for kind, name in zip(kinds, known, strict=True) if name not in _LETTERS.values()]:
        raise CheckpointError(f"config.json names a layer {unknown[0]!r}, which Nemotron-H does not have.")
    return [str(kind) for kind in known]


def _layer(kind: str, config: Config, norm: NormSpec) -> LayerSpec:
    if kind == "linear":
        return LayerSpec(_mamba(config, norm.eps), None, norm)
    if kind == "attention":
        return LayerSpec(_attention(config), None, norm)
    bias = given(config, "mlp_bias", False)
    if kind == "moe":
        return LayerSpec(None, _mixture(config, bias), norm)
    return LayerSpec(None, MlpSpec(need(config, "intermediate_size"), "relu2", bias), norm)


def _mamba(config: Config, eps: float) -> LinearSpec:
    return mixer(
        heads=need(config, "mamba_num_heads"),
        head_dim=given(config, "mamba_head_dim", 64),
        groups=given(config, "n_groups", given(config, "mamba_n_groups", 8)),
        state_dim=given(config, "ssm_state_size", 128),
        eps=eps,
        taps=given(config, "conv_kernel", given(config, "mamba_d_conv", 4)),
        conv_bias=given(config, "use_conv_bias", given(config, "mamba_conv_bias", True)),
        bias=given(config, "use_bias", False),
        limits=config.get("time_step_limit", config.get("mamba_dt_limit")),
    )


def _attention(config: Config) -> AttentionSpec:
    return grouped_attention(config, given(config, "head_dim", given(config, "attention_head_dim", 128)), rope=None)


def _mixture(config: Config, bias: bool) -> MoeSpec:
    return MoeSpec(
        experts=either(config, "n_routed_experts", "num_local_experts"),
        active=need(config, "num_experts_per_tok"),
        hidden=need(config, "moe_intermediate_size"),
        score="sigmoid",
        correction=True,
        exact_router=True,
        groups=given(config, "n_group", 1),
        groups_kept=given(config, "topk_group", 1),
        normalized=given(config, "norm_topk_prob", True),
        factor=float(given(config, "routed_scaling_factor", 1.0)),
        shared=need(config, "moe_shared_expert_intermediate_size"),
        form="relu2",
        latent=given(config, "moe_latent_size", 0),
        bias=bias,
    )
