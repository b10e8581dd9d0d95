"""PyTorch's `.bin` and `.pth` files, read without running anything in them.

A pickle names the functions it wants called. Only the handful that rebuild tensors are known here, and they are our own
stand-ins; any other name is refused before it is looked up. Formats: torch/serialization.py, the zip archive of
PyTorch >= 1.6 and the older stream of pickles.
"""

from __future__ import annotations

import math
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from mlxlin.backend import mx
from mlxlin.errors import CheckpointError, UnsupportedError

from .raw import read_range
from .safetensors import read_index
from .tensor import DTYPES, Tensor

INDEX = "pytorch_model.bin.index.json"
SUFFIXES = (".bin", ".pth", ".pt")
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
    return _View(storage, offset, tuple(shape), tuple(strides))


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

    def load(self) -> Any:
        try:
            return super().load()
        except (pickle.UnpicklingError, EOFError, ValueError, TypeError, LookupError, AttributeError) as error:
            message = f"{self.name} is damaged or not a PyTorch checkpoint: {error}"
            raise CheckpointError(message, "Download it again.") from error


def read_file(path: Path) -> dict[str, Tensor]:
    """All tensors of one `.bin`, `.pt` or `.pth` file."""
    content, places = _read_zip(path) if zipfile.is_zipfile(path) else _read_stream(path)
    views = {key: value for key, value in _state_dict(content, path.name).items() if isinstance(value, _View)}
    if not views:
        raise CheckpointError(f"{path.name} holds no tensors.")
    return {key: _tensor(path, view, places) for key, view in views.items()}


def _state_dict(content: Any, name: str) -> Mapping[str, Any]:
    """The mapping of tensors, unwrapped where a training program saved it inside another one."""
    for wrapper in _WRAPPERS:
        if isinstance(content, Mapping) and isinstance(content.get(wrapper), Mapping):
            content = content[wrapper]
    if not isinstance(content, Mapping) or not all(isinstance(key, str) for key in content):
        raise CheckpointError(f"{name} does not hold a mapping from names to tensors.")
    return content


def _read_zip(path: Path) -> tuple[Any, dict[str, int]]:
    """The pickled content and the position of each storage's bytes in the file."""
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: info for info in archive.infolist()}
        root = next((name[: -len("data.pkl")] for name in members if name.endswith("data.pkl")), None)
        if root is None:
            raise CheckpointError(f"{path.name} is a zip file, but not a PyTorch checkpoint.")
        if root + "byteorder" in members and archive.read(root + "byteorder") != b"little":
            raise UnsupportedError(f"{path.name} was written on a big-endian machine.")
        places = {}
        with path.open("rb") as raw:
            for name, info in members.items():
                if not name.startswith(root + "data/"):
                    continue
                if info.compress_type != zipfile.ZIP_STORED:
                    raise UnsupportedError(f"{path.name} is compressed inside ({name}).", "Save it uncompressed.")
                raw.seek(info.header_offset + 26)  # local header: lengths of the name and of the extra field
                lengths = raw.read(4)
                skip = int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
                places[name[len(root + "data/") :]] = info.header_offset + 30 + skip
        with archive.open(root + "data.pkl") as file:
            return _Restricted(file, path.name).load(), places


def _read_stream(path: Path) -> tuple[Any, dict[str, int]]:
    """The format before PyTorch 1.6: magic, version, system, content, storage keys, then count and bytes of each."""
    with path.open("rb") as file:
        if _Restricted(file, path.name).load() != _MAGIC:
            raise CheckpointError(f"{path.name} is not a PyTorch checkpoint.")
        _Restricted(file, path.name).load()
        system = _Restricted(file, path.name).load()
        if not system.get("little_endian", True):
            raise UnsupportedError(f"{path.name} was written on a big-endian machine.")
        reader = _Restricted(file, path.name)
        content, places = reader.load(), {}
        for key in _Restricted(file, path.name).load():
            storage = reader.storages[str(key)]
            places[storage.key] = file.tell() + 8
            file.seek(8 + storage.count * DTYPES[storage.dtype][0], 1)
        return content, places


def _tensor(path: Path, view: _View, places: Mapping[str, int]) -> Tensor:
    width = DTYPES[view.storage.dtype][0]
    start = places.get(view.storage.key)
    span = 1 + sum((n - 1) * s for n, s in zip(view.shape, view.strides, strict=True)) if 0 not in view.shape else 0
    if start is None or view.offset + span > view.storage.count or min(view.strides, default=0) < 0:
        raise CheckpointError(f"{path.name} is damaged: a tensor lies outside its storage.", "Download it again.")
    if start + (view.offset + span) * width > path.stat().st_size:
        raise CheckpointError(f"{path.name} is truncated.", "Download it again.")

    def load() -> mx.array:
        flat = read_range(path, start + view.offset * width, view.storage.dtype, (span,))
        return mx.contiguous(mx.as_strided(flat, list(view.shape), list(view.strides)))

    dtype = "F32" if view.storage.dtype == "F64" else view.storage.dtype
    return Tensor(view.shape, dtype, load, width * math.prod(view.shape), path.name)


def file_names(folder: Path) -> list[str]:
    """The weight files of a folder: the index's, or `pytorch_model.bin`, or the only `.bin`, `.pth` or `.pt` there.

    Raises:
        CheckpointError: one that the index names is missing, or several models lie side by side.
    """
    index = folder / INDEX
    if index.exists():
        names = sorted(set(read_index(index).values()))
    else:
        names = sorted(p.name for p in folder.iterdir() if p.suffix in SUFFIXES and p.name != "training_args.bin")
        names = ["pytorch_model.bin"] if "pytorch_model.bin" in names else names
        if len(names) > 1:
            raise CheckpointError(f"Several checkpoints in one folder: {', '.join(names)}.", "Name the file you want.")
    for name in names:
        if not (folder / name).is_file():
            raise CheckpointError(f"The checkpoint is incomplete: {name} is missing.", "Download the missing file.")
    return names


def read_folder(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder of `.bin` or `.pth` files."""
    tensors: dict[str, Tensor] = {}
    for name in file_names(folder):
        for key, tensor in read_file(folder / name).items():
            if key in tensors:
                raise CheckpointError(f"Tensor {key} is in both {tensors[key].file} and {name}.")
            tensors[key] = tensor
    return tensors
