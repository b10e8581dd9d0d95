"""What the kernels of a call did, launch by launch, and which dispatches a graph holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from mlxlin.backend import mx
from mlxlin.metal import kernels
from mlxlin.recurrences import kernels as paths
from mlxlin.recurrences import mixer
from tests.msl import Report, last_report

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


@dataclass(frozen=True)
class Launch:
    """One dispatch: the kernel's name and the emulator's counters."""

    name: str
    report: Report

    @property
    def issued_bytes(self) -> int:
        """Device bytes loaded and stored by all threads, caches ignored, without the strides."""
        uses = {name: use for name, use in self.report.buffers.items() if not name.endswith("_strides")}
        return sum(use.loaded + use.stored for use in uses.values())

    @property
    def loads_per_product(self) -> float:
        """8x8 tiles loaded, from device or threadgroup memory, per product; a lane loads two elements of a tile."""
        loads = sum(self.report.accesses(space) for space in ("device", "threadgroup"))
        return loads / 64 / self.report.matrix_products


def launches_of(call: Callable[[], Any]) -> list[Launch]:
    """Run `call` and return its dispatches in order."""
    found: list[Launch] = []
    make = kernels.kernel

    def recording(name: str, *args: Any) -> Any:
        run = make(name, *args)

        def wrapped(**inputs: Any) -> Any:
            outputs = run(**inputs)
            found.append(Launch(name, last_report()))
            return outputs

        return wrapped

    with mock.patch.object(kernels, "kernel", recording):
        call()
    return found


@contextmanager
def metal_in_name() -> Iterator[None]:
    """The program believes in Metal and trusts its kernels; for exporting graphs, in which MLX makes them itself."""
    kernels.kernel.cache_clear()
    with (
        mock.patch.object(paths, "on_metal", lambda: True),
        mock.patch.object(mixer, "on_metal", lambda: True),
        mock.patch.object(paths, "trusted", lambda *_: True),
        mock.patch.object(mixer, "trusted_by_key", lambda *_: True),
    ):
        yield
    kernels.kernel.cache_clear()


def exported(call: Callable[..., Any], *arrays: mx.array) -> list[dict[str, Any]]:
    """The primitives of a call, as MLX records them."""
    found: list[dict[str, Any]] = []
    mx.export_function(found.append, call, *arrays)
    return [entry for entry in found if entry["type"] == "primitive"]


def dispatches(primitives: list[dict[str, Any]]) -> Counter[str]:
    """How often each primitive occurs that a GPU has to do something for."""
    return Counter(p["name"] for p in primitives if p["name"] not in VIEWS)
