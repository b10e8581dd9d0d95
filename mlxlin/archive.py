"""Named arrays and a JSON record in one file that is whole or absent: how states are kept on disk.

The file is safetensors; its metadata holds the record and a checksum of everything. Writing goes to a temporary file
beside the target, which is synced and renamed, so that a full disk or a killed process leaves an older file untouched.
"""

from __future__ import annotations

import contextlib
import glob
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


def write(path: Path, arrays: Mapping[str, mx.array], record: Mapping[str, Any]) -> None:
    """Write `arrays` and `record` (plain JSON values) to `path`, replacing what was there only when all is written.

    Raises:
        NumericsError: an array holds a number that is not finite; nothing is written.
        ResourceError: the disk is full or the folder cannot be written.
    """
    for name, array in arrays.items():
        if mx.issubdtype(array.dtype, mx.floating) and not mx.all(mx.isfinite(array)).item():
            raise NumericsError(f"'{name}' holds numbers that are not finite; it was not saved.")
    text = json.dumps({**record, "format": FORMAT}, sort_keys=True, ensure_ascii=False)
    metadata = {"record": text, "checksum": _checksum(arrays, text)}
    temporary = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _sweep(path)
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
        reason = getattr(error, "strerror", None) or str(error)
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
    damaged = f"{path.name} is damaged"
    if not path.is_file():
        raise SessionError(f"There is no file {path.name} in {path.parent.name}.")
    try:
        loaded, metadata = mx.load(str(path), format="safetensors", return_metadata=True)
        arrays = dict(loaded)
        mx.eval(list(arrays.values()))
        text = metadata["record"]
        record: dict[str, Any] = json.loads(text)
    except (RuntimeError, KeyError, ValueError, TypeError) as error:
        raise SessionError(f"{damaged}: it cannot be read.", "Start again without it.") from error
    if record.get("format") != FORMAT:
        raise SessionError(f"{path.name} has format {record.get('format')}; this mlxlin reads format {FORMAT}.")
    if metadata.get("checksum") != _checksum(arrays, text):
        raise SessionError(f"{damaged}: its checksum does not fit.", "Start again without it.")
    for name, array in arrays.items():
        if mx.issubdtype(array.dtype, mx.floating) and not mx.all(mx.isfinite(array)).item():
            raise SessionError(f"{damaged}: '{name}' holds numbers that are not finite.", "Start again without it.")
    return arrays, record


def _checksum(arrays: Mapping[str, mx.array], text: str) -> str:
    total = hashlib.sha256(text.encode())
    for name in sorted(arrays):
        array = mx.contiguous(arrays[name])
        total.update(f"\n{name} {array.dtype} {array.shape}\n".encode())
        # numpy has no bfloat16, so the bytes are looked at as integers
        total.update(np.array(array.reshape(-1).view(_INTEGER_OF_WIDTH[array.dtype.size]), copy=False).view(np.uint8))
    return total.hexdigest()


def _sweep(path: Path) -> None:
    """Remove what killed writers of this file left behind; an hour is longer than any writing takes."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.*"):
        with contextlib.suppress(OSError):
            if left.stat().st_mtime < time.time() - 3600:
                left.unlink()


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
