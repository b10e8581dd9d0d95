"""Packing a matrix, in bands of rows so that the temporaries stay small."""

from __future__ import annotations

from collections.abc import Iterable

from mlxlin.backend import mx
from mlxlin.errors import NumericsError
from mlxlin.models.params import QuantSpec

from .writer import Shape

_BAND = 1 << 24  # elements quantised at a time


def packed_shapes(shape: tuple[int, ...], dtype: str, spec: QuantSpec) -> dict[str, Shape]:
    """What `quantize` returns for a matrix [..., out, in] stored as `dtype`: part name -> dtype and shape."""
    lead, columns = shape[:-1], shape[-1]
    groups = (*lead, columns // spec.group_size)
    packed = Shape("U32", (*lead, columns * spec.bits // 32))
    if spec.mode == "affine":
        return {"weight": packed, "scales": Shape(dtype, groups), "biases": Shape(dtype, groups)}
    return {"weight": packed, "scales": Shape("U8", groups)}


def quantize(blocks: Iterable[mx.array], shape: tuple[int, ...], spec: QuantSpec, name: str) -> dict[str, mx.array]:
    """Pack a matrix into "weight", "scales" and (affine) "biases".

    Args:
        blocks: its values in order, any number of whole rows at a time; each is let go before the next is asked for.
        shape: of all of it, [..., out, in].
        spec: how to pack.
        name: for messages.

    Raises:
        NumericsError: a value that is not finite; it would spoil its whole group.
    """
    bands: list[tuple[mx.array, ...]] = []
    for block in blocks:
        rows = block.reshape(-1, shape[-1])
        step = max(1, _BAND // shape[-1])
        for start in range(0, rows.shape[0], step):
            band = rows[start : start + step]
            if not mx.isfinite(band).all().item():
                raise NumericsError(f"{name} holds values that are not finite; it cannot be quantised.")
            bands.append(tuple(mx.quantize(band, group_size=spec.group_size, bits=spec.bits, mode=spec.mode)))
            mx.eval(bands[-1])
        del block, rows, band
    joined = bands[0] if len(bands) == 1 else tuple(mx.concatenate(list(parts)) for parts in zip(*bands, strict=True))
    names = ("weight", "scales", "biases")[: len(joined)]
    return {part: array.reshape(*shape[:-1], -1) for part, array in zip(names, joined, strict=True)}
