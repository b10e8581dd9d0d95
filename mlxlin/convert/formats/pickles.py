"""PyTorch's `.bin` and `.pth` files, read without running anything in them.

A pickle names the functions it wants called. Only the handful that rebuild tensors are known here, and they are our own
stand-ins; any other name is refused before it is looked up. Formats: torch/serialization.py, the zip archive of
PyTorch >= 1.6 and the older stream of pickles.
"""

from __future__ import annotations

import contextlib
import math
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from mlxlin.backend import mx
from mlxlin.errors import CheckpointError, MlxlinError, UnsupportedError

from . import shards
from .raw import read_range
from .shards import AGAIN
from .tensor import DTYPES, Tensor, absent

INDEX = "pytorch_model.bin.index.json"
SUFFIXES = (".bin", ".pth", ".pt")
_BESIDE = ("training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth")  # what a training run saves as well
_ZIP = b"PK"  # how a zip archive begins
_MAGIC = 0x1950A86A20F9469CFC6C
_STORAGES = {
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
}
_WRAPPERS = ("state_dict", "model_state_dict", "model", "module")


@dataclass(frozen=True)
class _Storage:
    """A flat run of values inside the file: safetensors dtype name, key of its bytes, number of values."""

    dtype: str
    key: str
    count: int


@dataclass(frozen=True)
class _View:
    """A tensor as the pickle describes it: a strided view of a storage."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _rebuild_tensor(storage: _Storage, offset: int, shape: Any, strides: Any, *_: Any) -> _View:
    return _View(storage, int(offset), tuple(map(int, shape)), tuple(map(int, strides)))


def _rebuild_parameter(view: _View, *_: Any) -> _View:
    return view


_KNOWN = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch._utils", "_rebuild_tensor"): _rebuild_tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    **{("torch", name): dtype for name, dtype in _STORAGES.items()},
}


class _Restricted(pickle.Unpickler):
    """Unpickles plain containers, numbers and tensors; nothing else. `storages` collects what the tensors refer to."""

    def __init__(self, file: IO[bytes], name: str) -> None:
        super().__init__(file)
        self.name = name
        self.storages: dict[str, _Storage] = {}

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _KNOWN[module, name]
        except KeyError:
            raise UnsupportedError(
                f"{self.name} asks for {module}.{name}, which no plain checkpoint needs; nothing in it was run.",
                "Use a safetensors version of this model, or one from a source you trust.",
            ) from None

    def persistent_load(self, pid: Any) -> _Storage:
        kind, dtype, key, _location, count = pid[:5]
        if kind != "storage" or dtype not in DTYPES or (len(pid) > 5 and pid[5] is not None):
            raise UnsupportedError(f"{self.name} holds a kind of storage mlxlin does not know: {pid!r}")
        return self.storages.setdefault(str(key), _Storage(dtype, str(key), int(count)))


def read_file(path: Path) -> dict[str, Tensor]:
    """All tensors of one `.bin`, `.pt` or `.pth` file."""
    with path.open("rb") as file, _damage_named(path.name):
        found = _read(file, path.name)
        places = found.places(file)
        return {key: _tensor(path, view, places) for key, view in found.views.items()}


def blank_tensors(file: IO[bytes], name: str) -> dict[str, Tensor]:
    """The tensors of a file of which little can be read (a remote one): shapes to plan with, zeros for values."""
    with _damage_named(name):
        views = _read(file, name).views
        return {key: _described(view, name, absent).blank() for key, view in views.items()}


@contextlib.contextmanager
def _damage_named(name: str) -> Iterator[None]:
    """Whatever goes wrong while a damaged or made-up file is taken apart is told as damage of that file."""
    try:
        yield
    except MlxlinError:
        raise
    except (
        pickle.UnpicklingError,
        zipfile.BadZipFile,
        EOFError,
        ArithmeticError,
        MemoryError,
        RuntimeError,
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
    ) as error:
        reason = str(error) or type(error).__name__
        raise CheckpointError(f"{name} is damaged or not a PyTorch checkpoint: {reason}", AGAIN) from error


@dataclass(frozen=True)
class _Found:
    """What a file says it holds: tensors by name; where their bytes begin, or the members of the archive they are."""

    views: dict[str, _View]
    starts: Mapping[str, int]
    members: Mapping[str, zipfile.ZipInfo]

    def places(self, file: IO[bytes]) -> dict[str, int]:
        """Storage key -> position of its bytes in the file."""
        return {**self.starts, **{key: _data_start(file, info) for key, info in self.members.items()}}


def _read(file: IO[bytes], name: str) -> _Found:
    head = file.read(64)
    shards.refuse_pointer(head, name)
    file.seek(0)
    if head.startswith(_ZIP):
        if not zipfile.is_zipfile(file):
            raise CheckpointError(f"{name} is truncated: the directory at its end is missing.", AGAIN)
        content, members = _read_zip(file, name)
        starts: dict[str, int] = {}
    else:
        (content, starts), members = _read_stream(file, name), {}
    views = {key: value for key, value in _state_dict(content, name).items() if isinstance(value, _View)}
    if not views:
        raise CheckpointError(f"{name} holds no tensors.")
    return _Found(views, starts, members)


def _state_dict(content: Any, name: str) -> Mapping[str, Any]:
    """The mapping of tensors, unwrapped where a training program saved it inside another one."""
    for wrapper in _WRAPPERS:
        if isinstance(content, Mapping) and isinstance(content.get(wrapper), Mapping):
            content = content[wrapper]
    if not isinstance(content, Mapping) or not all(isinstance(key, str) for key in content):
        raise CheckpointError(f"{name} does not hold a mapping from names to tensors.")
    return content


def _read_zip(file: IO[bytes], name: str) -> tuple[Any, dict[str, zipfile.ZipInfo]]:
    """The pickled content, and the archive's member behind each storage key."""
    with zipfile.ZipFile(file) as archive:
        members = {info.filename: info for info in archive.infolist()}
        root = next((member[: -len("data.pkl")] for member in members if member.endswith("data.pkl")), None)
        if root is None:
            raise CheckpointError(f"{name} is a zip file, but not a PyTorch checkpoint.")
        if root + "byteorder" in members and archive.read(root + "byteorder") != b"little":
            raise UnsupportedError(f"{name} was written on a big-endian machine.")
        data = {
            member.removeprefix(root + "data/"): i for member, i in members.items() if member.startswith(root + "data/")
        }
        for key, info in data.items():
            if info.compress_type != zipfile.ZIP_STORED:
                raise UnsupportedError(f"{name} is compressed inside ({key}).", "Save it uncompressed.")
        with archive.open(root + "data.pkl") as content:
            return _Restricted(content, name).load(), data


