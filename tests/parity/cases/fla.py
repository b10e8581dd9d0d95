"""The models of flash-linear-attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.parity.cases.case import Case, Sizes


def _fla(model: str, v_first: bool = False, **fixed: Callable[[Sizes], Any] | Any) -> Case:
    def config(size: Sizes) -> dict[str, Any]:
        base = {
            "hidden_size": size(32, 64, 80),
            "num_hidden_layers": size(2, 3),
            "vocab_size": size(64, 131),
            "intermediate_size": size(40, 88),
        }
        return {**base, **{key: value(size) if callable(value) else value for key, value in fixed.items()}}

    return Case("fla", model, config, v_first)


def _hybrid(**more: Any) -> Callable[[Sizes], Any]:
    return lambda size: {"layers": [1], "num_heads": 4, "num_kv_heads": size(2, 1, 4), **more}


_RANKS: dict[str, Any] = {
    "decay_low_rank_dim": lambda size: size(8, 12),
    "a_low_rank_dim": lambda size: size(12, 8),
    "v_low_rank_dim": lambda size: size(4, 16),
    "gate_low_rank_dim": lambda size: size(16, 4),
}


CASES = {
    "gated_deltanet": _fla("GatedDeltaNet", True, num_heads=2, head_dim=16, expand_v=1.5),
    "gated_deltanet-hybrid": _fla(
        "GatedDeltaNet",
        True,
        num_heads=2,
        num_v_heads=lambda s: s(4, 6),
        head_dim=16,
        expand_v=1,
        attn=_hybrid(),
        allow_neg_eigval=True,
        output_gate_activation="sigmoid",
        tie_word_embeddings=True,
    ),
    "gated_deltanet-plain": _fla("GatedDeltaNet", True, num_heads=3, head_dim=12, use_gate=False, use_short_conv=False),
    "gated_deltaproduct": _fla(
        "GatedDeltaProduct",
        num_heads=2,
        head_dim=16,
        expand_v=1.5,
        num_householder=lambda s: s(3, 2, 4),
        use_forget_gate=True,
        allow_neg_eigval=True,
        attn=_hybrid(),
    ),
    "gated_deltaproduct-plain": _fla(
        "GatedDeltaProduct",
        num_heads=lambda s: s(2, 3),
        head_dim=12,
        expand_v=1,
        num_householder=2,
        use_output_gate=False,
        use_short_conv=False,
    ),
    "gated_deltaproduct-single": _fla("GatedDeltaProduct", num_heads=2, head_dim=16, tie_word_embeddings=True),
    "delta_net": _fla("DeltaNet", num_heads=2, expand_v=2.0),
    "delta_net-gate": _fla(
        "DeltaNet",
        num_heads=2,
        use_gate=True,
        qk_activation="relu",
        qk_norm="sum",
        allow_neg_eigval=True,
        attn=lambda s: [{"layers": [0], "num_heads": 4, "qkv_bias": True}],
    ),
    "delta_net-elu": _fla("DeltaNet", num_heads=2, qk_activation="elu", use_beta=False, conv_size=3),
    "delta_net-identity": _fla("DeltaNet", num_heads=2, qk_activation="identity", use_short_conv=False),
    "gla": _fla("GLA", True, num_heads=2, expand_k=0.5),
    "gla-gqa": _fla(
        "GLA",
        True,
        num_heads=4,
        num_kv_heads=lambda s: s(2, 1),
        use_short_conv=True,
        clamp_min=-0.05,
        feature_map="relu",
        tie_word_embeddings=True,
    ),
    "gla-hybrid": _fla(
        "GLA",
        True,
        num_heads=2,
        fuse_norm=False,
        elementwise_affine=False,
        attn=_hybrid(window_size=16, rope_theta=5000.0),
    ),
    "gla-nogate": _fla("GLA", True, num_heads=2, use_output_gate=False),
    "hgrn2": _fla("HGRN2", True, expand_ratio=16, attn=_hybrid(), num_hidden_layers=lambda s: s(3, 4)),
    "hgrn2-conv": _fla(
        "HGRN2",
        True,
        expand_ratio=lambda s: s(8, 16),
        use_short_conv=True,
        use_lower_bound=False,
        tie_word_embeddings=True,
    ),
    "hgrn2-heads": _fla("HGRN2", True, expand_ratio=None, num_heads=lambda s: s(2, 4), elementwise_affine=False),
    # One group: fla's fallback in torch gives head h group h % groups when it reads a prompt, unlike its kernels.
    "mamba2-fla": _fla(
        "Mamba2", True, head_dim=lambda s: s(16, 8), state_size=lambda s: s(12, 24), D_has_hdim=True, use_bias=True
    ),
    "mamba2-switches": _fla(
        "Mamba2",
        True,
        head_dim=8,
        state_size=16,
        norm_before_gate=True,
        use_conv_bias=False,
        expand=lambda s: s(1, 2),
        conv_kernel=3,
        dt_limit=(0.05, 0.2),
        tie_word_embeddings=True,
    ),
    "mamba2-normless": _fla("Mamba2", True, head_dim=16, state_size=8, rmsnorm=False),
    "comba": _fla("Comba", num_heads=2, head_dim=lambda s: s(12, 16), expand_v=1.5),
    "comba-hybrid": _fla(
        "Comba",
        num_heads=2,
        num_v_heads=lambda s: s(4, 6),
        head_dim=lambda s: s(16, 8),
        expand_v=1,
        attn=_hybrid(),
        use_output_gate=False,
        tie_word_embeddings=True,
    ),
    "comba-plain": _fla("Comba", num_heads=3, head_dim=12, use_short_conv=False),
    "gsa": _fla("GSA", num_heads=2, num_slots=lambda s: s(12, 16, 20), exapnd_k=lambda s: s(1.5, 0.5)),
    "gsa-gqa": _fla(
        "GSA",
        num_heads=4,
        num_kv_heads=lambda s: s(2, 1),
        num_slots=lambda s: s(6, 12),
        use_short_conv=True,
        feature_map="relu",
        gate_logit_normalizer=4,
        tie_word_embeddings=True,
    ),
    "gsa-hybrid": _fla(
        "GSA", num_heads=2, num_slots=None, exapnd_k=0.5, elementwise_affine=False, attn=_hybrid(window_size=16)
    ),
    "rwkv6": _fla("RWKV6", num_heads=2, proj_low_rank_dim=lambda s: s(6, 8), gate_low_rank_dim=lambda s: s(10, 16)),
    "rwkv6-square": _fla(
        "RWKV6",
        num_heads=4,
        expand_k=1,
        expand_v=lambda s: s(1.5, 0.5),
        proj_low_rank_dim=4,
        gate_low_rank_dim=8,
        fuse_norm=False,
        tie_word_embeddings=True,
    ),
    "rwkv7": _fla("RWKV7", head_dim=16, **_RANKS),
    "rwkv7-norms": _fla("RWKV7", head_dim=8, fuse_norm=False, tie_word_embeddings=True, **_RANKS),
    "retnet": _fla("RetNet", num_heads=2),
    "retnet-gqa": _fla("RetNet", num_heads=4, num_kv_heads=2, fuse_norm=False, attn=_hybrid(), feature_map="relu"),
    "linear_attn": _fla("LinearAttention", num_heads=2, expand_v=1.5),
    "linear_attn-tied": _fla("LinearAttention", num_heads=2, num_kv_heads=1, tie_feature_map_qk=True),
    "linear_attn-elu": _fla("LinearAttention", num_heads=2, feature_map="elu", norm_feature_map=True),
    "linear_attn-hedgehog": _fla(
        "LinearAttention", num_heads=2, feature_map="hedgehog", norm_feature_map=True, norm_q=True, norm_k=True
    ),
    "linear_attn-t2r": _fla("LinearAttention", num_heads=2, feature_map="t2r", attn=_hybrid()),
    "linear_attn-dpfp": _fla("LinearAttention", num_heads=4, feature_map="dpfp", norm_k=True, elementwise_affine=False),
    "linear_attn-relu": _fla("LinearAttention", num_heads=2, feature_map="relu", norm_q=True),
    "linear_attn-identity": _fla("LinearAttention", num_heads=2, feature_map="identity"),
    "kda": _fla("KDA", True, num_heads=2, head_dim=16, expand_v=1.5),
    "kda-bound": _fla(
        "KDA",
        True,
        num_heads=2,
        num_v_heads=4,
        head_dim=12,
        safe_gate=True,
        lower_bound=lambda s: s(-0.8, -1.5),
        allow_neg_eigval=True,
    ),
    "kda-hybrid": _fla("KDA", True, num_heads=2, head_dim=16, use_short_conv=False, attn=_hybrid()),
}
