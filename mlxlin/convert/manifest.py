"""mlxlin.json: what a converted folder holds, where it came from, and how it was made. No dates, no paths."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from mlxlin.errors import CheckpointError
from mlxlin.models import ModelSpec, QuantSpec, parameters

from .folder import MANIFEST
from .formats import Tensor, read_json, safetensors
from .formats.mlx_quantized import read_spec
from .prepare import Item, Prepared
from .recipe import spec_json
from .writer import Shape

FORMAT = 1


@dataclass(frozen=True)
class Manifest:
    """The content of mlxlin.json.

    Attributes:
        spec: the model's description.
        source: {"repo", "revision", "format"}; repo and revision are null for a local folder.
        options: what the conversion was asked for: {"recipe", "dtype"}.
        quantization: matrix -> how it is packed.
        files: name -> SHA-256 of every other file of the folder.
    """

    spec: ModelSpec
    source: Mapping[str, Any]
    options: Mapping[str, Any]
    quantization: Mapping[str, QuantSpec] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """The file's text; the same for the same content."""
        groups: dict[QuantSpec, list[str]] = {}
        for name, spec in self.quantization.items():
            groups.setdefault(spec, []).append(name)
        data = {
            "format": FORMAT,
            "source": dict(self.source),
            "options": dict(self.options),
            "quantization": [{**spec_json(spec), "matrices": names} for spec, names in groups.items()],
            "files": dict(sorted(self.files.items())),
            "model": self.spec.to_json(),
        }
        return json.dumps(data, indent=1, ensure_ascii=False) + "\n"


def is_converted(folder: Path) -> bool:
    """Whether mlxlin wrote this folder."""
    return (folder / MANIFEST).is_file()


def read_manifest(folder: Path) -> Manifest:
    """Read mlxlin.json.

    Raises:
        CheckpointError: damaged, or written by another version's format.
    """
    data = read_json(folder / MANIFEST)
    found, source = data.get("format"), data.get("source") or {}
    if found != FORMAT:
        origin = (source.get("repo") if isinstance(source, dict) else None) or "the original checkpoint"
        newer = isinstance(found, int) and found > FORMAT
        raise CheckpointError(
            f"{folder.name} was written in mlxlin format {found}; this version reads format {FORMAT}.",
            "Update mlxlin." if newer else f"Convert again from {origin}.",
        )
    try:
        quantization = {name: read_spec(group, name) for group in data["quantization"] for name in group["matrices"]}
        options = {"recipe": data["options"]["recipe"], "dtype": data["options"]["dtype"]}
        for value in (source, options["recipe"] or {}, data["files"]):
            if not isinstance(value, dict):
                raise TypeError(f"{value!r} is no object")
        for name in map(PurePosixPath, data["files"]):
            if name.is_absolute() or ".." in name.parts:
                raise ValueError(f"{name} is outside the folder")
        return Manifest(ModelSpec.from_json(data["model"]), source, options, quantization, data["files"])
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(
            f"{folder.name}/{MANIFEST} is damaged: {error!r}", "Convert the checkpoint again."
        ) from error


def open_converted(folder: Path) -> Prepared:
    """The model in a converted folder; nothing is renamed, and everything must be there.

    Raises:
        CheckpointError: missing, unknown or misshapen parameters.
    """
    return converted(read_manifest(folder), safetensors.read_folder(folder), folder.name)


def converted(manifest: Manifest, tensors: dict[str, Tensor], name_of_model: str) -> Prepared:
    """`open_converted`, from the manifest and the stored tensors."""
    items = []
    for name, parameter in parameters(manifest.spec).items():
        module = name.removesuffix(".weight")
        spec = manifest.quantization.get(module)
        keys = (
            [name] if spec is None else [k for p in ("weight", "scales", "biases") if (k := f"{module}.{p}") in tensors]
        )
        if name not in tensors:
            raise CheckpointError(f"{name_of_model} lacks the parameter '{name}'.", "Convert the checkpoint again.")
        found = {key: tensors.pop(key) for key in keys}
        columns = found[name].shape[-1] * 32 // spec.bits if spec else 0
        shape = found[name].shape if spec is None else (*found[name].shape[:-1], columns)
        if shape != parameter.shape:
            raise CheckpointError(f"'{name}' in {name_of_model} has shape {shape}, not {parameter.shape}.")
        stored = {key: Shape(tensor.dtype, tensor.shape) for key, tensor in found.items()}
        read = lambda found=found: {key: tensor.read() for key, tensor in found.items()}  # noqa: E731
        items.append(Item(name if spec is None else module, parameter.role, shape, tuple(keys), stored, read, spec))
    if tensors:
        raise CheckpointError(f"{name_of_model} holds an unknown parameter '{min(tensors)}'.", "Convert again.")
    return Prepared(manifest.spec, items, "mlxlin")
