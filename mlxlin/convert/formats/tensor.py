"""One tensor of a checkpoint, known by shape and dtype before its values are read."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from mlxlin.backend import mx
from mlxlin.errors import CheckpointError

# safetensors dtype names: bytes per element and the MLX dtype the values arrive in (None: MLX has no such type)
DTYPES: dict[str, tuple[int, mx.Dtype | None]] = {
    "F64": (8, None),
    "F32": (4, mx.float32),
    "F16": (2, mx.float16),
    "BF16": (2, mx.bfloat16),
    "I64": (8, mx.int64),
    "I32": (4, mx.int32),
    "I16": (2, mx.int16),
    "I8": (1, mx.int8),
    "U64": (8, mx.uint64),
    "U32": (4, mx.uint32),
    "U16": (2, mx.uint16),
    "U8": (1, mx.uint8),
    "BOOL": (1, mx.bool_),
    "F8_E4M3": (1, mx.uint8),
    "F8_E8M0": (1, mx.uint8),
}
NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "uint32": "U32", "uint8": "U8"}


def dtype_name(dtype: mx.Dtype) -> str:
    """The safetensors name of an MLX dtype, e.g. "BF16" for bfloat16."""
    for name, (_, candidate) in DTYPES.items():
        if candidate is not None and candidate == dtype and not name.startswith("F8"):
            return name
    raise KeyError(str(dtype))


@dataclass(frozen=True)
class Tensor:
    """A tensor of a checkpoint.

    Attributes:
        shape: as the model sees it (quantised tensors: after dequantisation).
        dtype: safetensors name of the dtype `read` returns, e.g. "BF16".
        load: gives the values, lazily (nothing is read from disk before the array is evaluated).
        nbytes: bytes it takes in the source.
        file: where it is stored, for messages.
        parts: names of the stored tensors it is made of, where that is not just itself (a weight and its scales).
    """

    shape: tuple[int, ...]
    dtype: str
    load: Callable[[], mx.array]
    nbytes: int
    file: str = ""
    parts: tuple[str, ...] = ()

    def read(self) -> mx.array:
        """The values, [*shape] in `dtype`."""
        return self.load()

    def blank(self) -> Tensor:
        """The same tensor with zeros for values: enough to plan with, nothing is read."""
        return replace(self, load=lambda: mx.zeros(self.shape, DTYPES[self.dtype][1] or mx.float32))

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def absent() -> mx.array:
    """`Tensor.load` of a tensor whose description is all there is here.

    Raises:
        CheckpointError: always.
    """
    raise CheckpointError("Only the description of this tensor was read, not its values.")
