"""A checkpoint larger than memory converts: only what one parameter is made of is held at a time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.convert.checkpoints import config, save_safetensors, weights
from tests.convert.test_formats_pickles import save_torch

MEASURE = """
import resource, sys
from pathlib import Path
from mlxlin.convert import convert_checkpoint

def peak():
    # not ru_maxrss on Linux: a child starts with its parent's
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return 1024 * next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM"))

convert_checkpoint("demo", sys.argv[2] + "-warm", bits=4)
before = peak()
convert_checkpoint(sys.argv[1], sys.argv[2], bits=int(sys.argv[3]) or None)
print(peak() - before)
"""
LAYERS = 24
HIDDEN = 8192  # of the feed-forward part: its matrices dominate
LARGEST = HIDDEN * 64 * 4
ALLOWANCE = 16 << 20


def wide_model(folder: Path, form: str) -> int:
    """A model with many large matrices; its bytes."""
    kinds = ["linear_attention"] * LAYERS
    made = weights(layer_types=kinds)
    rng = np.random.default_rng(0)
    wide = (0.02 * rng.standard_normal((HIDDEN, 64))).astype(np.float32)
    for index in range(LAYERS):
        at = f"model.layers.{index}.mlp."
        made |= {f"{at}gate_proj.weight": wide, f"{at}up_proj.weight": wide}
        made[f"{at}down_proj.weight"] = wide.reshape(64, HIDDEN)
    settings = config(layer_types=kinds, num_hidden_layers=LAYERS, intermediate_size=HIDDEN)
    del settings["full_attention_interval"]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(settings))
    if form == "safetensors":
        save_safetensors(folder / "model.safetensors", made)
    else:
        save_torch(folder / "pytorch_model.bin", made)
    return sum(array.nbytes for array in made.values())


@pytest.mark.parametrize(("form", "bits"), [("safetensors", 4), ("pytorch", 0)])
def test_peak_memory_is_one_group_of_tensors(tmp_path: Path, form: str, bits: int) -> None:
    total = wide_model(tmp_path / "raw", form)
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "raw"), str(tmp_path / "out"), str(bits)]
    peak = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert total > 8 * (LARGEST + ALLOWANCE)
    assert 0 < peak < LARGEST + ALLOWANCE, f"{peak / 1e6:.0f} MB for groups of {LARGEST / 1e6:.0f} MB"
