"""How a kernel is compiled and run."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

# by macOS: 14 -> 3.1, 15 -> 3.2, 26 -> 4.0, 27 -> 4.1
METAL_VERSIONS = (310, 320, 400, 410)


@dataclass(frozen=True)
class Options:
    """Keywords of `metal_kernel`, of its kernels' calls and of `install`."""

    check: bool = True
    """Instrument every memory access. Without it a kernel runs several times faster, and only divergence, barriers,
    uniform arguments and accesses past the end of a buffer are noticed."""

    strict: bool = True
    """Stop also at what many GPUs tolerate (divergent SIMD functions, races, reads of uninitialised memory). Otherwise
    these become `last_report().warnings` and the kernel goes on."""

    lint: bool = True
    """Refuse what clang accepts and Apple's compiler does not (LintError)."""

    order: int = 0
    """Schedule, 0..7: bit 0 runs the lanes of a SIMD-group in descending order, bit 1 the SIMD-groups, bit 2 the
    threadgroups. Same order, same result, bit for bit."""

    align: int | None = None
    """Alignment of the buffers in bytes; the element size proves that no vector access relies on more."""

    last: int | None = None
    """Run only so many threadgroups, the last ones of the grid. Outputs are then numpy arrays (bfloat16 as uint16) in
    reserved memory, zero where nothing is written, so that they can be larger than any memory."""

    max_threads: int = 1024
    """Threads per threadgroup that the pipeline allows (fewer for kernels that need many registers)."""

    threadgroup_limit: int = 32768
    """Bytes of threadgroup memory."""

    metal: int = field(default_factory=lambda: int(os.environ.get("MLXLIN_MSL_METAL", METAL_VERSIONS[0])))
    """Language version; C++14 below 400, C++17 from there."""

    def __post_init__(self) -> None:
        if self.order not in range(8):
            raise ValueError(f"order must be 0..7, not {self.order}")
        if self.metal not in METAL_VERSIONS:
            raise ValueError(f"unknown Metal version {self.metal}; one of {METAL_VERSIONS}")
