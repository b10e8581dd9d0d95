"""Tiny random checkpoints written by the source implementations, with what those compute for them.

Runs where torch, transformers and (for the fla cases, in a process of its own) flash-linear-attention are installed:

    MLXLIN_FLA=<folder with fla> python -m tests.parity.sources FOLDER CASE... [--seed N] [--vary]

FOLDER/CASE then holds config.json and model.safetensors as the source saves them, and golden.safetensors: `ids` [2, T]
padded on the right, `lengths` [2], `logits` [2, T, vocab] of each row alone, `greedy` (prompt and continuation of the
first row), and the recurrent matrix `layers.N.S` [2, HV, V, K] behind each row. `--vary` draws other sizes.
"""

from __future__ import annotations

import argparse
import functools
import os
import random
import sys
from pathlib import Path
from typing import Any

from tests.parity.cases import CASES, Case, Sizes
from tests.parity.expected import GREEDY_NEW, GREEDY_PROMPT, LENGTHS, expected
from tests.parity.weights import randomise


def write(name: str, folder: Path, seed: int, vary: bool) -> None:
    """Make the checkpoint and what its source computes for it."""
    case = CASES[name]
    if case.source == "mlx-lm":
        _write_bailing(case, folder, seed, vary)
        return
    import torch

    torch.manual_seed(seed)
    torch.set_num_threads(1)
    module = _source(case.source)
    config = getattr(module, f"{case.model}Config")(**case.config(Sizes(random.Random(seed) if vary else None)))
    model_name = case.model.removesuffix("Text")
    model = getattr(module, f"{model_name}ForCausalLM")(config).eval()
    ids = torch.randint(0, config.vocab_size, (len(LENGTHS), max(LENGTHS)))
    sensitivity = randomise(model, ids)
    folder.mkdir(parents=True, exist_ok=True)
    _save_checkpoint(model, case, config, folder)
    with torch.no_grad():
        made = expected(model, case, config, ids)
    _save({**made, "sensitivity": torch.tensor(sensitivity)}, folder / "golden.safetensors")


def _write_bailing(case: Case, folder: Path, seed: int, vary: bool) -> None:
    from tests.parity import bailing_oracle

    kind = {"BailingMoeLinearV2": "bailing_moe_linear", "BailingMoeV2_5": "bailing_hybrid"}[case.model]
    config = case.config(Sizes(random.Random(seed) if vary else None))
    config = {"model_type": kind, "architectures": [f"{case.model}ForCausalLM"], **config}
    bailing_oracle.write(config, folder, seed, LENGTHS, GREEDY_PROMPT, GREEDY_NEW)


def _save_checkpoint(model: Any, case: Case, config: Any, folder: Path) -> None:
    """As the source's save_pretrained writes it; that of fla's models refuses weights shared by two names."""
    if case.source == "transformers":
        model.save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        return
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    _save(
        {name: tensor.clone() for name, tensor in model.state_dict().items() if name not in tied},
        folder / "model.safetensors",
    )


@functools.cache
def _source(name: str) -> Any:
    if name == "fla":
        sys.path.insert(0, os.environ["MLXLIN_FLA"])
        from tests.parity import fla_oracle

        fla_oracle.install()
        import fla.models

        return fla.models
    import transformers

    return transformers


def _save(tensors: dict[str, Any], path: Path) -> None:
    from safetensors.torch import save_file

    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("cases", nargs="+", choices=sorted(CASES), metavar="CASE")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vary", action="store_true")
    options = parser.parse_args()
    for name in options.cases:
        write(name, options.folder / name, options.seed, options.vary)
        print(name, flush=True)


if __name__ == "__main__":
    main()
