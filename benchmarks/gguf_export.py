"""A Qwen3.5-like checkpoint as a GGUF file, so that llama.cpp computes with the same weights.

    python benchmarks/gguf_export.py CHECKPOINT OUT.gguf                     # float32
    python benchmarks/gguf_export.py CHECKPOINT OUT.gguf --weights q8_0

Needs `gguf`. The weights are those of the checkpoint in the layout that llama.cpp's architecture "qwen35" expects:

- RMS norms carry their 1 (`1 + weight` here is `weight` there), but for the gated norm behind the recurrence;
- A is stored as the decay rate, -exp(A_log); the convolution as (channels, taps);
- value heads are ordered so that head i belongs to key head i modulo the number of key heads (tiled), where the
  checkpoint has those of one key head side by side (grouped).

The vocabulary is a placeholder, for the benchmark speaks in token ids: "<17>" stands for token 17, none ends a text.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

WEIGHTS = ("f32", "bf16", "q8_0")
SECTIONS = (11, 11, 10)  # Qwen3.5's own; without images all sections are at the same position
OUTER = {
    "embed_tokens.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",  # queries and their gates, head by head, in both
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}


def tiled(key_heads: int, value_heads: int) -> np.ndarray:
    """The checkpoint's number of each value head, in llama.cpp's order.

    >>> tiled(2, 6)
    array([0, 3, 1, 4, 2, 5])
    """
    return np.arange(value_heads).reshape(key_heads, -1).T.ravel()


def arrange(name: str, value: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    """One tensor in llama.cpp's layout.

    Args:
        name: the checkpoint's, without what stands before the layer's own part: "linear_attn.A_log".
        value: float32, as the checkpoint has it.
        config: of the text model.
    """
    order = tiled(config["linear_num_key_heads"], config["linear_num_value_heads"])
    width = config["linear_value_head_dim"]
    channels = (order[:, None] * width + np.arange(width)).ravel()
    keys = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
    queries_keys_values = np.concatenate([np.arange(keys), keys + channels])
    match name.removeprefix("linear_attn.").removesuffix(".weight"):
        case "in_proj_qkv":
            return value[queries_keys_values]
        case "conv1d":
            return value.reshape(len(value), -1)[queries_keys_values]
        case "in_proj_z":
            return value[channels]
        case "out_proj":
            return value[:, channels]
        case "in_proj_a" | "in_proj_b" | "dt_bias":
            return value[order]
        case "A_log":
            return -np.exp(value[order])
    one = name.endswith("norm.weight") and name != "linear_attn.norm.weight"
    return value + np.float32(1) if one else value


def tensors(folder: Path, config: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """All tensors of a checkpoint, named and laid out as llama.cpp wants them, in float32."""
    from mlxlin.backend import mx

    for file in sorted(folder.glob("*.safetensors")):
        for name, value in mx.load(str(file)).items():
            there = renamed(name)
            if there is not None:
                yield there, arrange(own_part(name), np.array(value.astype(mx.float32)), config)


def own_part(name: str) -> str:
    """The name without what it is in: "model.layers.3.mlp.up_proj.weight" is "mlp.up_proj.weight"."""
    return re.sub(r"^(model\.)?(language_model\.)?(layers\.\d+\.)?", "", name)


def renamed(name: str) -> str | None:
    """llama.cpp's name of a tensor; None for parts that reading text does not need (images, further tokens)."""
    if name.startswith(("mtp.", "model.visual.")):
        return None
    layer = re.search(r"\blayers\.(\d+)\.", name)
    return f"blk.{layer[1]}.{LAYER[own_part(name)]}" if layer else OUTER[own_part(name)]


def describe(writer: Any, config: dict[str, Any]) -> None:
    """Write what llama.cpp wants to know about a model of this architecture.

    Raises:
        ValueError: a shape that the architecture does not have there.
    """
    every = config["layer_types"].index("full_attention") + 1
    kinds = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(config["num_hidden_layers"])]
    if config["layer_types"] != kinds:
        raise ValueError("llama.cpp's qwen35 wants every n-th layer to be attention")
    if config["linear_key_head_dim"] != config["linear_value_head_dim"]:
        raise ValueError("llama.cpp's qwen35 wants keys and values of one size in its linear layers")
    rope, head = config["rope_parameters"], config["head_dim"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_full_attention_interval(every)
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head * rope["partial_rotary_factor"]))
    writer.add_rope_dimension_sections((*rope.get("mrope_section", SECTIONS), 0))
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_num_value_heads"] * config["linear_value_head_dim"])
    writer.add_tokenizer_model("rwkv")  # the one that has no special tokens unless they are named
    writer.add_token_list([f"<{token}>" for token in range(config["vocab_size"])])


def text_config(folder: Path) -> dict[str, Any]:
    """The config of the text model in a checkpoint.

    Raises:
        ValueError: another kind of model.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = config.get("text_config", config)
    if config["model_type"] != "qwen3_5_text":
        raise ValueError(f"{config['model_type']} is no dense Qwen3.5 text model")
    return dict(config)


def export(folder: Path, path: Path, weights: str = "f32") -> None:
    """Write a checkpoint as GGUF.

    Args:
        folder: the checkpoint.
        path: of the new file.
        weights: what matrices are stored as; all else stays float32.

    Raises:
        ValueError: no model of this architecture.
    """
    import gguf

    config = text_config(folder)
    kind = gguf.GGMLQuantizationType[weights.upper()]
    writer = gguf.GGUFWriter(path, "qwen35")
    describe(writer, config)
    for name, value in tensors(folder, config):
        matrix = value.ndim == 2 and "conv1d" not in name
        stored = kind if matrix else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(value), stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--weights", choices=WEIGHTS, default=WEIGHTS[0])
    options = parser.parse_args()
    export(options.checkpoint, options.out, options.weights)


if __name__ == "__main__":
    main()
