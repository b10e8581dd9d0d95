"""Ring 2.0 linear and Ling 2.5, which no library in reach implements as their own code does: two independent programs.

`Model` follows the authors' published code (modeling_bailing_moe_v2_5.py of inclusionAI) step by step, in float64,
and makes the expected values. `check` lets mlx-lm's modules run the same checkpoint in float32 and compares. mlx-lm's
decays are those of the authors' code but for the count of layers (from 0 for Ling 2.5, not below 0 for Ring 2.0, where
the authors count from -1): that is checked, and the authors' are handed to it.
"""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Tensors = dict[str, Array]
AGREEMENT = 1e-4  # of logits of order one, float32 against float64
_MODULES = {"BailingMoeLinearV2": "bailing_moe_linear", "BailingMoeV2_5": "bailing_hybrid"}


def slopes(config: dict[str, Any], layer: int) -> list[float]:
    """Log decay of each head, as the authors' code has it."""

    def series(heads: int) -> list[float]:
        if math.log2(heads).is_integer():
            start = 2 ** (-(2 ** -(math.log2(heads) - 3)))
            return [start * start**head for head in range(heads)]
        below = 2 ** math.floor(math.log2(heads))
        return series(below) + series(2 * below)[0::2][: heads - below]

    factor = 1 - (layer - 1) / (config["num_hidden_layers"] - 1) + 1e-5
    return [-slope * factor for slope in series(config["num_attention_heads"])]


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def silu(x: Array) -> Array:
    return x * sigmoid(x)


def rms(x: Array, weight: Array | None, eps: float) -> Array:
    y = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
    return y if weight is None else y * weight


