"""The Qwen3.5 text layout in plain torch operations; parameter names are those of the checkpoint.

Gated delta rule in its chunk-parallel form: Yang et al., "Gated Delta Networks", 2024 (arXiv:2412.06464).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHUNK = 64

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": 4096,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "full_attention_interval": 4,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 3,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    "initializer_range": 0.02,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 3,
    "dtype": "bfloat16",
}


def unit_lower_inverse(a: Tensor) -> Tensor:
    """(I - A)^-1 of strictly lower triangular A [..., C, C]: (I + A)(I + A^2)(I + A^4)..."""
    inverse, power, reached = torch.eye(a.shape[-1], device=a.device) + a, a, 2
    while reached < a.shape[-1]:
        power = power @ power
        inverse = inverse + inverse @ power
        reached *= 2
    return inverse


def gated_delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """S_t = exp(g_t) S_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T, o_t = S_t q_t, from S = 0.

    q, k [B, H, T, K] with unit keys, v [B, H, T, V], g (log decay) and beta [B, H, T]; returns [B, H, T, V].
    """
    B, H, T, _ = q.shape
    if pad := -T % CHUNK:
        q, k, v = (F.pad(x, (0, 0, 0, pad)) for x in (q, k, v))
        g, beta = (F.pad(x, (0, pad)) for x in (g, beta))
    q, k, v = (x.reshape(B, H, -1, CHUNK, x.shape[-1]) for x in (q, k, v))
    total = g.reshape(B, H, -1, CHUNK).cumsum(-1)
    beta = beta.reshape(B, H, -1, CHUNK, 1)
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(~lower, -torch.inf).exp()
    inverse = unit_lower_inverse((-(k * beta) @ k.mT * decay).tril(-1).float())
    values, keys = inverse @ (v * beta), inverse @ (k * beta * total.exp()[..., None])
    scores = q @ k.mT * decay
    from_state = q * total.exp()[..., None]
    into_state = k * (total[..., -1:] - total).exp()[..., None]
    kept = total[..., -1].exp()[..., None, None]
    state = torch.zeros(B, H, q.shape[-1], v.shape[-1], device=q.device)
    outputs = []
    for n in range(q.shape[2]):
        new = values[:, :, n] - keys[:, :, n] @ state
        outputs.append(from_state[:, :, n] @ state + scores[:, :, n] @ new)
        state = state * kept[:, :, n] + into_state[:, :, n].mT @ new
    return torch.cat(outputs, 2)[:, :, :T]


class RMSNorm(nn.Module):
    """Root-mean-square norm with the weight stored as its distance from one."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], 1 + self.weight, 1e-6).to(x.dtype)


class GatedRMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], self.weight, 1e-6) * F.silu(gate.float())


class GatedDeltaNet(nn.Module):
    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        self.heads, self.k_dim, self.v_dim = (
            c["linear_num_value_heads"],
            c["linear_key_head_dim"],
            c["linear_value_head_dim"],
        )
        self.kernel = c["linear_conv_kernel_dim"]
        width, values = self.heads * (2 * self.k_dim + self.v_dim), self.heads * self.v_dim
        hidden = c["hidden_size"]
        self.in_proj_qkv = nn.Linear(hidden, width, bias=False)
        self.in_proj_z = nn.Linear(hidden, values, bias=False)
        self.in_proj_b = nn.Linear(hidden, self.heads, bias=False)
        self.in_proj_a = nn.Linear(hidden, self.heads, bias=False)
        self.conv1d = nn.Conv1d(width, width, self.kernel, groups=width, bias=False)
        self.A_log = nn.Parameter(torch.empty(self.heads).uniform_(1, 16).log())
        step = torch.exp(torch.empty(self.heads).uniform_(math.log(1e-3), math.log(1e-1)))
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))  # softplus(dt_bias) = step
        self.norm = GatedRMSNorm(self.v_dim)
        self.out_proj = nn.Linear(values, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        mixed = F.pad(self.in_proj_qkv(x), (0, 0, self.kernel - 1, 0))
        taps = self.conv1d.weight[:, 0]  # shifted multiply-adds are faster on a CPU than a grouped convolution
        mixed = F.silu(sum((mixed[:, i : i + T] * taps[:, i] for i in range(self.kernel)), torch.zeros(())))
        keys = self.heads * self.k_dim
        q, k, v = (
            part.reshape(B, T, self.heads, -1).transpose(1, 2).float()
            for part in mixed.split([keys, keys, self.heads * self.v_dim], -1)
        )
        q, k = (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + 1e-6) for part in (q, k))
        beta = self.in_proj_b(x).float().sigmoid().transpose(1, 2)
        g = -self.A_log.exp() * F.softplus(self.in_proj_a(x).float() + self.dt_bias)
        o = gated_delta(q * self.k_dim**-0.5, k, v, g.transpose(1, 2), beta).transpose(1, 2)
        o = self.norm(o, self.in_proj_z(x).reshape(B, T, self.heads, -1)).to(x.dtype)
        return self.out_proj(o.reshape(B, T, -1))


