"""Checkpoints quantised by MLX tools (mlx-community): packed weights with scales beside them, described in the config.

`config["quantization"]` holds the defaults and, under a module's name, exceptions: {"group_size": 64, "bits": 4,
"mode": "affine", "model.layers.0.mlp.gate": {"group_size": 64, "bits": 8}, "model.layers.1.mlp.gate": false}.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlxlin.errors import CheckpointError, UnsupportedError
from mlxlin.models.params import QuantSpec

from .tensor import Tensor

# mode: (bits, group sizes) that MLX has kernels for
MODES = {
    "affine": ((2, 3, 4, 5, 6, 8), (32, 64, 128)),
    "mxfp4": ((4,), (32,)),
    "mxfp8": ((8,), (32,)),
    "nvfp4": ((4,), (16,)),
}


def check_spec(spec: QuantSpec, name: str) -> QuantSpec:
    """`spec`, or an error that names what is wrong with it."""
    if spec.mode not in MODES:
        raise UnsupportedError(f"{name}: there is no quantisation mode '{spec.mode}'.", f"Use {', '.join(MODES)}.")
    bits, groups = MODES[spec.mode]
    if spec.bits not in bits or spec.group_size not in groups:
        raise UnsupportedError(
            f"{name}: {spec.mode} with {spec.bits} bits and groups of {spec.group_size} is not supported.",
            f"{spec.mode} has bits {', '.join(map(str, bits))} and groups of {', '.join(map(str, groups))}.",
        )
    return spec


def read_spec(settings: Mapping[str, Any], name: str, default: QuantSpec | None = None) -> QuantSpec:
    """A QuantSpec from a config's {"bits", "group_size", "mode"}."""
    mode = settings.get("mode", default.mode if default else "affine")
    bits, groups = MODES.get(mode, MODES["affine"])
    spec = QuantSpec(
        int(settings.get("bits", default.bits if default else 4 if 4 in bits else bits[0])),
        int(settings.get("group_size", default.group_size if default else 64 if 64 in groups else groups[0])),
        str(mode),
    )
    return check_spec(spec, name)


def read_specs(tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> dict[str, QuantSpec]:
    """How each packed matrix is packed: module name (without `.weight`) -> QuantSpec.

    Args:
        tensors: by name, as stored: `X.weight`, `X.scales`, `X.biases`.
        settings: the config's `quantization`.

    Raises:
        CheckpointError: shapes that contradict the bits and group size, missing or left-over parts.
    """
    default = read_spec(settings, "quantization")
    specs: dict[str, QuantSpec] = {}
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".")
        if part != "weight":
            continue
        packed, scaled = tensor.dtype == "U32", f"{module}.scales" in tensors
        if packed != scaled:
            missing = f"{module}.scales is missing" if packed else f"{module}.scales lies beside it"
            raise CheckpointError(f"{name} has dtype {tensor.dtype}, but {missing}.")
        if packed:
            override = settings.get(module, {})
            if override is False:
                raise CheckpointError(f"The config says {module} is not quantised, but it has scales.")
            specs[module] = read_spec(override, module, default)
            _check_shapes(module, tensors, specs[module])
    return specs


def _check_shapes(module: str, tensors: Mapping[str, Tensor], spec: QuantSpec) -> None:
    names = ("scales", "biases") if spec.mode == "affine" else ("scales",)
    for part in names:
        if f"{module}.{part}" not in tensors:
            raise CheckpointError(f"{module}.weight is packed ({spec.mode}), but {module}.{part} is missing.")
    shape = tensors[f"{module}.weight"].shape
    bits = shape[-1] * 32
    expected = (*shape[:-1], bits // (spec.bits * spec.group_size))
    if any(tensors[f"{module}.{part}"].shape != expected for part in names) or bits % (spec.bits * spec.group_size):
        scales = tensors[f"{module}.scales"].shape
        raise CheckpointError(
            f"{module}.weight {shape} and its scales {scales} contradict "
            f"{spec.bits} bits with groups of {spec.group_size}."
        )
