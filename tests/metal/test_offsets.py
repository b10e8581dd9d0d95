"""Addresses beyond 2^31 elements: what `row` points to, computed in the kernel language without touching the memory."""

from __future__ import annotations

import numpy as np
import pytest

from mlxlin.backend import mx
from mlxlin.metal.kernels import source

BODY = """
    const int lane = thread_position_in_grid.x;
    const Row<const constant float*> r = row(view(x, strides), index[0], index[1], index[2]);
    if (lane == 0) out[0] = r.data - x;
    if (lane == 1) out[1] = (&r.data[index[3] * r.step]) - x;
"""


@pytest.mark.parametrize(
    ("strides", "index"),
    [
        ((131072 * 48 * 128, 48 * 128, 128, 1), (3, 131071, 47, 127)),
        ((128, 4 * 128, 131072 * 4 * 128, 1), (3, 131071, 47, 127)),
        ((1, 64, 2**20, 2**26), (0, 5, 15, 255)),
    ],
    ids=["four rows of 131072 tokens", "heads before tokens", "channels first"],
)
def test_offsets_are_64_bits_wide(strides: tuple[int, ...], index: tuple[int, ...]) -> None:
    kernel = mx.fast.metal_kernel(
        name="offsets",
        input_names=["x", "strides", "index"],
        output_names=["out"],
        header=source("common"),
        source=BODY,
    )
    # below eight elements both arrive in the constant address space, where strides belong
    inputs = [mx.zeros(4), mx.array(np.array(strides, np.int64)), mx.array(index, dtype=mx.int32)]
    (out,) = kernel(
        inputs=inputs, output_shapes=[(2,)], output_dtypes=[mx.int64], grid=(2, 1, 1), threadgroup=(2, 1, 1)
    )
    base = sum(i * s for i, s in zip(index[:3], strides[:3], strict=True))
    assert np.array(out).tolist() == [base, base + index[3] * strides[3]]
    assert max(np.array(out)) > 2**31
