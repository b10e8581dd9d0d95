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


@dataclass(frozen=True)
class Budget:
    """Upper bounds; products and barriers are exact.

    Attributes:
        unique: distinct device bytes, the least a memory could move.
        issued: device bytes over all threads, caches ignored.
        products: 8x8x8 matrix products.
        loads: tiles loaded per product.
        flops, simd: scalar operations outside products, SIMD functions.
        barriers: of whole threadgroups.
        threadgroup: bytes of threadgroup memory.
    """

    unique: int
    issued: int
    flops: int
    simd: int
    products: int = 0
    loads: float = 0.0
    barriers: int = 0
    threadgroup: int = 0

    def check(self, launch: Launch) -> None:
        report = launch.report
        assert report.matrix_products == self.products
        assert report.barriers == self.barriers
        assert report.threadgroup_bytes <= self.threadgroup
        assert report.unique_bytes <= self.unique
        assert launch.issued_bytes <= self.issued
        assert report.flops <= self.flops
        assert report.simd_ops <= self.simd
        if self.products:
            assert launch.loads_per_product <= self.loads


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
