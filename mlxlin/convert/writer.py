"""Safetensors shards written as a stream: the header is known beforehand, each tensor is hashed while it is written."""

from __future__ import annotations

import hashlib
import io
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from mlxlin.backend import mx
from mlxlin.errors import CheckpointError

from .formats.tensor import DTYPES, dtype_name

SHARD_BYTES = 5 * 10**9
_PIECE = 1 << 24  # bytes hashed and written at a time: still in the processor's cache for the second use


@dataclass(frozen=True)
class Shape:
    """What will be stored under a name: safetensors dtype name and shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype][0]


def shard(shapes: Mapping[str, Shape], groups: Iterable[Iterable[str]], limit: int = SHARD_BYTES) -> list[list[str]]:
    """Names split into files of at most `limit` bytes, in order; the names of one group stay together."""
    shards: list[list[str]] = [[]]
    size = 0
    for group in map(list, groups):
        nbytes = sum(shapes[name].nbytes for name in group)
        if shards[-1] and size + nbytes > limit:
            shards.append([])
            size = 0
        shards[-1] += group
        size += nbytes
    return shards


def shard_names(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]


def index_text(shapes: Mapping[str, Shape], files: list[str], shards: list[list[str]]) -> str:
    """The index that says which file holds which tensor."""
    where = {name: file for file, names in zip(files, shards, strict=True) for name in names}
    total = sum(shape.nbytes for shape in shapes.values())
    return json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=1) + "\n"


def header(shapes: Mapping[str, Shape], names: list[str]) -> bytes:
    """The head of a safetensors file holding `names` in that order, padded so that the data is aligned to 8 bytes."""
    entries: dict[str, object] = {"__metadata__": {"format": "mlxlin"}}
    position = 0
    for name in names:
        stop = position + shapes[name].nbytes
        shape = shapes[name]
        entries[name] = {"dtype": shape.dtype, "shape": list(shape.shape), "data_offsets": [position, stop]}
        position = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_shard(
    path: Path, shapes: Mapping[str, Shape], names: list[str], arrays: Iterator[tuple[str, Iterator[mx.array]]]
) -> str:
    """Write `names` to a new file, taking each from `arrays` in that order, block by block.

    Returns:
        The file's SHA-256, in hex.

    Raises:
        CheckpointError: an array that is not what its header says.
    """
    digest = hashlib.sha256()
    with path.open("wb", buffering=0) as file:
        head = header(shapes, names)
        digest.update(head)
        file.write(head)
        for name in names:
            got, blocks = next(arrays)
            written = 0
            for block in blocks:
                if got != name or dtype_name(block.dtype) != shapes[name].dtype:
                    raise CheckpointError(f"{got} turned out as {block.dtype} where {name} was planned.")
                written += _write(file, _bytes(block), digest)
            if written != shapes[name].nbytes:
                raise CheckpointError(f"{name} turned out with {written} bytes, not {shapes[name].nbytes}.")
    return digest.hexdigest()


def _write(file: io.FileIO, data: memoryview, digest: hashlib._Hash) -> int:
    for start in range(0, len(data), _PIECE):
        piece = data[start : start + _PIECE]
        digest.update(piece)
        while piece:
            piece = piece[file.write(piece) :]
    return len(data)


def _bytes(array: mx.array) -> memoryview:
    """The array's bytes, not copied."""
    if array.size == 0:
        return memoryview(b"")
    flat = mx.contiguous(array).reshape(-1)
    flat = flat.astype(mx.uint8) if flat.dtype == mx.bool_ else flat.view(mx.uint8)
    mx.eval(flat)
    return memoryview(flat)  # type: ignore[arg-type]
