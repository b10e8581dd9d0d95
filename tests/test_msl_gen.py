"""The generated Metal source is, byte for byte, what MLX itself prints."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from mlxlin.backend import mx
from tests.msl import metal_kernel

DTYPES = "float32 float16 bfloat16 int8 int16 int32 int64 uint8 uint16 uint32 uint64 bool_ complex64".split()
SHAPES = [(), (1,), (7,), (8,), (3, 5), (2, 3, 4), (1, 1, 1)]
BODIES = [
    "out0[thread_position_in_grid.x] = 0;",
    "\n  int z = a_ndim; out0[0] = z + a_shape[0] + a_strides[0]; uint q = thread_index_in_simdgroup;\n",
    "uint3 n = threads_per_threadgroup; uint k = simdgroup_index_in_threadgroup * b_shape[0]; // grid_size\n",
    "uint3 n = dispatch_threads_per_threadgroup + threads_per_grid; // data_shape names a_shape\n",
    "return;",
]
HEADERS = ["", "// a header\nconstant int Z = 3;\n", "constant int Z = 3;"]


def printed_by_mlx(capfd: pytest.CaptureFixture[str], folder: Path, make: Any, inputs: list[Any], call: Any) -> str:
    """What MLX prints for a kernel while it records a function; that works without Metal."""
    arrays = [value for value in inputs if isinstance(value, mx.array)]

    def function(*recorded: mx.array) -> list[mx.array]:
        rest = iter(recorded)
        values = [next(rest) if isinstance(value, mx.array) else value for value in inputs]
        return mx.fast.metal_kernel(**make)(inputs=values, verbose=True, **call)

    capfd.readouterr()
    mx.export_function(str(folder / "function.mlxfn"), function, *arrays)
    return capfd.readouterr().out


def signature(value: Any) -> tuple[str, tuple[int, ...]]:
    if isinstance(value, mx.array):
        return str(value.dtype).removeprefix("mlx.core."), value.shape
    return {bool: "bool", int: "int32", float: "float32"}[type(value)], ()


@pytest.mark.parametrize("seed", range(40))
def test_source_equals_what_mlx_prints(seed: int, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rng = random.Random(seed)
    inputs: list[Any] = [mx.zeros(rng.choice(SHAPES)).astype(getattr(mx, rng.choice(DTYPES)))]
    for _ in range(rng.randint(0, 2)):
        array = mx.zeros(rng.choice(SHAPES)).astype(getattr(mx, rng.choice(DTYPES)))
        inputs.append(rng.choice([array, array, array, 3, 2.5, True]))
    n_outputs = rng.randint(1, 2)
    make = {
        "name": f"kernel_{seed}",
        "input_names": ["a", "b", "c"][: len(inputs)],
        "output_names": [f"out{i}" for i in range(n_outputs)],
        "source": rng.choice(BODIES),
        "header": rng.choice(HEADERS),
        "atomic_outputs": rng.random() < 0.3,
    }
    template = rng.choice(
        [
            [],
            [("T", mx.float16)],
            [("T", mx.bfloat16), ("N", rng.randint(-5, 300)), ("F", rng.random() < 0.5)],
            [("F", True), ("T", mx.float32)],
        ]
    )
    outputs = [getattr(mx, rng.choice(["float32", "float16", "bfloat16", "int32", "uint32"])) for _ in range(n_outputs)]
    call: dict[str, Any] = {
        "grid": (1, 1, 1),
        "threadgroup": (1, 1, 1),
        "output_shapes": [(4,)] * n_outputs,
        "output_dtypes": outputs,
    }
    if template:
        call["template"] = template

    dtypes = [str(dtype).removeprefix("mlx.core.") for dtype in outputs]
    ours = metal_kernel(**make).generate([signature(value) for value in inputs], dtypes, template)
    expected = printed_by_mlx(capfd, tmp_path, make, inputs, call)
    assert f"Generated source code for `{make['name']}`:\n```\n{ours.text}\n```\n" == expected
