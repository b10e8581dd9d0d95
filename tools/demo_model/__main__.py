"""Make the demo model: ``python -m tools.demo_model all --folder FOLDER`` (see README.md)."""

from __future__ import annotations

import argparse
from pathlib import Path

SHIPPED = Path(__file__).parents[2] / "mlxlin" / "demo"
STEPS = ("fetch", "prepare", "train", "export", "evaluate")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.demo_model", description=__doc__)
    parser.add_argument("step", choices=[*STEPS, "all"])
    parser.add_argument("--folder", type=Path, required=True, help="for packages, token files and checkpoints (1 GB)")
    parser.add_argument("--out", type=Path, default=SHIPPED, help="the model folder (default: mlxlin/demo)")
    parser.add_argument("--minutes", type=float, default=70, help="training time")
    parser.add_argument("--processes", type=int, default=2, help="training processes, one core each")
    options = parser.parse_args()
    folder = options.folder.resolve()
    for step in STEPS if options.step == "all" else (options.step,):
        run(step, folder, options)


def run(step: str, folder: Path, options: argparse.Namespace) -> None:
    """One step; what it needs is imported here because only some steps need torch."""
    if step == "fetch":
        from tools.demo_model.packages import fetch

        fetch(folder)
    elif step == "prepare":
        from tools.demo_model.dataset import prepare

        prepare(folder)
    elif step == "train":
        from tools.demo_model.train import train

        train(folder, options.minutes, options.processes)
    elif step == "export":
        from tools.demo_model.export import export

        export(folder, options.out)
    else:
        from tools.demo_model.evaluate import evaluate

        evaluate(options.out, folder / "unpacked")


if __name__ == "__main__":
    main()
