"""A checkpoint folder, opened: its config and its tensors, whatever they are stored as. Nothing in it is ever run."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mlxlin.backend import mx
from mlxlin.errors import CheckpointError, MlxlinError, UnsupportedError
from mlxlin.models import rwkv7
from mlxlin.models.params import QuantSpec

from . import compressed, fp8, mlx_quantized, pickles, safetensors
from .tensor import Tensor

# what other formats look like on disk
_FOREIGN = {
    ".gguf": "GGUF",
    ".ggml": "GGML",
    ".onnx": "ONNX",
    ".h5": "TensorFlow HDF5",
    ".msgpack": "Flax msgpack",
    ".npz": "NumPy npz",
    ".mlmodel": "Core ML",
    ".mlpackage": "Core ML",
    ".tflite": "TensorFlow Lite",
    ".nemo": "NeMo",
    ".llamafile": "llamafile",
    ".ckpt": "Lightning checkpoint",
}
_TAGS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}
READABLE = "mlxlin reads safetensors (also FP8, compressed-tensors and MLX-quantised) and PyTorch .bin or .pth files."


@dataclass(frozen=True)
class Source:
    """An opened checkpoint.

    Attributes:
        config: its config.json; of a bare `.pth` of RWKV-7 what its shapes say; else empty where there is none.
        tensors: by the names of the checkpoint; FP8 and compressed-tensors weights appear as plain tensors.
        format: what it is stored as: "safetensors", "fp8", "compressed-tensors", "mlx-quantised" or "pytorch".
        quantization: MLX-quantised checkpoints: module (without `.weight`) -> how its matrix is packed.
        dropped: (name, reason) of stored tensors that carry no weights.
        notices: what the person should know.
    """

    config: dict[str, Any]
    tensors: Mapping[str, Tensor]
    format: str
    quantization: Mapping[str, QuantSpec] = field(default_factory=dict)
    dropped: tuple[tuple[str, str], ...] = ()
    notices: tuple[str, ...] = ()

    def unpack(self, modules: Collection[str]) -> Source:
        """The same checkpoint with the packed matrices `modules` as plain numbers."""
        parts = {f"{module}.{part}" for module in modules for part in mlx_quantized.PARTS}
        tensors = {name: tensor for name, tensor in self.tensors.items() if name not in parts}
        for module in modules:
            tensors[f"{module}.weight"] = mlx_quantized.unpacked(module, self.tensors, self.quantization[module])
        kept = {name: spec for name, spec in self.quantization.items() if name not in modules}
        notice = f"{len(modules)} matrices that are joined with others quantised differently are kept as plain numbers."
        return replace(self, tensors=tensors, quantization=kept, notices=(*self.notices, notice))


def open_checkpoint(path: Path, dtype: mx.Dtype = mx.bfloat16) -> Source:
    """Open a checkpoint folder, or a single weight file in one.

    Args:
        path: folder with config.json and weights, or a `.safetensors`, `.bin` or `.pth` file.
        dtype: of weights that are dequantised while reading (FP8, compressed-tensors).

    Raises:
        CheckpointError: missing, incomplete or damaged files.
        UnsupportedError: another format, which the message names.
    """
    if not path.exists():
        raise CheckpointError(f"There is no such file or directory: {path}")
    try:
        tensors, kind = _read_folder(path) if path.is_dir() else _read_file(path)
        config = read_config(path if path.is_dir() else path.parent)
    except OSError as error:
        raise CheckpointError(
            f"The checkpoint cannot be read: {error}", "Check the file and its permissions."
        ) from error
    return describe_tensors(config or rwkv7.config_of(tensors), tensors, kind, dtype)


def describe_tensors(config: dict[str, Any], tensors: dict[str, Tensor], kind: str, dtype: mx.Dtype) -> Source:
    """The checkpoint behind stored tensors: quantised ones joined with their scales. `kind` is the file format.

    What is to become float16 is dequantised to float32: `prepare` narrows it, and notices numbers beyond its range.
    """
    dtype = mx.float32 if dtype == mx.float16 else dtype
    try:
        source = _joined(config, tensors, kind, dtype)
    except MlxlinError:
        raise
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
        raise CheckpointError(
            f"config.json is damaged where it says how the weights are stored: {error}", "Download it again."
        ) from error
    for name, tensor in source.tensors.items():
        if tensor.dtype.startswith("F8"):
            raise CheckpointError(
                f"{name} is stored as {tensor.dtype}, but nothing in the checkpoint says how to scale it."
            )
    return source


def _joined(config: dict[str, Any], tensors: dict[str, Tensor], kind: str, dtype: mx.Dtype) -> Source:
    settings = _quantization_config(config) or _quantization_config(config.get("text_config") or {})
    method = settings.get("quant_method")
    dropped: list[tuple[str, str]] = []
    specs: dict[str, QuantSpec] = {}
    plain: dict[str, Tensor] = tensors
    if config.get("quantization") or (settings and method is None and "bits" in settings):
        kind, specs = "mlx-quantised", mlx_quantized.read_specs(tensors, config.get("quantization") or settings)
    elif method == "compressed-tensors":
        kind = method
        plain, specs, dropped = compressed.read(tensors, settings, dtype)
    elif method == "fp8" or (method is None and any(name.endswith(fp8.SUFFIX) for name in tensors)):
        kind = "fp8"
        plain, dropped = fp8.dequantize(tensors, settings, dtype)
    elif method is not None:
        raise UnsupportedError(f"The checkpoint is quantised with '{method}', which mlxlin cannot read.", READABLE)
    return Source(config, plain, kind, specs, tuple(dropped), tuple(_code_notices(config)))


def _quantization_config(config: Mapping[str, Any]) -> dict[str, Any]:
    return config.get("quantization_config") or config.get("compression_config") or {}


def read_config(folder: Path) -> dict[str, Any]:
    """config.json; {} where there is none. Infinities tagged as {"__float__": "Infinity"} become numbers."""
    return read_json(folder / "config.json") if (folder / "config.json").exists() else {}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, with tagged floats decoded."""
    try:
        data = _untag(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.name} is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path.name} does not hold a JSON object.")
    return data


