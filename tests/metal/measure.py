"""What the kernels of a call did, launch by launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

from mlxlin.metal import kernels
from tests.msl import Report, last_report


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
