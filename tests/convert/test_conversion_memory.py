"""A checkpoint larger than memory converts: only what one parameter is made of is held at a time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mlxlin.convert.formats import open_checkpoint
from tests.convert.checkpoints import config, save_safetensors, weights
from tests.convert.test_formats_pickles import save_torch
from tests.models.golden import FIXTURES

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
NOISE = 16 << 20  # what the allocator and a band of rows take


def wide_model(folder: Path, form: str) -> tuple[int, int]:
    """A model whose feed-forward matrices are large; its bytes, and those of the largest."""
    layers, hidden = 24, 8192
    kinds = ["linear_attention"] * layers
    made = weights(layer_types=kinds)
    wide = (0.02 * np.random.default_rng(0).standard_normal((hidden, 64))).astype(np.float32)
    for index in range(layers):
        at = f"model.layers.{index}.mlp."
        made |= {f"{at}gate_proj.weight": wide, f"{at}up_proj.weight": wide}
        made[f"{at}down_proj.weight"] = wide.reshape(64, hidden)
    settings = config(layer_types=kinds, num_hidden_layers=layers, intermediate_size=hidden)
    del settings["full_attention_interval"]
    return _save(folder, made, settings, form), wide.nbytes


def model_of_experts(folder: Path) -> tuple[int, int]:
    """A mixture of experts stored one by one, their matrices large; its bytes, and those of one expert's matrix."""
    hidden, original = 1 << 15, FIXTURES / "qwen3_5_moe"
    wide = (0.02 * np.random.default_rng(0).standard_normal((hidden, 32))).astype(np.float32)
    made = {name: np.array(tensor.read()) for name, tensor in open_checkpoint(original).tensors.items()}
    for name in made:
        if ".experts." in name:
            made[name] = wide.reshape(32, hidden) if "down_proj" in name else wide
    settings = {**json.loads((original / "config.json").read_text()), "moe_intermediate_size": hidden}
    return _save(folder, made, settings, "safetensors"), wide.nbytes


def _save(folder: Path, made: dict[str, np.ndarray], settings: dict[str, object], form: str) -> int:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(settings))
    if form == "safetensors":
        save_safetensors(folder / "model.safetensors", made)
    else:
        save_torch(folder / "pytorch_model.bin", made)
    return sum(array.nbytes for array in made.values())


def measure(source: Path, bits: int) -> int:
    """Bytes that a conversion in a process of its own takes above what a small one took."""
    command = [sys.executable, "-c", MEASURE, str(source), f"{source}-out", str(bits)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.parametrize(("form", "bits"), [("safetensors", 4), ("pytorch", 0)])
def test_peak_memory_is_one_group_of_tensors(tmp_path: Path, form: str, bits: int) -> None:
    total, largest = wide_model(tmp_path / "raw", form)
    peak = measure(tmp_path / "raw", bits)
    assert total > 8 * (largest + NOISE)
    assert 0 < peak < largest + NOISE, f"{peak / 1e6:.0f} MB for groups of {largest / 1e6:.0f} MB"


def test_experts_are_written_one_by_one(tmp_path: Path) -> None:
    total, one = model_of_experts(tmp_path / "raw")
    peak = measure(tmp_path / "raw", 0)
    stack = 4 * one
    assert total > 10 * stack
    assert 0 < peak < stack, f"{peak / 1e6:.0f} MB; a stack of experts has {stack / 1e6:.0f} MB"


LIMITED = """
import resource, sys
from pathlib import Path
from mlxlin.backend import mx
from mlxlin.check import check_conversion
from mlxlin.convert import convert_checkpoint

source, out, bits, room, total = sys.argv[1], sys.argv[2], int(sys.argv[3]) or None, int(sys.argv[4]), int(sys.argv[5])
tokens = list(range(40))
convert_checkpoint("demo", out + "-warm", bits=4)
check_conversion("demo", out + "-warm", tokens=tokens)
mx.clear_cache()
status = Path("/proc/self/status").read_text()
held = 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmData"))
resource.setrlimit(resource.RLIMIT_DATA, (held + room, held + room))
try:
    bytearray(total)
    raise SystemExit("the whole checkpoint fits within the limit")
except MemoryError:
    pass
convert_checkpoint(source, out, bits=bits)
print(check_conversion(source, out, tokens=tokens).kl)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits a process's data by Linux's rule for RLIMIT_DATA")
@pytest.mark.parametrize(("form", "bits"), [("safetensors", 4), ("pytorch", 0)])
def test_a_checkpoint_larger_than_the_memory_limit_converts_and_is_checked(
    tmp_path: Path, form: str, bits: int
) -> None:
    total, largest = wide_model(tmp_path / "raw", form)
    room = total // 2
    assert room < largest + (1 << 30)
    numbers = map(str, (bits, room, total))
    command = [sys.executable, "-c", LIMITED, str(tmp_path / "raw"), str(tmp_path / "out"), *numbers]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (float(done.stdout) > 0) == (bits > 0)
