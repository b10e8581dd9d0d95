"""Which dispatches a call costs on Metal, read off the graph that MLX exports of it.

Graphs are exported here without a GPU, with MLX's own kernel objects. What is one kernel on Metal but several
operations on a CPU (norms, rotation, attention, compiled functions) is represented by a kernel of that name.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from mlxlin import backend
from mlxlin.backend import mx
from mlxlin.metal import kernels
from mlxlin.models import moe, residual
from mlxlin.recurrences import kernels as paths
from mlxlin.recurrences import mixer, rwkv7

# Primitives that only look at an array in another way
VIEWS = {
    "AsStrided",
    "Broadcast",
    "ExpandDims",
    "Flatten",
    "Reshape",
    "Slice",
    "Split",
    "Squeeze",
    "Transpose",
    "Unflatten",
}
_FUSED = ("rms_norm", "layer_norm", "rope", "scaled_dot_product_attention")


@contextmanager
def metal_in_name() -> Iterator[None]:
    """The program believes in Metal and trusts its kernels."""
    kernels.kernel.cache_clear()
    with ExitStack() as stack:
        for module in (backend, mixer, moe, paths, residual, rwkv7):
            stack.enter_context(mock.patch.object(module, "on_metal", lambda: True))
        for module in (mixer, moe, residual, rwkv7):
            stack.enter_context(mock.patch.object(module, "trusted_by_key", lambda *_: True))
        stack.enter_context(mock.patch.object(paths, "trusted", lambda *_: True))
        stack.enter_context(mock.patch.object(backend, "compiled", lambda f: _one(f.__name__, f)))
        for owner, name in ((mx, "contiguous"), (mx, "dequantize"), *((mx.fast, name) for name in _FUSED)):
            stack.enter_context(mock.patch.object(owner, name, _one(name, getattr(owner, name))))
        yield
    kernels.kernel.cache_clear()


def _one(name: str, function: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """A function with the results' shape and dtype of another, by one dispatch."""

    def call(*arguments: Any, **options: Any) -> mx.array:
        like = function(*arguments, **options)  # left out of the graph, for nothing uses it
        arrays = [x for x in (*arguments, *options.values()) if isinstance(x, mx.array)]
        names = [f"x{i}" for i in range(len(arrays))]
        kernel = mx.fast.metal_kernel(
            name=f"mlxlin_{name}_0", input_names=names, output_names=["out"], source=f"out[0] = {' + '.join(names)};"
        )
        sizes: dict[str, Any] = {"grid": (1, 1, 1), "threadgroup": (1, 1, 1)}
        (out,) = kernel(inputs=arrays, output_shapes=[like.shape], output_dtypes=[like.dtype], **sizes)
        return out

    return call


def exported(call: Callable[..., Any], *arrays: mx.array) -> list[dict[str, Any]]:
    """The primitives of a call, as MLX records them."""
    found: list[dict[str, Any]] = []
    mx.export_function(found.append, call, *arrays)
    return [entry for entry in found if entry["type"] == "primitive"]


def dispatches(primitives: list[dict[str, Any]]) -> Counter[str]:
    """How often each primitive occurs that a GPU has to do something for; kernels by their names."""
    return Counter(_name(p) for p in primitives if p["name"] not in VIEWS)


def _name(primitive: dict[str, Any]) -> str:
    if primitive["name"] != "CustomKernel":
        return str(primitive["name"])
    return re.sub(r"^custom_kernel_mlxlin_(.*?)_(0|[0-9a-f]{12})_.*$", r"\1", primitive["arguments"][0])
