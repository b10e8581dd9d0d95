"""Metal kernels: source assembled from the `.metal` files beside this module, compiled by `mx.fast.metal_kernel`.

Each file holds whole templated functions. A kernel's body is one call of such a function; its template arguments and
the inputs that are present are written into the call, so a kernel object is one specialisation. MLX compiles it when it
is first evaluated and keeps it by name; the name ends in a hash of everything that was compiled.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any, Protocol, cast

from mlxlin.backend import mx

Shape = tuple[int, ...]
Grid = tuple[int, int, int]
Outputs = dict[str, tuple[Shape, mx.Dtype]]


class MetalKernel(Protocol):
    """What `mx.fast.metal_kernel` returns. `grid` counts threads, not threadgroups."""

    def __call__(
        self,
        *,
        inputs: Sequence[mx.array | int | float],
        output_shapes: Sequence[Shape],
        output_dtypes: Sequence[mx.Dtype],
        grid: Grid,
        threadgroup: Grid,
    ) -> list[mx.array]: ...


@cache
def source(*files: str) -> str:
    """The text of the named `.metal` files, one after the other."""
    folder = resources.files(__package__)
    return "".join(folder.joinpath(f"{name}.metal").read_text("utf-8") + "\n" for name in files)


@cache
def digest() -> str:
    """A hash of all kernel sources and of what assembles them."""
    folder = resources.files(__package__)
    parts = sorted((x.name, x.read_bytes()) for x in folder.iterdir() if x.name.endswith((".metal", ".py")))
    return hashlib.sha256(b"".join(name.encode() + text for name, text in parts)).hexdigest()[:16]


@cache
def kernel(
    name: str, inputs: tuple[str, ...], outputs: tuple[str, ...], files: tuple[str, ...], body: str
) -> MetalKernel:
    """The kernel with this body; made once per process."""
    header = source("common", *files)
    tag = hashlib.sha256("\0".join((header, body, *inputs, *outputs)).encode()).hexdigest()[:12]
    made: Any = mx.fast.metal_kernel(
        name=f"mlxlin_{name}_{tag}",
        input_names=list(inputs),
        output_names=list(outputs),
        header=header,
        source=body,
        # a strided input would be copied by a dispatch of its own; the kernels follow the strides instead
        ensure_row_contiguous=False,
    )
    return cast(MetalKernel, made)


def lanes_per_row(K: int) -> int:
    """Lanes that share a row of the state: each holds at most 32 of its channels."""
    return 4 if K <= 128 else 8


def literal(x: float) -> str:
    """A float as Metal writes it."""
    return f"{x!r}f" if math.isfinite(x) else f"{'-' if x < 0 else ''}INFINITY"


def view(name: str, given: bool = True) -> str:
    """An input in a kernel's body: itself with its strides, or the mark of its absence."""
    return f"view({name}, {name}_strides)" if given else "view(Absent())"


def launch(
    name: str,
    files: Sequence[str],
    call: str,
    inputs: Mapping[str, Any],
    outputs: Mapping[str, tuple[Shape, mx.Dtype]],
    grid: Grid,
    threadgroup: Grid,
) -> list[mx.array]:
    """Build the kernel whose body is `call` and queue it. Inputs that are None are left out of its signature."""
    given = {key: value for key, value in inputs.items() if value is not None}
    run = kernel(name, tuple(given), tuple(outputs), tuple(files), call)
    return run(
        inputs=list(given.values()),
        output_shapes=[shape for shape, _ in outputs.values()],
        output_dtypes=[dtype for _, dtype in outputs.values()],
        grid=grid,
        threadgroup=threadgroup,
    )
