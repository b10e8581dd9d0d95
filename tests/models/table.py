"""The table of docs/families.md, measured on the committed checkpoints: `python -m tests.models.table`."""

from __future__ import annotations

import importlib.metadata
import platform
from collections import defaultdict
from pathlib import Path

from mlxlin.models import FAMILIES
from tests.models.golden import FIXTURES, Golden, difference, model_of
from tests.parity.cases import CASES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "families.md"
HEAD = """# Families

Each family is compared with its source implementation: on the small random checkpoints in `tests/fixtures`, written by
the source together with its logits and final states, in every test run; and on fresh random weights of other sizes in
CI (`tests/parity`). Prefill split anywhere, decoding token by token, padded batches and greedy text are compared too.
Families marked ² are held to two independent programs. For Ring and Ling 2.5 these are mlx-lm, in float32, and a
program in float64 after the authors' code. Their decays are one series of slopes times `1 - l / (L - 1) + 1e-5`, and
what l is of the first layer is a matter of the program: -1 in the authors' code, in their training framework AReaL
(which counted from 0 at first, and was put right) and in the model proposed for transformers
(huggingface/transformers#46713); 0 in SGLang, vLLM and mlx-lm (for Ring 2.0 mlx-lm counts as the authors do, but not
below 0). mlxlin counts as the authors do. mlx-lm's slopes are checked to be the same but for the count, and are given
the authors' count for the comparison.

| family | source | variants | largest logit difference | state of a variant |
|---|---|---|---|---|
"""
SOURCES = {
    "transformers": "transformers",
    "fla": "flash-linear-attention",
    "mlx-lm": "NumPy in float64 after the authors' code; mlx-lm on the same checkpoints ²",
}


def variants() -> dict[str, list[str]]:
    """Family name -> its fixtures, the default one first."""
    found: dict[str, list[str]] = defaultdict(list)
    for folder in sorted(FIXTURES.iterdir()):
        if (folder / "golden.safetensors").exists():
            found[max((f for f in FAMILIES if folder.name.startswith(f)), key=len)].append(folder.name)
    return found


def row(family: str, names: list[str]) -> str:
    """One line of the table."""
    worst, state = 0.0, 0
    for name in names:
        golden = Golden.load(FIXTURES / name)
        model = model_of(golden.config, golden.tensors)
        logits, _ = model(golden.row(0))
        assert logits is not None
        worst = max(worst, difference(logits, golden.logits(0)))
        state = state or model.fresh().recurrent_nbytes
    kinds = ", ".join(_variant(family, name) for name in names)
    return f"| `{family}` | {_sources(family, names)} | {kinds} | {worst:.0e} | {state:,} bytes, fixed |"


def _variant(family: str, name: str) -> str:
    return name.removeprefix(family).lstrip("-") or "default"


def _sources(family: str, names: list[str]) -> str:
    """What made the variants; where there is more than one source, which made which."""
    made: dict[str, list[str]] = defaultdict(list)
    for name in names:
        made[SOURCES[CASES[name].source]].append(_variant(family, name))
    if len(made) == 1:
        return next(iter(made))
    return "; ".join(f"{source} ({', '.join(variants)})" for source, variants in made.items()) + " ²"


def main() -> None:
    """Write the page."""
    rows = [row(family, names) for family, names in sorted(variants().items())]
    made = f"Made by `python -m tests.models.table` with MLX {importlib.metadata.version('mlx')}, float32, on "
    PAGE.write_text(HEAD + "\n".join(rows) + f"\n\n{made}{platform.system()} {platform.machine()}.\n", encoding="utf-8")


if __name__ == "__main__":
    main()