def _data_start(file: IO[bytes], info: zipfile.ZipInfo) -> int:
    """Where the bytes of an archive's member begin: behind its local header, whose name and extra field vary."""
    file.seek(info.header_offset + 26)
    lengths = file.read(4)
    return info.header_offset + 30 + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")


def _read_stream(file: IO[bytes], name: str) -> tuple[Any, dict[str, int]]:
    """The format before PyTorch 1.6: magic, version, system, content, storage keys, then count and bytes of each."""
    if _Restricted(file, name).load() != _MAGIC:
        raise CheckpointError(f"{name} is not a PyTorch checkpoint.")
    _Restricted(file, name).load()
    system = _Restricted(file, name).load()
    if not system.get("little_endian", True):
        raise UnsupportedError(f"{name} was written on a big-endian machine.")
    reader = _Restricted(file, name)
    content, starts = reader.load(), {}
    keys = _Restricted(file, name).load()
    position = file.tell()
    for key in keys:
        storage = reader.storages[str(key)]
        starts[storage.key] = position + 8
        position += 8 + storage.count * DTYPES[storage.dtype][0]
    return content, starts


def _tensor(path: Path, view: _View, places: Mapping[str, int]) -> Tensor:
    width = DTYPES[view.storage.dtype][0]
    start = places.get(view.storage.key)
    span = 1 + sum((n - 1) * s for n, s in zip(view.shape, view.strides, strict=True)) if 0 not in view.shape else 0
    if start is None or view.offset + span > view.storage.count or min((view.offset, *view.shape, *view.strides)) < 0:
        raise CheckpointError(f"{path.name} is damaged: a tensor lies outside its storage.", AGAIN)
    if start + (view.offset + span) * width > path.stat().st_size:
        raise CheckpointError(f"{path.name} is truncated.", AGAIN)

    def load() -> mx.array:
        flat = read_range(path, start + view.offset * width, view.storage.dtype, (span,))
        return mx.contiguous(mx.as_strided(flat, list(view.shape), list(view.strides)))

    return _described(view, path.name, load)


def _described(view: _View, file: str, load: Callable[[], mx.array]) -> Tensor:
    dtype = "F32" if view.storage.dtype == "F64" else view.storage.dtype
    return Tensor(view.shape, dtype, load, DTYPES[view.storage.dtype][0] * math.prod(view.shape), file)


def file_names(folder: Path) -> list[str]:
    """The weight files of a folder: the index's, or `pytorch_model.bin`, or one series of shards, or the only file.

    Raises:
        CheckpointError: one of them is missing, or several models lie side by side.
    """
    present = sorted(p.name for p in folder.iterdir() if p.suffix in SUFFIXES and p.name not in _BESIDE)
    names = shards.needed(folder, INDEX, ["pytorch_model.bin"] if "pytorch_model.bin" in present else present)
    if not (folder / INDEX).exists() and len(set(map(shards.series, names))) > 1:
        raise CheckpointError(f"Several checkpoints in one folder: {', '.join(names)}.", "Name the file you want.")
    return names


def read_folder(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder of `.bin` or `.pth` files, checked against the index where there is one."""
    return shards.gather(folder, INDEX, file_names(folder), read_file)