def rotate(x: Array, dims: int, base: float, interleaved: bool = False) -> Array:
    """x [T, H, d] with its first `dims` channels turned by position."""
    angles = np.arange(len(x))[:, None] * base ** (-np.arange(0, dims, 2) / dims)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    y = x.copy()
    if interleaved:
        one, two = x[..., 0:dims:2], x[..., 1:dims:2]
        y[..., 0:dims:2], y[..., 1:dims:2] = one * cos - two * sin, two * cos + one * sin
    else:
        one, two = x[..., : dims // 2], x[..., dims // 2 : dims]
        y[..., :dims] = np.concatenate([one * cos - two * sin, two * cos + one * sin], axis=-1)
    return y


def attend(q: Array, k: Array, v: Array, scale: float) -> Array:
    """Causal softmax attention, [T, H, d] each."""
    scores = np.einsum("thd,shd->hts", q, k) * scale
    scores = np.where(np.tri(len(q), dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hts,shd->thd", weights / weights.sum(-1, keepdims=True), v)


class Model:
    """One sequence after the other, in float64."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, Any]) -> None:
        self.config = config
        self.tensors: Tensors = {name: np.asarray(array, np.float64) for name, array in tensors.items()}
        self.latent = config["architectures"] == ["BailingMoeV2_5ForCausalLM"]

    def __call__(self, ids: npt.NDArray[np.int32]) -> tuple[Array, Tensors]:
        """ids [T] -> logits [T, vocab] and the matrices S [H, V, K] of the layers that have one."""
        config, eps = self.config, self.config["rms_norm_eps"]
        embedding, states = self.tensors["model.word_embeddings.weight"], {}
        x = embedding[ids]
        group, count = config["layer_group_size"], config["num_hidden_layers"]
        for layer in range(count):
            normed = rms(x, self.of(layer, "input_layernorm"), eps)
            if (layer + 1) % group == 0 or layer >= count // group * group:
                mixed = self.latent_attention(layer, normed) if self.latent else self.attention(layer, normed)
            else:
                mixed, states[f"layers.{layer}.S"] = self.lightning(layer, normed)
            x = x + mixed
            normed = rms(x, self.of(layer, "post_attention_layernorm"), eps)
            dense = layer < config["first_k_dense_replace"]
            x = x + (self.mlp(f"{layer}.mlp", normed) if dense else self.experts(layer, normed))
        head = self.tensors.get("lm_head.weight", embedding)
        return rms(x, self.tensors["model.norm.weight"], eps) @ head.T, states

    def of(self, layer: int, name: str) -> Array:
        return self.tensors[f"model.layers.{layer}.{name}.weight"]

    def split(self, layer: int, x: Array, kv_heads: int) -> list[Array]:
        """q, k and v [T, H, d] of one projection, q and k normalised and turned."""
        config, dim = self.config, self.config["head_dim"]
        projected = (x @ self.of(layer, "attention.query_key_value").T).reshape(len(x), -1, dim)
        heads = config["num_attention_heads"]
        q, k, v = np.split(projected, [heads, heads + kv_heads], axis=1)
        if config["use_qk_norm"]:
            q = rms(q, self.of(layer, "attention.query_layernorm"), config["rms_norm_eps"])
            k = rms(k, self.of(layer, "attention.key_layernorm"), config["rms_norm_eps"])
        dims, base = int(dim * config["partial_rotary_factor"]), config["rope_theta"]
        return [rotate(q, dims, base), rotate(k, dims, base), v]

    def lightning(self, layer: int, x: Array) -> tuple[Array, Array]:
        config, heads, dim = self.config, self.config["num_attention_heads"], self.config["head_dim"]
        q, k, v = self.split(layer, x, heads)
        decay = np.exp(slopes(config, layer))[:, None, None]
        S, y = np.zeros((heads, dim, dim)), np.zeros_like(v)
        for t in range(len(x)):
            S = S * decay + v[t][:, :, None] * k[t][:, None, :]
            y[t] = np.einsum("hvk,hk->hv", S, q[t]) * dim**-0.5
        parts = y.reshape(len(x), config["group_norm_size"], -1)
        y = rms(parts, None, config["rms_norm_eps"]).reshape(len(x), -1) * self.of(layer, "attention.g_norm")
        return (y * sigmoid(x @ self.of(layer, "attention.g_proj").T)) @ self.of(layer, "attention.dense").T, S

    def attention(self, layer: int, x: Array) -> Array:
        config, kv_heads = self.config, self.config["num_key_value_heads"]
        q, k, v = self.split(layer, x, kv_heads)
        k, v = (np.repeat(z, config["num_attention_heads"] // kv_heads, axis=1) for z in (k, v))
        y = attend(q, k, v, config["head_dim"] ** -0.5)
        return y.reshape(len(x), -1) @ self.of(layer, "attention.dense").T

    def latent_attention(self, layer: int, x: Array) -> Array:
        config, heads = self.config, self.config["num_attention_heads"]
        plain, turned, rank = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["kv_lora_rank"]
        if config["q_lora_rank"] is None:
            q = x @ self.of(layer, "attention.q_proj").T
        else:
            q = rms(x @ self.of(layer, "attention.q_a_proj").T, self.of(layer, "attention.q_a_layernorm"), 1e-6)
            q = q @ self.of(layer, "attention.q_b_proj").T
        q = q.reshape(len(x), heads, plain + turned)
        latent, key = np.split(x @ self.of(layer, "attention.kv_a_proj_with_mqa").T, [rank], axis=-1)
        expanded = rms(latent, self.of(layer, "attention.kv_a_layernorm"), 1e-6)
        expanded = (expanded @ self.of(layer, "attention.kv_b_proj").T).reshape(len(x), heads, -1)
        k, v = np.split(expanded, [plain], axis=-1)
        base = config["rope_theta"]
        shared = np.repeat(rotate(key[:, None], turned, base, interleaved=True), heads, axis=1)
        q = np.concatenate([q[..., :plain], rotate(q[..., plain:], turned, base, interleaved=True)], axis=-1)
        y = attend(q, np.concatenate([k, shared], axis=-1), v, (plain + turned) ** -0.5)
        return y.reshape(len(x), -1) @ self.of(layer, "attention.dense").T

    def mlp(self, name: str, x: Array) -> Array:
        gate, up, down = (self.tensors[f"model.layers.{name}.{part}_proj.weight"] for part in ("gate", "up", "down"))
        return (silu(x @ gate.T) * (x @ up.T)) @ down.T

    def experts(self, layer: int, x: Array) -> Array:
        config, groups = self.config, self.config["n_group"]
        scores = sigmoid(x @ self.of(layer, "mlp.gate").T)
        wanted = scores + self.tensors[f"model.layers.{layer}.mlp.gate.expert_bias"]
        grouped = wanted.reshape(len(x), groups, -1)
        strength = np.sort(grouped, axis=-1)[..., -2:].sum(-1)
        kept = np.argsort(-strength, axis=-1)[:, : config["topk_group"]]
        allowed = np.zeros_like(strength, dtype=bool)
        np.put_along_axis(allowed, kept, True, axis=-1)
        wanted = np.where(allowed[..., None], grouped, -np.inf).reshape(wanted.shape)
        y = np.zeros_like(x)
        for t, best in enumerate(np.argsort(-wanted, axis=-1)[:, : config["num_experts_per_tok"]]):
            weights = scores[t, best] / scores[t, best].sum() * config["routed_scaling_factor"]
            for expert, weight in zip(best, weights, strict=True):
                y[t] += weight * self.mlp(f"{layer}.mlp.experts.{expert}", x[t : t + 1])[0]
        return y + self.mlp(f"{layer}.mlp.shared_experts", x) if config["num_shared_experts"] else y


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint, named as on the hub."""
    width, heads, dim = config["hidden_size"], config["num_attention_heads"], config["head_dim"]
    count, group = config["num_hidden_layers"], config["layer_group_size"]
    found: dict[str, tuple[int, ...]] = {"model.word_embeddings.weight": (config["vocab_size"], width)}
    for layer in range(count):
        full = (layer + 1) % group == 0 or layer >= count // group * group
        parts: dict[str, tuple[int, ...]] = {"input_layernorm": (width,), "post_attention_layernorm": (width,)}
        if full and config["architectures"] == ["BailingMoeV2_5ForCausalLM"]:
            query = heads * (config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
            rank, low = config["kv_lora_rank"], config["q_lora_rank"]
            if low is None:
                parts["attention.q_proj"] = (query, width)
            else:
                parts |= {"attention.q_a_proj": (low, width), "attention.q_a_layernorm": (low,)}
                parts["attention.q_b_proj"] = (query, low)
            parts["attention.kv_a_proj_with_mqa"] = (rank + config["qk_rope_head_dim"], width)
            parts["attention.kv_a_layernorm"] = (rank,)
            parts["attention.kv_b_proj"] = (heads * (config["qk_nope_head_dim"] + config["v_head_dim"]), rank)
            parts["attention.dense"] = (width, heads * config["v_head_dim"])
        else:
            kv_heads = config["num_key_value_heads"] if full else heads
            parts["attention.query_key_value"] = ((heads + 2 * kv_heads) * dim, width)
            parts["attention.dense"] = (width, heads * dim)
            if config["use_qk_norm"]:
                parts |= {"attention.query_layernorm": (dim,), "attention.key_layernorm": (dim,)}
            if not full:
                parts |= {"attention.g_proj": (heads * dim, width), "attention.g_norm": (heads * dim,)}
        hidden = config["moe_intermediate_size"]
        if layer < config["first_k_dense_replace"]:
            parts |= _feed_forward("mlp", width, config["intermediate_size"])
        else:
            parts["mlp.gate"] = (config["num_experts"], width)
            for expert in range(config["num_experts"]):
                parts |= _feed_forward(f"mlp.experts.{expert}", width, hidden)
            if shared := hidden * config["num_shared_experts"]:
                parts |= _feed_forward("mlp.shared_experts", width, shared)
            found[f"model.layers.{layer}.mlp.gate.expert_bias"] = (config["num_experts"],)
        found |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in parts.items()}
    found["model.norm.weight"] = (width,)
    return found if config["tie_word_embeddings"] else found | {"lm_head.weight": (config["vocab_size"], width)}


def _feed_forward(name: str, width: int, hidden: int) -> dict[str, tuple[int, ...]]:
    wide = {f"{name}.{part}_proj": (hidden, width) for part in ("gate", "up")}
    return {**wide, f"{name}.down_proj": (width, hidden)}


def draw(config: dict[str, Any], rng: np.random.Generator) -> dict[str, npt.NDArray[np.float32]]:
    """Random float32 weights with signals of order one."""
    tensors = {}
    for name, shape in shapes(config).items():
        noise = rng.standard_normal(shape)
        if name.endswith("expert_bias"):
            # not negative: mlx-lm puts 0 where the authors put -inf for experts of other groups
            array = np.abs(noise) * 0.1
        elif len(shape) == 1:
            array = 1 + noise * 0.3
        else:
            gain = 0.4 if name.endswith(("dense.weight", "down_proj.weight")) else 1.2
            # in half precision a near tie of experts goes the other way now and then; that may not be all there is
            array = noise * (0.5 * gain if ".experts." in name else gain) / shape[-1] ** 0.5
        tensors[name] = array.astype(np.float32)
    return tensors


def check(config: dict[str, Any], folder: Path, ids: npt.NDArray[np.int32], expected: Array) -> None:
    """Let mlx-lm run the checkpoint in `folder`; its logits must be the `expected` ones [T, vocab]."""
    import mlx.core as mx

    name = _MODULES[config["architectures"][0].removesuffix("ForCausalLM")]
    module = importlib.import_module(f"mlx_lm.models.{name}")
    model = module.Model(module.ModelArgs.from_dict(config))
    model.load_weights(list(model.sanitize(mx.load(str(folder / "model.safetensors"))).items()))
    for index, layer in enumerate(model.layers):
        if not layer.is_global:
            counted = index + 1 if name == "bailing_hybrid" else max(index, 1)
            np.testing.assert_allclose(np.array(layer.attention._slope), slopes(config, counted), rtol=1e-5)
            layer.attention._slope = mx.array(slopes(config, index))
    found = np.array(model(mx.array(ids)[None], cache=model.make_cache()))[0]
    worst = float(np.abs(found - expected).max())
    assert worst < AGREEMENT, f"mlx-lm differs by {worst:.1e}"


def write(config: dict[str, Any], folder: Path, seed: int, lengths: tuple[int, ...], prompt: int, new: int) -> None:
    """A checkpoint and its expected values, as `tests.parity.sources` describes them; mlx-lm has agreed with them."""
    from safetensors.numpy import save_file

    from tests.parity.weights import DRAWS, WELL_CONDITIONED

    rng = np.random.default_rng(seed)
    ids = rng.integers(0, config["vocab_size"], (len(lengths), max(lengths))).astype(np.int32)
    tensors, sensitivity = {}, np.inf
    for _ in range(DRAWS):
        drawn = draw(config, rng)
        moved = _sensitivity(config, drawn, ids[0], rng)
        if moved < sensitivity:
            tensors, sensitivity = drawn, moved
        if sensitivity < WELL_CONDITIONED:
            break
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, folder / "model.safetensors")
    model, rows = Model(config, tensors), []
    logits = np.zeros((*ids.shape, config["vocab_size"]), np.float32)
    for row, length in enumerate(lengths):
        expected, states = model(ids[row, :length])
        check(config, folder, ids[row, :length], expected)
        logits[row, :length], ids[row, length:] = expected, 0
        rows.append(states)
    greedy = ids[0, :prompt]
    for _ in range(new):
        greedy = np.append(greedy, model(greedy)[0][-1].argmax().astype(np.int32))
    golden = {name: np.stack([states[name] for states in rows]).astype(np.float32) for name in rows[0]}
    golden |= {"ids": ids, "lengths": np.array(lengths, np.int32), "logits": logits, "greedy": greedy}
    save_file({**golden, "sensitivity": np.array(sensitivity, np.float32)}, folder / "golden.safetensors")


def _sensitivity(config: dict[str, Any], tensors: dict[str, Any], ids: Any, rng: np.random.Generator) -> float:
    """Largest change of a logit when every embedding changes by one part in ten million."""
    name = "model.word_embeddings.weight"
    noise = 1 + 1e-7 * rng.standard_normal(tensors[name].shape)
    plain, moved = (
        Model(config, {**tensors, name: tensors[name].astype(np.float64) * factor})(ids)[0] for factor in (1.0, noise)
    )
    return float(np.abs(moved - plain).max())
