"""Checkpoints quantised by MLX tools (mlx-community): packed weights with scales beside them, described in the config.

`config["quantization"]` holds the defaults and, under a module's name, exceptions: {"group_size": 64, "bits": 4,
"mode": "affine", "model.layers.0.mlp.gate": {"group_size": 64, "bits": 8}, "model.layers.1.mlp.gate": false}.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlxlin.backend import mx
from mlxlin.errors import CheckpointError, UnsupportedError
from mlxlin.models.params import QuantSpec

from .tensor import DTYPES, Tensor

PARTS = ("weight", "scales", "biases")
_BAND = 1 << 24  # numbers unpacked at a time
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
    given = {key: value for key, value in settings.items() if value is not None}
    mode = given.get("mode", default.mode if default else "affine")
    bits, groups = MODES.get(mode, MODES["affine"])
    spec = QuantSpec(
        int(given.get("bits", default.bits if default else 4 if 4 in bits else bits[0])),
        int(given.get("group_size", default.group_size if default else 64 if 64 in groups else groups[0])),
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
            if "group_size" in override and override["group_size"] is None:  # MLX tools write so: the mode's own
                override = {
                    **override,
                    "group_size": _group_size(module, tensors, override.get("bits") or default.bits),
                }
            specs[module] = read_spec(override, module, default)
            _check_shapes(module, tensors, specs[module])
    return specs


def _group_size(module: str, tensors: Mapping[str, Tensor], bits: int) -> int:
    return tensors[f"{module}.weight"].shape[-1] * 32 // bits // max(1, tensors[f"{module}.scales"].shape[-1])


def unpacked(module: str, tensors: Mapping[str, Tensor], spec: QuantSpec) -> Tensor:
    """The matrix `module` as plain numbers, in the dtype of its scales (bfloat16 for the floating-point modes)."""
    parts = {part: tensors[f"{module}.{part}"] for part in PARTS if f"{module}.{part}" in tensors}
    shape = parts["weight"].shape
    dtype = parts["scales"].dtype if spec.mode == "affine" else "BF16"

    def load() -> mx.array:
        arrays = {part: tensor.read() for part, tensor in parts.items()}
        target = DTYPES[dtype][1]
        assert target is not None
        return _rounded_once(arrays, spec, target)

    nbytes = sum(tensor.nbytes for tensor in parts.values())
    stored = tuple(name for part, tensor in parts.items() for name in tensor.parts or (f"{module}.{part}",))
    columns = shape[-1] * 32 // spec.bits
    return Tensor((*shape[:-1], columns), dtype, load, nbytes, parts["weight"].file, stored)


def _rounded_once(parts: Mapping[str, mx.array], spec: QuantSpec, dtype: mx.Dtype) -> mx.array:
    """`dequantize` computed in float32, in bands of rows so that the temporaries stay small."""
    flat = {part: array.reshape(-1, array.shape[-1]) for part, array in parts.items()}
    rows, columns = flat["weight"].shape[0], flat["weight"].shape[1] * 32 // spec.bits
    step = max(1, _BAND // columns)
    bands = []
    for start in range(0, rows, step):
        band = {part: array[start : start + step] for part, array in flat.items()}
        bands.append(dequantize(band, spec, mx.float32).astype(dtype))
        mx.eval(bands[-1])
    return mx.concatenate(bands).reshape(*parts["weight"].shape[:-1], columns)


def dequantize(parts: Mapping[str, mx.array], spec: QuantSpec, dtype: mx.Dtype) -> mx.array:
    """The numbers of a packed matrix, computed and returned in `dtype`.

    Args:
        parts: "weight" [..., out, in * bits / 32] uint32, "scales" and, for affine, "biases" [..., out, in / group].
    """
    affine = spec.mode == "affine"
    rows = parts["weight"].reshape(-1, parts["weight"].shape[-1])
    scales, biases = parts["scales"], parts.get("biases")
    flat = mx.dequantize(
        rows,
        (scales.astype(dtype) if affine else scales).reshape(rows.shape[0], -1),
        None if biases is None else biases.astype(dtype).reshape(rows.shape[0], -1),
        group_size=spec.group_size,
        bits=spec.bits,
        mode=spec.mode,
        dtype=None if affine else dtype,
    )
    return flat.reshape(*parts["weight"].shape[:-1], -1)


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
