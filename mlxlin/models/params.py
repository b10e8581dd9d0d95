"""Named parameters: what a spec expects (shape and role), and how a model takes them from a mapping."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Literal

from mlxlin.backend import mx
from mlxlin.errors import CheckpointError

# matrix: big projections. embedding, head: vocabulary-sized. gate: small or sensitive projections (decay, beta, router,
# low-rank factors), kept at 8 bit or more. keep: vectors, convolutions, norms, A_log, dt_bias; never quantised.
Role = Literal["matrix", "embedding", "head", "gate", "keep"]


@dataclass(frozen=True)
class Parameter:
    """What a model needs under one name: its shape (unquantised) and its role."""

    shape: tuple[int, ...]
    role: Role


Table = dict[str, Parameter]


@dataclass(frozen=True)
class QuantSpec:
    """How a matrix is packed; the arguments of `mx.quantize`."""

    bits: int
    group_size: int
    mode: str = "affine"


def under(prefix: str, table: Table) -> Table:
    """`table` with every name behind `prefix`."""
    return {f"{prefix}.{name}": parameter for name, parameter in table.items()}


class Params:
    """A view of named arrays from which each is taken once; what is left at the end was not expected."""

    def __init__(self, arrays: MutableMapping[str, mx.array], quantization: Mapping[str, QuantSpec]) -> None:
        self._arrays = arrays
        self._quantization = quantization
        self._prefix = ""
        self._made: list[mx.array] = []

    def at(self, part: str) -> Params:
        """The same arrays, named from `part` on."""
        inner = Params(self._arrays, self._quantization)
        inner._prefix = f"{self._prefix}{part}."
        inner._made = self._made
        return inner

    def made(self, array: mx.array) -> mx.array:
        """`array`, computed from taken ones and kept in their place; evaluated by the next `settle`."""
        self._made.append(array)
        return array

    def settle(self) -> None:
        """Evaluate what was made, so that the arrays it was made from can be freed."""
        mx.eval(self._made)
        self._made.clear()

    def take(self, name: str) -> mx.array:
        """The array `name`, removed from the mapping.

        Raises:
            CheckpointError: it is not there.
        """
        full = self._prefix + name
        if full not in self._arrays:
            raise CheckpointError(f"The parameter '{full}' is missing.")
        return self._arrays.pop(full)

    def has(self, name: str) -> bool:
        """Whether `name` is still there."""
        return self._prefix + name in self._arrays

    def quantization(self, name: str) -> QuantSpec | None:
        """How the matrix `name` is packed; None for plain numbers."""
        return self._quantization.get(self._prefix + name)

    def finish(self) -> None:
        """Refuse what nobody took.

        Raises:
            CheckpointError: names the first array left.
        """
        if self._arrays:
            raise CheckpointError(f"The parameter '{min(self._arrays)}' is not part of this model.")