class GatedAttention(nn.Module):
    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        self.rotary = int(self.head_dim * c["rope_parameters"]["partial_rotary_factor"])
        self.theta = c["rope_parameters"]["rope_theta"]
        hidden, width = c["hidden_size"], self.heads * self.head_dim
        self.q_proj = nn.Linear(hidden, 2 * width, bias=False)
        self.k_proj = nn.Linear(hidden, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(width, hidden, bias=False)
        self.q_norm, self.k_norm = RMSNorm(self.head_dim), RMSNorm(self.head_dim)

    def rope(self, x: Tensor) -> Tensor:
        frequency = self.theta ** (-torch.arange(0, self.rotary, 2).float() / self.rotary)
        angle = torch.outer(torch.arange(x.shape[2]).float(), frequency)
        cos, sin = torch.cat([angle, angle], -1).cos(), torch.cat([angle, angle], -1).sin()
        turned, rest = x[..., : self.rotary], x[..., self.rotary :]
        first, second = turned.chunk(2, -1)
        return torch.cat([(turned * cos + torch.cat([-second, first], -1) * sin).to(x.dtype), rest], -1)

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        q, gate = self.q_proj(x).reshape(B, T, self.heads, 2 * self.head_dim).chunk(2, -1)
        k, v = (p(x).reshape(B, T, self.kv_heads, self.head_dim).transpose(1, 2) for p in (self.k_proj, self.v_proj))
        q, k = self.rope(self.q_norm(q).transpose(1, 2)), self.rope(self.k_norm(k))
        o = F.scaled_dot_product_attention(q, k, v.to(q.dtype), is_causal=True, enable_gqa=True)
        return self.o_proj((o.transpose(1, 2).reshape(B, T, -1) * gate.reshape(B, T, -1).sigmoid()).to(x.dtype))


class MLP(nn.Module):
    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c["hidden_size"], c["intermediate_size"], bias=False)
        self.up_proj = nn.Linear(c["hidden_size"], c["intermediate_size"], bias=False)
        self.down_proj = nn.Linear(c["intermediate_size"], c["hidden_size"], bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, c: dict[str, Any], kind: str) -> None:
        super().__init__()
        self.kind = kind
        if kind == "linear_attention":
            self.linear_attn = GatedDeltaNet(c)
        else:
            self.self_attn = GatedAttention(c)
        self.mlp = MLP(c)
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(c["hidden_size"]), RMSNorm(c["hidden_size"])

    def forward(self, x: Tensor) -> Tensor:
        mixer = self.linear_attn if self.kind == "linear_attention" else self.self_attn
        x = x + mixer(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Backbone(nn.Module):
    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.ModuleList(Layer(c, kind) for kind in c["layer_types"])
        self.norm = RMSNorm(c["hidden_size"])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class LanguageModel(nn.Module):
    """Logits [B, T, vocab] from ids [B, T]; the head is the embedding."""

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        self.model = Backbone(c)
        deep = 2 / math.sqrt(2 * c["num_hidden_layers"])
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                scale = 0.5 * deep if name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight")) else 1.0
                std = 0.02 if "embed" in name else scale * c["hidden_size"] ** -0.5
                nn.init.normal_(weight, std=std)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.model(ids))

    def head(self, x: Tensor) -> Tensor:
        return F.linear(x, self.model.embed_tokens.weight)


def masked_loss(model: LanguageModel, ids: Tensor, mask: Tensor) -> Tensor:
    """Mean cross entropy of the next tokens that ``mask`` marks; ids and mask [B, T + 1], mask boolean.

    The head, a quarter of the work, runs for those tokens only.
    """
    marked = mask[:, 1:]
    return F.cross_entropy(model.head(model.model(ids[:, :-1])[marked]), ids[:, 1:][marked])
