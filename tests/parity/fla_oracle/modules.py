"""The parts of fla's models around the recurrences, as torch's own norms, convolutions, rotations and attention."""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.nn.functional as F

from tests.parity.fla_oracle.recurrences import grouped, unit


def rms(x: torch.Tensor, weight: Any, bias: Any, eps: float) -> torch.Tensor:
    y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    y = y if weight is None else y * weight.float()
    return y if bias is None else y + bias.float()


def _with_residual(function: Any) -> Any:
    def forward(self, x, residual=None, prenorm=False, residual_in_fp32=False):  # type: ignore[no-untyped-def]
        x = x if residual is None else x + residual
        y = function(self, x).to(x.dtype)
        return (y, x) if prenorm else y

    return forward


def _group_norm(self: Any, x: torch.Tensor) -> torch.Tensor:
    parts = x.float().unflatten(-1, (self.num_groups, -1))
    plain = getattr(self, "is_rms_norm", False)
    y = rms(parts, None, None, self.eps) if plain else F.layer_norm(parts, parts.shape[-1:], None, None, self.eps)
    y = y.flatten(-2)
    y = y if self.weight is None else y * self.weight.float()
    return y if self.bias is None else y + self.bias.float()


def _gated_norm(self, x, g, residual=None, prenorm=False, residual_in_fp32=False):  # type: ignore[no-untyped-def]
    gate = F.silu(g.float()) if self.activation in ("swish", "silu") else g.float().sigmoid()
    return (rms(x, self.weight, self.bias, self.eps) * gate).to(x.dtype)


def _convolution(self, x, residual=None, mask=None, cache=None, output_final_state=False, **_):  # type: ignore[no-untyped-def]
    size = self.kernel_size[0]
    new = x.transpose(1, 2)
    old = new.new_zeros(x.shape[0], self.hidden_size, size) if cache is None else cache
    window = torch.cat([old, new], -1)  # the source keeps `size` columns, one more than the convolution reads
    y = F.conv1d(window[..., 1:], self.weight, self.bias, groups=self.hidden_size)
    y = (F.silu(y) if self.activation is not None else y).transpose(1, 2)
    return y if residual is None else y + residual, window[..., -size:].clone() if output_final_state else None


def causal_convolution(x, weight, bias=None, activation=None, **_):  # type: ignore[no-untyped-def]
    y = F.conv1d(F.pad(x.transpose(1, 2), (weight.shape[-1] - 1, 0)), weight[:, None], bias, groups=weight.shape[0])
    return (F.silu(y) if activation else y).transpose(1, 2), None


def _rotary(self, q, k, seqlen_offset=0, **_):  # type: ignore[no-untyped-def]
    frequencies = 1.0 / (self.base ** (torch.arange(0, self.dim, 2).double() / self.dim))
    angles = (torch.arange(q.shape[1]).double() + seqlen_offset)[:, None] * frequencies
    cos, sin = angles.cos()[None, :, None], angles.sin()[None, :, None]

    def turn(x: torch.Tensor) -> torch.Tensor:
        one, two = x[..., : self.dim // 2].double(), x[..., self.dim // 2 : self.dim].double()
        return torch.cat([one * cos - two * sin, two * cos + one * sin, x[..., self.dim :].double()], -1).to(x.dtype)

    return turn(q), turn(k)


def token_shift(x, cu_seqlens=None, cache=None, output_cache=False, **_):  # type: ignore[no-untyped-def]
    before = torch.zeros_like(x[:, :1]) if cache is None else cache[:, None].to(x)
    shifted = torch.cat([before, x[:, :-1]], 1) - x
    return (shifted, x[:, -1]) if output_cache else shifted


def attention(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), **_):  # type: ignore[no-untyped-def]
    """flash_attn_func: q [B, T, H, D], k and v [B, S, HK, D]; the last query aligned with the last key."""
    heads, (length, total) = q.shape[2], (q.shape[1], k.shape[1])
    k, v = grouped(k, heads), grouped(v, heads)
    scores = torch.einsum("bthd,bshd->bhts", q.double(), k.double()) * (softmax_scale or q.shape[-1] ** -0.5)
    query, key = torch.arange(length)[:, None] + total - length, torch.arange(total)[None]
    seen = (key <= query) if causal else torch.ones(length, total, dtype=torch.bool)
    if window_size[0] >= 0:
        seen = seen & (key >= query - window_size[0])
    return torch.einsum("bhts,bshd->bthd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v.double()).to(q.dtype)


# Names that fla's modules import -> what stands in for them.
FUNCTIONS: dict[str, Any] = {
    "elu_p1": lambda x: F.elu(x) + 1,
    "swish": F.silu,
    "sigmoid": torch.sigmoid,
    "sqrelu": lambda x: F.relu(x).square(),
    "l2_norm": unit,
    "l2norm": unit,
    "swiglu": lambda x, y: F.silu(x) * y,
    "swiglu_linear": lambda x, y, weight, bias: F.linear(F.silu(x) * y, weight, bias),
    "token_shift": token_shift,
    "causal_conv1d": causal_convolution,
    "rms_norm_linear": lambda x, w, b, lw, lb, residual=None, eps=1e-5, **_: F.linear(rms(x, w, b, eps), lw, lb),
    "fused_addcmul_rwkv7": lambda x, d, *mixes: tuple(x + d * mix for mix in mixes),
    "fused_k_rwkv7": lambda k, a, k_a, *_: k + k * (a - 1) * k_a,
    "gate_output_correction": lambda o, r, k, r_k, v, g: (
        (o + ((r * k * r_k).sum(-1, keepdim=True) * v).reshape(o.shape)) * g
    ),
    "flash_attn_func": attention,
}


def replace() -> None:
    """Give fla's module classes and its table of activations forward passes in plain torch."""
    norm = importlib.import_module("fla.modules.norm.layernorm")
    norm.RMSNorm.forward = _with_residual(lambda self, x: rms(x, self.weight, self.bias, self.eps))
    norm.LayerNorm.forward = _with_residual(
        lambda self, x: F.layer_norm(x.float(), x.shape[-1:], self.weight, self.bias, self.eps)
    )
    norm.GroupNorm.forward = _with_residual(_group_norm)
    importlib.import_module("fla.modules.norm.fused_norm_gate").FusedRMSNormGated.forward = _gated_norm
    gated = importlib.import_module("fla.modules.norm.layernorm_gated")
    gated.rmsnorm_fn = gated.rms_norm_ref
    importlib.import_module("fla.modules.causal_conv1d.ops").ShortConvolution.forward = _convolution
    importlib.import_module("fla.modules.rotary.ops").RotaryEmbedding.forward = _rotary
    activations = importlib.import_module("fla.modules.activations.ops").ACT2FN
    plain = {
        "swish": F.silu,
        "silu": F.silu,
        "sigmoid": torch.sigmoid,
        "relu": F.relu,
        "sqrelu": lambda x: F.relu(x) ** 2,
    }
    activations.update({name: plain[name] for name in activations if name in plain})
