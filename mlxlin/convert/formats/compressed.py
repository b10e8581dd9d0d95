"""compressed-tensors checkpoints: FP8 (`float-quantized`), int8 (`int-quantized`), packed integers (`pack-quantized`).

Packed integers hold `weight_packed` int32 [N, K * bits / 32], lowest bits first, each value offset by 2^(bits-1);
`weight_scale` [N, K / group]; optionally `weight_zero_point` packed along N and `weight_g_idx`, the group of each
column. w = scale * (q - zero).  (compressed-tensors, compressors/pack_quantized)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlxlin.backend import mx
from mlxlin.errors import CheckpointError, UnsupportedError
from mlxlin.models.params import QuantSpec

from .fp8 import scaled
from .tensor import Tensor, dtype_name

_PACKED, _SCALE = "weight_packed", "weight_scale"
_PARTS = (_PACKED, _SCALE, "weight_shape", "weight_zero_point", "weight_g_idx")
_ACTIVATIONS = (".input_scale", ".output_scale", ".input_zero_point", ".output_zero_point", ".k_scale", ".v_scale")
_FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized", "dense")


def read(
    tensors: Mapping[str, Tensor], settings: Mapping[str, Any], dtype: mx.Dtype
) -> tuple[dict[str, Tensor], dict[str, QuantSpec], list[tuple[str, str]]]:
    """Replace every quantised weight and its scales by one tensor of `dtype`, or by what MLX computes with directly.

    Symmetric packed integers are the same words as MLX's affine ones with biases of -2^(bits-1) scales, so they stay
    packed; everything else is dequantised.

    Returns:
        The tensors; module -> how its matrix is packed, where it is; (name, reason) of those left out.

    Raises:
        As `fp8.dequantize`.
    """
    groups = list((settings.get("config_groups") or {}).values())
    _check_formats(settings, groups)
    weights = [group["weights"] for group in groups if group.get("weights")]
    result: dict[str, Tensor] = {}
    dropped: list[tuple[str, str]] = []
    packed: dict[str, QuantSpec] = {}
    used = 0
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".")
        if name.endswith(_ACTIVATIONS):
            dropped.append((name, "scale of quantised activations; mlxlin computes in floats"))
        elif part == _PACKED:
            bits = _bits(weights, module)
            spec = _as_mlx(module, tensors, bits)
            if spec is not None:
                packed[module] = spec
                result.update(_repacked(module, tensors, spec))
            else:
                result[f"{module}.weight"] = _unpacked(module, tensors, bits, dtype)
            used += 1
        elif part == "weight" and tensor.dtype in ("F8_E4M3", "I8"):
            if f"{module}.weight_zero_point" in tensors:
                raise UnsupportedError(f"{name} has zero points, which are supported for packed integers only.")
            result[name] = scaled(name, f"{module}.{_SCALE}", tensors, dtype, _block(weights, module, tensors))
            used += 1
        elif part not in _PARTS:
            result[name] = tensor
        elif f"{module}.weight" not in tensors and f"{module}.{_PACKED}" not in tensors:
            raise CheckpointError(f"{name} belongs to a quantised weight that is not in the checkpoint.")
    if not used and settings.get("format") != "dense":
        form = settings.get("format")
        raise CheckpointError(f"The config promises compressed-tensors '{form}', but no tensor is stored that way.")
    return result, packed, dropped


def _check_formats(settings: Mapping[str, Any], groups: list[dict[str, Any]]) -> None:
    formats = {settings.get("format")} if settings.get("format") != "mixed-precision" else set()
    formats |= {group["format"] for group in groups if group.get("format")}
    for form in sorted(formats - set(_FORMATS), key=str):
        raise UnsupportedError(
            f"compressed-tensors format '{form}' is not supported.", f"Supported are: {', '.join(_FORMATS)}."
        )
    sparsity = (settings.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise UnsupportedError(f"compressed-tensors sparsity '{sparsity}' is not supported.")


def _bits(weights: list[dict[str, Any]], module: str) -> int:
    kinds = {f"{w.get('type', 'int')}{w.get('num_bits')}" for w in weights}
    if kinds not in ({"int4"}, {"int8"}):
        kind = " and ".join(sorted(kinds))
        raise UnsupportedError(f"{module}.{_PACKED} is packed as {kind}; only int4 or int8 is supported.")
    return 4 if kinds == {"int4"} else 8


def _block(weights: list[dict[str, Any]], module: str, tensors: Mapping[str, Tensor]) -> tuple[int, int] | None:
    """Block size where the scale is per block: more than one column of scales."""
    scale = tensors.get(f"{module}.{_SCALE}")
    if scale is None or len(scale.shape) < 2 or scale.shape[-1] == 1:
        return None
    for w in weights:
        if w.get("strategy") == "block" and w.get("block_structure"):
            rows, cols = w["block_structure"]
            return int(rows), int(cols)
        if w.get("strategy") == "group" and w.get("group_size"):
            return 1, int(w["group_size"])
    return None


def _unpacked(module: str, tensors: Mapping[str, Tensor], bits: int, dtype: mx.Dtype) -> Tensor:
    packed, scale = tensors[f"{module}.{_PACKED}"], tensors.get(f"{module}.{_SCALE}")
    zero, order = tensors.get(f"{module}.weight_zero_point"), tensors.get(f"{module}.weight_g_idx")
    if scale is None:
        raise CheckpointError(f"{module}.{_PACKED} has no scale: {module}.{_SCALE} is missing.")
    rows, cols = packed.shape[0], packed.shape[1] * 32 // bits
    groups = scale.shape[1] if len(scale.shape) == 2 else 1
    if scale.size not in (1, rows * groups) or cols % groups:
        raise CheckpointError(
            f"The scale of {module}.weight has shape {scale.shape}, which does not fit {(rows, cols)}."
        )

    def load() -> mx.array:
        _refuse_padding(module, tensors, rows, cols)
        codes = _unpack(packed.read(), bits)
        zeros = _zero_points(zero, rows, groups, bits)
        factors = mx.broadcast_to(scale.read().astype(mx.float32).reshape(-1, groups), (rows, groups))
        if order is not None:  # columns were regrouped by importance: column j belongs to group order[j]
            index = order.read()
            return ((codes - mx.take(zeros, index, axis=1)) * mx.take(factors, index, axis=1)).astype(dtype)
        grouped = codes.reshape(rows, groups, cols // groups)
        return ((grouped - zeros[..., None]) * factors[..., None]).reshape(rows, cols).astype(dtype)

    parts = tuple(f"{module}.{part}" for part in _PARTS if f"{module}.{part}" in tensors)
    nbytes = sum(tensors[part].nbytes for part in parts)
    return Tensor((rows, cols), dtype_name(dtype), load, nbytes, packed.file, parts)


def _as_mlx(module: str, tensors: Mapping[str, Tensor], bits: int) -> QuantSpec | None:
    """How MLX would describe the packed matrix; None where it cannot, or where the checkpoint is inconsistent."""
    packed, scale = tensors[f"{module}.{_PACKED}"], tensors.get(f"{module}.{_SCALE}")
    others = [f"{module}.{part}" for part in ("weight_zero_point", "weight_g_idx")]
    if scale is None or len(scale.shape) != 2 or any(name in tensors for name in others):
        return None
    columns = packed.shape[-1] * 32 // bits
    if scale.shape[0] != packed.shape[0] or columns % scale.shape[1]:
        return None
    width = columns // scale.shape[1]
    return next((QuantSpec(bits, size) for size in (128, 64, 32) if width % size == 0), None)


def _repacked(module: str, tensors: Mapping[str, Tensor], spec: QuantSpec) -> dict[str, Tensor]:
    """weight, scales and biases as MLX stores them; a scale for a wider group is repeated."""
    packed, scale = tensors[f"{module}.{_PACKED}"], tensors[f"{module}.{_SCALE}"]
    rows, words = packed.shape
    columns = words * 32 // spec.bits
    groups = columns // spec.group_size

    def weight() -> mx.array:
        _refuse_padding(module, tensors, rows, columns)
        return packed.read().view(mx.uint32)

    def scales() -> mx.array:
        return mx.repeat(scale.read(), groups // scale.shape[1], axis=1)

    def biases() -> mx.array:
        return mx.multiply(scales(), -(2 ** (spec.bits - 1)))

    stored = (rows, groups), scale.dtype
    parts = tuple(f"{module}.{part}" for part in (_PACKED, "weight_shape") if f"{module}.{part}" in tensors)
    return {
        f"{module}.weight": Tensor((rows, words), "U32", weight, packed.nbytes, packed.file, parts),
        f"{module}.scales": Tensor(*stored, scales, scale.nbytes, scale.file, (f"{module}.{_SCALE}",)),
        f"{module}.biases": Tensor(*stored, biases, scale.nbytes, scale.file, (f"{module}.{_SCALE}",)),
    }


def _refuse_padding(module: str, tensors: Mapping[str, Tensor], rows: int, columns: int) -> None:
    stated = tensors.get(f"{module}.weight_shape")
    if stated is not None and stated.read().tolist() != [rows, columns]:  # type: ignore[comparison-overlap]
        raise UnsupportedError(f"{module}.weight has padded rows ({stated.read().tolist()} in {(rows, columns)}).")


def _zero_points(packed: Tensor | None, rows: int, groups: int, bits: int) -> mx.array:
    """[N, groups]; the middle of the range where the checkpoint is symmetric."""
    if packed is None:
        return mx.full((rows, groups), 2.0 ** (bits - 1), mx.float32)
    return _unpack(mx.contiguous(packed.read().T), bits)[:, :rows].T


def _unpack(packed: mx.array, bits: int) -> mx.array:
    """int32 [N, M] -> float32 [N, M * 32 / bits], lowest bits first, still offset by 2^(bits-1)."""
    shifts = mx.arange(0, 32, bits, dtype=mx.uint32)
    codes = (packed.view(mx.uint32)[..., None] >> shifts) & ((1 << bits) - 1)
    return codes.reshape(packed.shape[0], -1).astype(mx.float32)
