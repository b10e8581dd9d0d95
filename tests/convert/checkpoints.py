"""Small checkpoints for tests: the tiny Qwen3.5 model (hidden 64, 3 linear layers, 1 attention), in any clothing."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mlxlin.backend import mx
from mlxlin.loader import load_model

Weights = dict[str, np.ndarray]
IDS = [[3, 17, 90, 4, 4, 61, 127, 0, 55, 8]]

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    "max_position_embeddings": 512,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
}


def config(**changes: Any) -> dict[str, Any]:
    return {**CONFIG, **changes}


def weights(
    seed: int = 0, *, layer_types: list[str] | None = None, tied: bool = False, prefix: str = "model."
) -> Weights:
    """Random float32 weights in the hub's layout: conv1d [C, 1, W], zero-centred norms."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return (0.2 * rng.standard_normal(shape)).astype(np.float32)

    made = {f"{prefix}embed_tokens.weight": normal(128, 64), f"{prefix}norm.weight": normal(64)}
    if not tied:
        made["lm_head.weight"] = normal(128, 64)
    for index, kind in enumerate(layer_types or CONFIG["layer_types"]):
        at = f"{prefix}layers.{index}."
        made |= {f"{at}{norm}.weight": normal(64) for norm in ("input_layernorm", "post_attention_layernorm")}
        made |= {f"{at}mlp.{name}_proj.weight": normal(96, 64) for name in ("gate", "up")}
        made[f"{at}mlp.down_proj.weight"] = normal(64, 96)
        if kind == "full_attention":
            made |= {f"{at}self_attn.q_proj.weight": normal(256, 64), f"{at}self_attn.o_proj.weight": normal(64, 128)}
            made |= {f"{at}self_attn.{name}_proj.weight": normal(64, 64) for name in ("k", "v")}
            made |= {f"{at}self_attn.{name}_norm.weight": normal(32) for name in ("q", "k")}
        else:
            made |= {
                f"{at}linear_attn.in_proj_qkv.weight": normal(256, 64),
                f"{at}linear_attn.in_proj_z.weight": normal(128, 64),
                f"{at}linear_attn.in_proj_a.weight": normal(4, 64),
                f"{at}linear_attn.in_proj_b.weight": normal(4, 64),
                f"{at}linear_attn.conv1d.weight": normal(256, 1, 4),
                f"{at}linear_attn.A_log": np.abs(normal(4)),
                f"{at}linear_attn.dt_bias": normal(4),
                f"{at}linear_attn.norm.weight": 1 + normal(32),
                f"{at}linear_attn.out_proj.weight": normal(64, 128),
            }
    return made


def mlx_layout(raw: Weights) -> Weights:
    """The same model as MLX tools store it: conv1d [C, W, 1], norms with the one added."""
    zero_centred = ("input_layernorm.weight", "post_attention_layernorm.weight", "q_norm.weight", "k_norm.weight")
    made = {}
    for name, array in raw.items():
        if name.endswith("conv1d.weight"):
            made[name] = array.transpose(0, 2, 1)
        elif name.endswith(zero_centred) or name == "model.norm.weight":
            made[name] = array + 1
        else:
            made[name] = array
    return made


_NAMES = {
    "float32": "F32",
    "float16": "F16",
    "float64": "F64",
    "uint8": "U8",
    "uint32": "U32",
    "int32": "I32",
    "int64": "I64",
}


def save_safetensors(path: Path, tensors: Mapping[str, np.ndarray | tuple[str, np.ndarray]]) -> None:
    """Write a file; (dtype name, array) stores the array's bytes under that name, e.g. ("F8_E4M3", uint8 array)."""
    header, blobs, position = {}, [], 0
    for name, value in tensors.items():
        dtype, array = value if isinstance(value, tuple) else (_NAMES[value.dtype.name], value)
        shape = list(array.shape)
        blob = np.ascontiguousarray(array).tobytes()
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + len(blob)]}
        position += len(blob)
        blobs.append(blob)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(blobs))


def save(folder: Path, tensors: Mapping[str, Any], configuration: Mapping[str, Any] = CONFIG, shards: int = 1) -> Path:
    """Write a checkpoint folder, in one file or in several with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(configuration))
    if shards == 1:
        save_safetensors(folder / "model.safetensors", tensors)
        return folder
    names, where = list(tensors), {}
    for n in range(shards):
        file = f"model-{n + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[n::shards]}
        save_safetensors(folder / file, part)
        where |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


def bf16(array: np.ndarray) -> tuple[str, np.ndarray]:
    """An array rounded to bfloat16, for `save_safetensors`."""
    return "BF16", np.array(mx.array(array).astype(mx.bfloat16).view(mx.uint16))


def logits(source: Path | str, **options: Any) -> mx.array:
    """What a checkpoint predicts for IDS, [1, T, vocab]."""
    result, _ = load_model(source, **options)(mx.array(IDS))
    assert result is not None and bool(mx.all(mx.isfinite(result)))
    return result


def same(a: mx.array, b: mx.array) -> bool:
    """Equal in every bit."""
    return a.shape == b.shape and bool(mx.array_equal(a, b))


def bytes_of(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
