"""What a kernel did while it ran: the numbers that budget tests assert on."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class BufferUse:
    """Traffic of one kernel argument, in bytes."""

    bytes: int
    loaded: int  # issued by all threads together
    stored: int
    unique_loaded: int  # distinct bytes: what must come from memory at least once
    unique_stored: int


@dataclass(frozen=True)
class SiteUse:
    """How often one load or store of the source was executed, over all threads."""

    part: str  # "source" or "header"
    line: int  # of that part
    column: int
    space: str  # "device", "constant" or "threadgroup"
    is_store: bool
    size: int  # bytes per execution
    count: int


@dataclass(frozen=True)
class Report:
    """Counters of one launch. Those after `atomics` need check=True."""

    threads: int
    threadgroups: int
    threadgroup_bytes: int  # threadgroup memory of one threadgroup
    simd_ops: int  # SIMD functions, per SIMD-group; a matrix load, store or product counts as one
    matrix_products: int  # 8x8x8, per SIMD-group
    barriers: int  # threadgroup barriers, per threadgroup
    simdgroup_barriers: int
    atomics: int
    seconds: float
    warnings: tuple[str, ...] = ()
    flops: int = 0  # scalar float operations outside matrix products, an fma counts 2
    specials: int = 0  # exp, log, sqrt, ...
    buffers: dict[str, BufferUse] = field(default_factory=dict)
    sites: tuple[SiteUse, ...] = ()

    @property
    def matrix_flops(self) -> int:
        return self.matrix_products * 2 * 8 * 8 * 8

    @property
    def issued_bytes(self) -> int:
        """Device and constant bytes loaded and stored by all threads, caches ignored."""
        return sum(use.loaded + use.stored for use in self.buffers.values())

    @property
    def unique_bytes(self) -> int:
        """Distinct device and constant bytes touched: the lower bound of memory traffic."""
        return sum(use.unique_loaded + use.unique_stored for use in self.buffers.values())

    def accesses(self, space: str, *, stores: bool = False) -> int:
        """Load (or store) instructions executed in one address space, summed over threads."""
        return sum(site.count for site in self.sites if site.space == space and site.is_store == stores)
