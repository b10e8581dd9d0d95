"""Checkpoints in several files: which files there must be, and which tensors each must hold."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from mlxlin.errors import CheckpointError

from .tensor import Tensor

AGAIN = "Download or copy this file again."
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.\w+)$")


def refuse_pointer(head: bytes, name: str) -> None:
    """Refuse a file whose first bytes say that Git LFS keeps its content elsewhere."""
    if head.startswith(b"version https://git-lfs"):
        raise CheckpointError(
            f"{name} is a Git LFS pointer, not the weights.", "Run `git lfs pull` in the folder, or download the file."
        )


def read_index(path: Path) -> dict[str, str]:
    """Tensor name -> file name, from an index file."""
    try:
        weight_map = json.loads(path.read_text())["weight_map"]
        names = {str(key): str(value) for key, value in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path.name} is not a readable index of weights.", AGAIN) from error
    for name in set(names.values()):
        if Path(name).name != name:
            raise CheckpointError(f"{path.name} points outside its folder: {name}")
    return names


def needed(folder: Path, index: str, present: Iterable[str]) -> list[str]:
    """The files a checkpoint consists of: those its index names, else those `present` and the rest of their series.

    Raises:
        CheckpointError: one of them is missing; the message names it.
    """
    names = set(present)
    if (folder / index).exists():
        names = set(read_index(folder / index).values())
    else:
        for match in filter(None, map(_SHARD.match, present)):
            names |= {f"{match[1]}-{n:05d}-of-{match[3]}{match[4]}" for n in range(1, int(match[3]) + 1)}
    for name in sorted(names):
        if not (folder / name).is_file():
            raise CheckpointError(f"The checkpoint is incomplete: {name} is missing.", "Download the missing file.")
    return sorted(names)


def series(name: str) -> str:
    """What the parts of one checkpoint have in common: "x-of-00003.bin" of "x-00002-of-00003.bin"."""
    match = _SHARD.match(name)
    return f"{match[1]}-of-{match[3]}{match[4]}" if match else name


def gather(folder: Path, index: str, names: list[str], read: Callable[[Path], dict[str, Tensor]]) -> dict[str, Tensor]:
    """All tensors of the files `names`, checked against the index where there is one.

    Raises:
        CheckpointError: a tensor in two files, or not in the file where the index has it.
    """
    tensors: dict[str, Tensor] = {}
    for name in names:
        for key, tensor in read(folder / name).items():
            if key in tensors:
                raise CheckpointError(f"Tensor {key} is in both {tensors[key].file} and {name}.")
            tensors[key] = tensor
    if (folder / index).exists():
        for key, name in read_index(folder / index).items():
            if key not in tensors or tensors[key].file != name:
                raise CheckpointError(f"{name} does not hold {key}, which the index says it does.", AGAIN)
    return tensors
