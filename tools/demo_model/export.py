"""Write the trained model as a checkpoint folder in the layout of Qwen3_5ForCausalLM."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from tools.demo_model import tokenizer
from tools.demo_model.model import CONFIG

TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": None,
    "eos_token": "<|im_end|>",
    "pad_token": "<|pad|>",
    "model_max_length": CONFIG["max_position_embeddings"],
    "clean_up_tokenization_spaces": False,
    "chat_template": tokenizer.CHAT_TEMPLATE,
}
GENERATION_CONFIG = {
    "eos_token_id": [tokenizer.CHAT_END, tokenizer.END_OF_TEXT],
    "pad_token_id": tokenizer.PAD,
    "do_sample": True,
    "temperature": 0.3,
    "top_p": 0.9,
}


def stored_dtype(name: str) -> torch.dtype:
    """Norms and decay parameters stay float32: they are tiny, and errors in a decay add up along the text."""
    return torch.float32 if name.endswith(("A_log", "dt_bias")) or "norm" in name else torch.bfloat16


def export(folder: Path, out: Path) -> None:
    """From ``folder/checkpoint.pt`` and ``folder/tokenizer.json`` to the model folder ``out``."""
    weights = torch.load(folder / "checkpoint.pt")["model"]
    out.mkdir(parents=True, exist_ok=True)
    tensors = {name: weight.to(stored_dtype(name)).contiguous() for name, weight in weights.items()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(folder / "tokenizer.json", out / "tokenizer.json")
    files = (("config", CONFIG), ("tokenizer_config", TOKENIZER_CONFIG), ("generation_config", GENERATION_CONFIG))
    for name, content in files:
        (out / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
