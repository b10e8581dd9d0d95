"""Named arrays and a JSON record in one file that is whole or absent: how states are kept on disk.

The file is safetensors; its metadata holds the record and a checksum of everything. Writing goes to a temporary file
beside the target, which is synced and renamed, so that a full disk or a killed process leaves an older file untouched.
Files and the folders made for them are their owner's alone: they hold what people said.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mlxlin.backend import mx
from mlxlin.errors import NumericsError, ResourceError, SessionError

FORMAT = 1
_INTEGER_OF_WIDTH = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}
_STALE = 3600  # seconds; no writing takes as long
_LARGEST_HEADER = 100_000_000  # bytes, the limit of the safetensors format


def write(path: Path, arrays: Mapping[str, mx.array], record: Mapping[str, Any]) -> None:
    """Write `arrays` and `record` (plain JSON values) to `path`, replacing what was there only when all is written.

    Raises:
        NumericsError: an array holds a number that is not finite; nothing is written.
        ResourceError: the disk is full or the folder cannot be written.
    """
    if name := _not_finite(arrays):
        raise NumericsError(f"'{name}' holds numbers that are not finite; it was not saved.")
    text = json.dumps({**record, "format": FORMAT}, sort_keys=True)
    metadata = {"record": text, "record_checksum": _digest(text), "checksum": _checksum(arrays, text)}
    temporary = ""
    try:
        private_folder(path.parent)
        sweep(path.parent)
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".safetensors", dir=path.parent)
        os.close(handle)
        # MLX reports a full disk only through the file's size, so the sum below is compared with what was meant.
        mx.save_safetensors(temporary, dict(arrays), metadata)
        if os.path.getsize(temporary) < sum(array.nbytes for array in arrays.values()):
            raise OSError("the file is shorter than its content")
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except (OSError, RuntimeError) as error:
        reason = (getattr(error, "strerror", None) or str(error)).rstrip(".")
        raise ResourceError(
            f"{path.name} could not be saved: {reason}.", "Free some disk space; an older file was left as it was."
        ) from error
    finally:
        if temporary and os.path.exists(temporary):
            os.unlink(temporary)


def read(path: Path) -> tuple[dict[str, mx.array], dict[str, Any]]:
    """Arrays and record of a file written by `write`.

    Raises:
        SessionError: there is no such file, it is damaged, of another format, or holds non-finite numbers.
    """
    record, metadata = _header(path)
    try:
        loaded = mx.load(str(path), format="safetensors")
        assert isinstance(loaded, dict)
        mx.eval(list(loaded.values()))
    except (RuntimeError, ValueError, TypeError) as error:
        raise _damaged(path, "it cannot be read") from error
    if metadata.get("checksum") != _checksum(loaded, metadata["record"]):
        raise _damaged(path, "its checksum does not fit")
    if name := _not_finite(loaded):
        raise _damaged(path, f"'{name}' holds numbers that are not finite")
    return loaded, record


def read_record(path: Path) -> dict[str, Any]:
    """The record alone, without reading an array; its own checksum is compared.

    Raises:
        SessionError: as `read`, as far as the record goes.
    """
    return _header(path)[0]


def private_folder(folder: Path) -> None:
    """Make a folder that only its owner may enter, with those above it that do not exist."""
    if not folder.is_dir():
        private_folder(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def sweep(folder: Path) -> None:
    """Remove what killed writers left behind in a folder."""
    for left in folder.glob(".*.safetensors"):
        with contextlib.suppress(OSError):
            if left.stat().st_mtime < time.time() - _STALE:
                left.unlink()


def _header(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    if not path.is_file():
        raise SessionError(f"There is no file {path.name} in {path.parent.name}.")
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > _LARGEST_HEADER:
                raise ValueError("the header is too long")
            metadata: dict[str, str] = json.loads(file.read(length))["__metadata__"]
        text = metadata["record"]
        record: dict[str, Any] = json.loads(text)
        found = record.get("format")
    except (OSError, KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(path, "it cannot be read") from error
    if found != FORMAT:
        raise SessionError(f"{path.name} has format {found}; this mlxlin reads format {FORMAT}.")
    if metadata.get("record_checksum") != _digest(text):
        raise _damaged(path, "its checksum does not fit")
    return record, metadata


def _damaged(path: Path, what: str) -> SessionError:
    return SessionError(f"{path.name} is damaged: {what}.", "Start again without it.")


def _not_finite(arrays: Mapping[str, mx.array]) -> str:
    """The name of an array with a number that is not finite; empty where there is none."""
    floats = {name: array for name, array in arrays.items() if mx.issubdtype(array.dtype, mx.floating)}
    return next((name for name, array in floats.items() if not mx.all(mx.isfinite(array)).item()), "")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _checksum(arrays: Mapping[str, mx.array], text: str) -> str:
    total = hashlib.sha256(text.encode())
    for name in sorted(arrays):
        array = mx.contiguous(arrays[name])
        total.update(f"\n{name} {array.dtype} {array.shape}\n".encode())
        # numpy has no bfloat16, so the bytes are looked at as integers
        total.update(np.array(array.reshape(-1).view(_INTEGER_OF_WIDTH[array.dtype.size]), copy=False).data)
    return total.hexdigest()


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
