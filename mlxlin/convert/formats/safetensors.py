"""Safetensors files: headers checked before anything is loaded, tensors read one at a time.

Layout of a file (https://github.com/huggingface/safetensors): 8 bytes little-endian header length, a JSON header
{name: {dtype, shape, data_offsets}}, then the tensors' bytes without gaps.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxlin.backend import mx
from mlxlin.errors import CheckpointError, UnsupportedError

from . import shards
from .raw import read_range
from .shards import AGAIN
from .tensor import DTYPES, Tensor, absent

INDEX = "model.safetensors.index.json"
_MAX_HEADER = 100_000_000


@dataclass(frozen=True)
class Entry:
    """Where one tensor lies: byte range [start, stop) counted from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def header_length(head: bytes, size: int, name: str) -> int:
    """Length of the JSON header from a file's first bytes; `size` is the file's length in bytes."""
    shards.refuse_pointer(head, name)
    if len(head) < 8:
        raise CheckpointError(f"{name} is truncated: {size} bytes.", AGAIN)
    length = int.from_bytes(head[:8], "little")
    if length > _MAX_HEADER:
        raise CheckpointError(f"{name} is not a safetensors file.", AGAIN)
    if 8 + length > size:
        raise CheckpointError(f"{name} is truncated inside its header ({size} bytes).", AGAIN)
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
        raise CheckpointError(f"{name} has a damaged safetensors header.", AGAIN) from error
    position = 0
    for key, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.dtype not in DTYPES:
            raise UnsupportedError(f"{name}: tensor {key} has dtype {entry.dtype}, which mlxlin cannot read.")
        expected = math.prod(entry.shape) * DTYPES[entry.dtype][0]
        if entry.start != position or entry.stop - entry.start != expected:
            raise CheckpointError(f"{name}: the bytes of tensor {key} do not match its shape.", AGAIN)
        position = entry.stop
    missing = 8 + len(text) + position - size
    if missing > 0:
        raise CheckpointError(f"{name} is truncated: {missing} of {size + missing} bytes are missing.", AGAIN)
    if missing < 0:
        raise CheckpointError(f"{name} has {-missing} bytes more than its header describes.", AGAIN)
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
    present = [path.name for path in folder.glob("*.safetensors") if not path.name.startswith("adapter")]
    return shards.needed(folder, INDEX, ["model.safetensors"] if "model.safetensors" in present else present)


def read_folder(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder of safetensors files, checked against the index where there is one."""
    return shards.gather(folder, INDEX, shard_names(folder), lambda path: File(path).tensors())


def blank_tensors(entries: dict[str, Entry], file: str) -> dict[str, Tensor]:
    """The tensors of a file of which only the header is here (a remote one): shapes to plan with, zeros for values."""
    return {key: Tensor(e.shape, e.dtype, absent, e.stop - e.start, file).blank() for key, e in entries.items()}
