"""FP8 checkpoints: e4m3 weights with one scale per 128 x 128 block (`weight_scale_inv`), per row or per tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlxlin.backend import mx
from mlxlin.errors import CheckpointError, UnsupportedError

from .tensor import Tensor, dtype_name

SUFFIX = "_scale_inv"
BLOCK = (128, 128)
_BAND = 1 << 24  # elements dequantised at a time, so that the float32 temporaries stay small
_ACTIVATIONS = (".input_scale", ".activation_scale", ".activation_scale_inv")


def dequantize(
    tensors: Mapping[str, Tensor], settings: Mapping[str, Any], dtype: mx.Dtype
) -> tuple[dict[str, Tensor], list[tuple[str, str]]]:
    """Replace every FP8 tensor and its scale by one tensor of `dtype`.

    Args:
        tensors: by name, as stored.
        settings: the config's `quantization_config`.
        dtype: of the dequantised weights.

    Returns:
        The tensors, and (name, reason) of those left out.

    Raises:
        UnsupportedError: another number format or block size.
        CheckpointError: an FP8 tensor without its scale, a scale without its tensor, a scale of the wrong shape.
    """
    fmt, block = settings.get("fmt") or "e4m3", settings.get("weight_block_size", list(BLOCK))
    if fmt not in ("e4m3", "float8_e4m3fn"):
        raise UnsupportedError(f"FP8 weights in format '{fmt}' are not supported, only e4m3 is.")
    if block is not None and tuple(block) != BLOCK:
        raise UnsupportedError(f"FP8 weights with weight_block_size {block} are not supported, only [128, 128] is.")
    result: dict[str, Tensor] = {}
    dropped: list[tuple[str, str]] = []
    for name, tensor in tensors.items():
        if name.endswith(_ACTIVATIONS):
            dropped.append((name, "scale of FP8 activations; mlxlin computes in floats"))
        elif name.endswith(SUFFIX):
            if not tensors.get(name[: -len(SUFFIX)], tensor).dtype.startswith("F8_E4M3"):
                raise CheckpointError(f"{name} is the scale of an FP8 tensor that is not in the checkpoint.")
        elif tensor.dtype == "F8_E4M3":
            result[name] = scaled(name, name + SUFFIX, tensors, dtype, BLOCK if block else None)
        else:
            result[name] = tensor
    return result, dropped


def scaled(
    name: str, scale_name: str, tensors: Mapping[str, Tensor], dtype: mx.Dtype, block: tuple[int, int] | None
) -> Tensor:
    """The dequantised tensor [..., N, K]; `block` None means a scale per tensor [1] or per row [N, 1].

    Raises:
        CheckpointError: the scale is missing or of another shape.
    """
    tensor, scale = tensors[name], tensors.get(scale_name)
    if scale is None:
        kind = "FP8" if tensor.dtype.startswith("F8") else tensor.dtype
        raise CheckpointError(f"{name} is stored as {kind}, but its scale {scale_name} is missing.")
    rows, cols = tensor.shape[-2:] if len(tensor.shape) > 1 else (1, tensor.shape[0])
    lead = tensor.shape[:-2]
    if block:
        expected = {(*lead, -(-rows // block[0]), -(-cols // block[1]))}
    else:
        expected = {(), (1,), lead, (*lead, 1, 1), (*lead, rows), (*lead, rows, 1)}
    if scale.shape not in expected:
        kind = f"blocks of {block[0]} x {block[1]}" if block else "one scale per tensor or row"
        raise CheckpointError(
            f"The scale of {name} has shape {scale.shape}, which does not fit {kind} of {tensor.shape}."
        )

    def load() -> mx.array:
        return _multiply(tensor.read(), _floats(scale), block, dtype)

    nbytes = tensor.nbytes + scale.nbytes
    return Tensor(tensor.shape, dtype_name(dtype), load, nbytes, tensor.file, (name, scale_name))


def _floats(scale: Tensor) -> mx.array:
    """A scale as float32; E8M0 bytes are powers of two with bias 127 (OCP microscaling formats, section 5.4.1)."""
    values = scale.read()
    if scale.dtype == "F8_E8M0":
        return mx.power(mx.array(2.0), values.astype(mx.float32) - 127)
    return values.astype(mx.float32)


def _multiply(codes: mx.array, scale: mx.array, block: tuple[int, int] | None, dtype: mx.Dtype) -> mx.array:
    """e4m3 bytes or int8 [..., N, K] times their scales, computed in float32 and rounded once to `dtype`."""
    shape = codes.shape
    rows, cols = (shape[-2], shape[-1]) if len(shape) > 1 else (1, shape[0])
    flat = codes.reshape(-1, rows, cols)
    if block:
        scale = mx.repeat(scale.reshape(flat.shape[0], *scale.shape[-2:]), block[0], axis=1)[:, :rows]
    else:
        per_row = scale.size > flat.shape[0]
        scale = mx.broadcast_to(scale.reshape(-1, rows if per_row else 1, 1), (flat.shape[0], rows, 1))
    step = max(1, _BAND // max(1, flat.shape[0] * cols))
    result = mx.zeros(flat.shape, dtype)
    for start in range(0, rows, step):
        band = slice(start, start + step)
        factor = mx.repeat(scale[:, band], block[1], axis=2)[:, :, :cols] if block else scale[:, band]
        values = flat[:, band].astype(mx.float32) if codes.dtype == mx.int8 else mx.from_fp8(flat[:, band], mx.float32)
        result[:, band] = (values * factor).astype(dtype)
        mx.eval(result)  # band by band, in place
    return result.reshape(shape)
