"""Speed of an unquantised conversion beside copying, syncing and hashing the same bytes.

    python benchmarks/convert.py [--gigabytes 2] [--repetitions 5] [--folder DIR] [--json]

The aim is a ratio of at most 1.5 to `cp` + `sync` + one `sha256sum`. Both are commands of their own, so the start of
Python counts as part of `mlxlin convert`, which syncs and hashes what it writes too. The checkpoint is made up (a
Qwen3.5-like model with a wide feed-forward part, bfloat16) and was just written, so both read it from the page cache.
The commands alternate, each target is removed before the next, and the result of the conversion is compared with the
source bit by bit before anything is reported. --json keeps all values, with machine, command and date, in
benchmarks/history.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "cli")]

from mlxlin.backend import mx  # noqa: E402
from mlxlin.convert.resolve import DEMO  # noqa: E402
from mlxlin.loader import load_model  # noqa: E402
from mlxlin_cli.record import describe_machine  # noqa: E402
from tests.convert.checkpoints import bf16, config, save_safetensors, weights  # noqa: E402

HISTORY = ROOT / "benchmarks" / "history"
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
    shutil.copy(DEMO / "tokenizer.json", folder)
    return (folder / "model.safetensors").stat().st_size


def copy_sync_hash(source: Path, target: Path) -> None:
    subprocess.run(["cp", "-r", source, target], check=True)
    subprocess.run(["sync", *target.iterdir()], check=True)
    subprocess.run(["sha256sum", *target.iterdir()], check=True, stdout=subprocess.DEVNULL)


def convert(source: Path, target: Path, *options: str) -> None:
    command = [sys.executable, "-m", "mlxlin_cli", "convert", source, target, *options]
    home = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path[:2]), "MLXLIN_HOME": str(target.parent / "home")}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=home)


def same_model(source: Path, target: Path) -> bool:
    tokens = mx.array([[3, 17, 90, 4]])
    (a, _), (b, _) = (load_model(path)(tokens) for path in (source, target))
    return a is not None and b is not None and bool(mx.array_equal(a, b))


BASELINE, OURS = "cp + sync + sha256sum", "mlxlin convert"
RUNS: dict[str, Callable[[Path, Path], None]] = {
    BASELINE: copy_sync_hash,
    OURS: convert,
    "mlxlin convert -q 4": lambda source, target: convert(source, target, "-q", "4"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to work; a temporary folder by default")
    parser.add_argument("--json", action="store_true", help="keep the values in benchmarks/history")
    options = parser.parse_args()
    machine = describe_machine()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        source, target = Path(name) / "source", Path(name) / "target"
        nbytes = make_checkpoint(source, options.gigabytes)
        rows: dict[str, list[float]] = {kind: [] for kind in RUNS}
        for repetition in range(options.repetitions):
            for kind, run in RUNS.items():
                start = time.perf_counter()
                run(source, target)
                rows[kind].append(time.perf_counter() - start)
                if kind == OURS and repetition == 0 and not same_model(source, target):
                    raise SystemExit("The converted model differs from its source; no times are reported.")
                shutil.rmtree(target)
    ratio = report(rows, nbytes)
    if options.json:
        sizes = f"--gigabytes {options.gigabytes:g} --repetitions {options.repetitions}"
        command = f"python benchmarks/convert.py {sizes}"
        keep({"machine": machine, "command": command, "bytes": nbytes, "seconds": rows, "ratio": ratio})


def report(rows: dict[str, list[float]], nbytes: int) -> float:
    """Print the times; the median ratio of the pairs."""
    for kind, seconds in rows.items():
        middle, times = statistics.median(seconds), " ".join(f"{s:.2f}" for s in seconds)
        print(f"{kind:22} median {middle:6.2f} s  {nbytes / middle / 1e9:5.2f} GB/s   all {times}")
    ratios = [ours / theirs for ours, theirs in zip(rows[OURS], rows[BASELINE], strict=True)]
    ratio = statistics.median(ratios)
    print(f"{OURS} / ({BASELINE}) = {ratio:.2f} ({min(ratios):.2f} to {max(ratios):.2f}), {nbytes / 1e9:.2f} GB")
    return ratio


def keep(record: dict[str, object]) -> None:
    date = str(datetime.date.today())
    path = HISTORY / f"{date}-convert.json"
    path.write_text(json.dumps({"date": date, **record}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
