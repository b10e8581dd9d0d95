"""Safetensors files: headers checked before anything is loaded, tensors read one at a time.

Layout of a file (https://github.com/huggingface/safetensors): 8 bytes little-endian header length, a JSON header
{name: {dtype, shape, data_offsets}}, then the tensors' bytes without gaps.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxlin.backend import mx
from mlxlin.errors import CheckpointError, UnsupportedError

from .raw import read_range
from .tensor import DTYPES, Tensor

INDEX = "model.safetensors.index.json"
_MAX_HEADER = 100_000_000
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors$")
_AGAIN = "Download or copy this file again."


@dataclass(frozen=True)
class Entry:
    """Where one tensor lies: byte range [start, stop) counted from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def header_length(head: bytes, size: int, name: str) -> int:
    """Length of the JSON header from a file's first bytes; `size` is the file's length in bytes."""
    if head.startswith(b"version https://git-lfs"):
        raise CheckpointError(
            f"{name} is a Git LFS pointer, not the weights.", "Run `git lfs pull` in the folder, or download the file."
        )
    if len(head) < 8:
        raise CheckpointError(f"{name} is truncated: {size} bytes.", _AGAIN)
    length = int.from_bytes(head[:8], "little")
    if length > _MAX_HEADER:
        raise CheckpointError(f"{name} is not a safetensors file.", _AGAIN)
    if 8 + length > size:
        raise CheckpointError(f"{name} is truncated inside its header ({size} bytes).", _AGAIN)
    return length


def parse_header(text: bytes, size: int, name: str) -> dict[str, Entry]:
    """The tensors of a file from its JSON header.

    Args:
        text: the header, without the 8 bytes of length.
        size: length of the whole file in bytes; what the header promises must fill it exactly.
        name: the file, for messages.
    """
    try:
        raw: dict[str, Any] = json.loads(text)
        raw.pop("__metadata__", None)
        entries = {key: Entry(e["dtype"], tuple(e["shape"]), *e["data_offsets"]) for key, e in raw.items()}
        if not all(type(n) is int for e in entries.values() for n in (e.start, e.stop, *e.shape)):
            raise ValueError("sizes and places are whole numbers")
        if not all(isinstance(e.dtype, str) for e in entries.values()):
            raise ValueError("a dtype is a text")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{name} has a damaged safetensors header.", _AGAIN) from error
    position = 0
    for key, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.dtype not in DTYPES:
            raise UnsupportedError(f"{name}: tensor {key} has dtype {entry.dtype}, which mlxlin cannot read.")
        expected = math.prod(entry.shape) * DTYPES[entry.dtype][0]
        if entry.start != position or entry.stop - entry.start != expected:
            raise CheckpointError(f"{name}: the bytes of tensor {key} do not match its shape.", _AGAIN)
        position = entry.stop
    missing = 8 + len(text) + position - size
    if missing > 0:
        raise CheckpointError(f"{name} is truncated: {missing} of {size + missing} bytes are missing.", _AGAIN)
    if missing < 0:
        raise CheckpointError(f"{name} has {-missing} bytes more than its header describes.", _AGAIN)
    return entries


class File:
    """One safetensors file on disk. Tensors are handed out lazily and not kept."""

    def __init__(self, path: Path) -> None:
        self.path = path
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(64)
            length = header_length(head, size, path.name)
            file.seek(8)
            self.entries = parse_header(file.read(length), size, path.name)
        self._data = 8 + length
        # MLX's own reader is faster (parallel) but refuses the whole file when it holds one dtype it does not know
        self._foreign = any(DTYPES[entry.dtype][1] is None for entry in self.entries.values())
        self._lazy: dict[str, mx.array] = {}

    def tensors(self) -> dict[str, Tensor]:
        return {key: self._tensor(key, entry) for key, entry in self.entries.items()}

    def _tensor(self, key: str, entry: Entry) -> Tensor:
        dtype = "F32" if entry.dtype == "F64" else entry.dtype
        return Tensor(entry.shape, dtype, lambda: self._read(key), entry.stop - entry.start, self.path.name)

    def _read(self, key: str) -> mx.array:
        if self._foreign:
            entry = self.entries[key]
            return read_range(self.path, self._data + entry.start, entry.dtype, entry.shape)
        if key not in self._lazy:  # MLX reads a file's tensors when they are evaluated; a second reader starts afresh
            loaded = mx.load(str(self.path))
            assert isinstance(loaded, dict)
            self._lazy = loaded
        return self._lazy.pop(key)


def shard_names(folder: Path) -> list[str]:
    """The weight files a folder must hold, by its index or its file names; a missing one is an error that names it."""
    index = folder / INDEX
    present = sorted(path.name for path in folder.glob("*.safetensors") if not path.name.startswith("adapter"))
    if index.exists():
        names = sorted(set(read_index(index).values()))
    elif "model.safetensors" in present:
        names = ["model.safetensors"]
    else:
        names = list(present)  # a copy: it grows while `present` is walked
        for match in filter(None, map(_SHARD.match, present)):
            names += [f"{match[1]}-{n:05d}-of-{match[3]}.safetensors" for n in range(1, int(match[3]) + 1)]
        names = sorted(set(names))
    for name in names:
        if not (folder / name).is_file():
            raise CheckpointError(f"The checkpoint is incomplete: {name} is missing.", "Download the missing file.")
    return names


def read_index(path: Path) -> dict[str, str]:
    """Tensor name -> file name, from an index file."""
    try:
        weight_map = json.loads(path.read_text())["weight_map"]
        names = {str(key): str(value) for key, value in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path.name} is not a readable index of weights.", _AGAIN) from error
    for name in set(names.values()):
        if Path(name).name != name:
            raise CheckpointError(f"{path.name} points outside its folder: {name}")
    return names


def read_folder(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder of safetensors files, checked against the index where there is one."""
    tensors: dict[str, Tensor] = {}
    for name in shard_names(folder):
        for key, tensor in File(folder / name).tensors().items():
            if key in tensors:
                raise CheckpointError(f"Tensor {key} is in both {tensors[key].file} and {name}.")
            tensors[key] = tensor
    index = folder / INDEX
    if index.exists():
        for key, name in read_index(index).items():
            if key not in tensors or tensors[key].file != name:
                raise CheckpointError(f"{name} does not hold {key}, which the index says it does.", _AGAIN)
    return tensors


def blank_tensors(entries: dict[str, Entry], file: str) -> dict[str, Tensor]:
    """The tensors of a file of which only the header is here (a remote one): shapes to plan with, zeros for values."""
    return {key: Tensor(e.shape, e.dtype, _absent, e.stop - e.start, file).blank() for key, e in entries.items()}


def _absent() -> mx.array:
    raise CheckpointError("Only the header of this file was read.")
