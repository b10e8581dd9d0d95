"""Speed of an unquantised conversion beside copying, syncing and hashing the same bytes.

    python benchmarks/convert.py [--gigabytes 2] [--repetitions 3] [--folder DIR] [--json out.json]

The aim is a ratio of at most 1.5 to `cp` + `sync` + one `sha256sum`. The checkpoint is made up (a Qwen3.5-like model
with a wide feed-forward part, bfloat16); the pairs alternate, each target is removed before the next, and the result of
the conversion is compared with the source bit by bit before anything is reported.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mlxlin.backend import mx  # noqa: E402
from mlxlin.convert import convert_checkpoint  # noqa: E402
from mlxlin.loader import load_model  # noqa: E402
from tests.convert.checkpoints import bf16, config, save_safetensors, weights  # noqa: E402

LAYERS = 8


def make_checkpoint(folder: Path, gigabytes: float) -> int:
    """A checkpoint of about that size in bfloat16; its bytes."""
    kinds = ["linear_attention"] * LAYERS
    hidden = int(gigabytes * 1e9 / (2 * 64 * 3 * LAYERS)) // 64 * 64
    tensors = {name: bf16(array) for name, array in weights(layer_types=kinds).items()}
    rng = np.random.default_rng(0)
    for index in range(LAYERS):
        wide = bf16(0.02 * rng.standard_normal((hidden, 64), dtype=np.float32))
        at = f"model.layers.{index}.mlp."
        tensors |= {f"{at}gate_proj.weight": wide, f"{at}up_proj.weight": wide}
        tensors[f"{at}down_proj.weight"] = (wide[0], wide[1].reshape(64, hidden))
    settings = config(layer_types=kinds, num_hidden_layers=LAYERS, intermediate_size=hidden)
    del settings["full_attention_interval"]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(settings))
    save_safetensors(folder / "model.safetensors", tensors)
    return (folder / "model.safetensors").stat().st_size


def copy_sync_hash(source: Path, target: Path) -> float:
    """Seconds for cp, sync and sha256sum."""
    start = time.perf_counter()
    subprocess.run(["cp", "-r", source, target], check=True)
    subprocess.run(["sync", *target.iterdir()], check=True)
    subprocess.run(["sha256sum", *target.iterdir()], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def convert(source: Path, target: Path, bits: int | None = None) -> float:
    """Seconds for a conversion."""
    start = time.perf_counter()
    convert_checkpoint(source, target, bits=bits)
    return time.perf_counter() - start


def same_model(source: Path, target: Path) -> bool:
    tokens = mx.array([[3, 17, 90, 4]])
    (a, _), (b, _) = (load_model(path)(tokens) for path in (source, target))
    return a is not None and b is not None and bool(mx.array_equal(a, b))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to work; a temporary folder by default")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        source, target = Path(name) / "source", Path(name) / "target"
        nbytes = make_checkpoint(source, options.gigabytes)
        rows: dict[str, list[float]] = {"cp + sync + sha256sum": [], "convert": [], "convert -q 4": []}
        for repetition in range(options.repetitions):
            runs = [
                lambda: copy_sync_hash(source, target),
                lambda: convert(source, target),
                lambda: convert(source, target, 4),
            ]
            for kind, run in zip(rows, runs, strict=True):
                rows[kind].append(run())
                if kind == "convert" and repetition == 0 and not same_model(source, target):
                    raise SystemExit("The converted model differs from its source; no times are reported.")
                shutil.rmtree(target)
    report(rows, nbytes, options.json)


def report(rows: dict[str, list[float]], nbytes: int, output: Path | None) -> None:
    for kind, seconds in rows.items():
        best, times = min(seconds), " ".join(f"{s:.2f}" for s in seconds)
        print(f"{kind:24} best {best:6.2f} s  {nbytes / best / 1e9:5.2f} GB/s   all {times}")
    ratio = min(rows["convert"]) / min(rows["cp + sync + sha256sum"])
    print(f"convert / (cp + sync + sha256sum) = {ratio:.2f} over {nbytes / 1e9:.2f} GB")
    if output is not None:
        output.write_text(json.dumps({"bytes": nbytes, "seconds": rows, "ratio": ratio}, indent=1) + "\n")


if __name__ == "__main__":
    main()