def _untag(value: Any) -> Any:
    if isinstance(value, dict):
        if set(value) == {"__float__"} and value["__float__"] in _TAGS:
            return _TAGS[value["__float__"]]
        return {key: _untag(item) for key, item in value.items()}
    return [_untag(item) for item in value] if isinstance(value, list) else value


def _read_file(path: Path) -> tuple[dict[str, Tensor], str]:
    _refuse_foreign([path])
    if path.suffix in pickles.SUFFIXES:
        return pickles.read_file(path), "pytorch"
    return safetensors.File(path).tensors(), "safetensors"


def _read_folder(folder: Path) -> tuple[dict[str, Tensor], str]:
    files = list(folder.iterdir())
    if safetensors.shard_names(folder):
        return safetensors.read_folder(folder), "safetensors"
    if pickles.file_names(folder):
        return pickles.read_folder(folder), "pytorch"
    _refuse_foreign(files)
    raise CheckpointError(f"There are no weights in {folder}.", READABLE)


def foreign_format(name: str) -> str | None:
    """Name of the format of a weight file that mlxlin cannot read; None for any other file."""
    return _FOREIGN.get(Path(name).suffix.lower())


def _refuse_foreign(files: list[Path]) -> None:
    for path in files:
        if form := foreign_format(path.name):
            raise UnsupportedError(f"{path.name} is in {form} format, which mlxlin cannot read.", READABLE)


def _code_notices(config: Mapping[str, Any]) -> list[str]:
    code = [str(config["model_file"])] if config.get("model_file") else []
    code += sorted({str(value).split(".")[0] + ".py" for value in (config.get("auto_map") or {}).values() if value})
    if not code:
        return []
    return [
        f"The config names Python code ({', '.join(code)}); mlxlin ignores it and never runs code from a checkpoint."
    ]
