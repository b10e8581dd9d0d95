"""Runs a compiled kernel once: argument table, guarded memory, verdict and report."""

from __future__ import annotations

import ctypes as c
import re
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from .arrays import InputArray
from .buffers import BufferStructure, Memory, Output, Placed, memory_of_input, memory_of_output
from .compile import CompiledKernel, locate, runtime
from .errors import RunError
from .gen import Generated
from .options import Options
from .report import BufferUse, Report, SiteUse

_SPACES = {1: "device", 2: "constant", 3: "threadgroup"}
_LOCK = threading.Lock()  # the runtime keeps its state in globals


class _Site(c.Structure):
    _fields_ = [(name, c.c_uint32) for name in ("size", "align", "space", "is_store", "float_bytes", "line", "column")]


class _Launch(c.Structure):
    _fields_ = [
        ("entry", c.c_void_p),
        ("arguments", c.c_void_p),
        ("grid", c.c_uint32 * 3),
        ("threadgroup", c.c_uint32 * 3),
        ("last", c.c_uint64),
        *((name, c.c_uint32) for name in ("check", "strict", "order", "threadgroup_limit", "n_buffers")),
        ("buffers", c.POINTER(BufferStructure)),
        ("sites", c.POINTER(_Site)),
        ("site_counts", c.POINTER(c.c_uint64)),
        ("failed", c.c_uint32),
        ("threadgroup_bytes", c.c_uint32),
        *((name, c.c_uint64) for name in ("simd_ops", "barriers", "simdgroup_barriers", "matrix_products")),
        *((name, c.c_uint64) for name in ("flops", "specials", "atomics", "n_warnings")),
        ("message", c.c_char * 2048),
        ("warnings", c.c_char * 4096),
    ]


def launch(
    compiled: CompiledKernel,
    inputs: Sequence[InputArray],
    output_shapes: Sequence[tuple[int, ...]],
    output_dtypes: Sequence[str],
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
    init_value: float | None,
    options: Options,
) -> tuple[list[np.ndarray[Any, Any]], Report]:
    """Outputs (bfloat16 as uint16) and counters; RunError if anything undefined happened."""
    memories: list[Memory] = []
    outputs: list[Output | Placed] = []
    try:
        for argument in compiled.kernel.arguments:
            i = argument.index
            if argument.kind == "out":
                outputs.append(memory_of_output(argument, output_shapes[i], output_dtypes[i], init_value, options))
                memories.append(outputs[-1])
            else:
                memories.append(memory_of_input(argument, inputs[i], options))
        state, structures, counts = _run(compiled, memories, grid, threadgroup, options)
        report = _report(compiled, state, structures, counts, grid, threadgroup)
        if compiled.check and init_value is None:
            for output in outputs:
                if isinstance(output, Output):
                    _require_written(compiled.kernel.kernel_name, output)
        results = [output.elements() for output in outputs]
    finally:
        for memory in memories:
            memory.free()
    return results, report


def _run(
    compiled: CompiledKernel,
    memories: Sequence[Memory],
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
    options: Options,
) -> tuple[_Launch, Any, Any]:
    state = _Launch()
    structures = (BufferStructure * len(memories))(*(memory.structure() for memory in memories))
    n_sites = len(compiled.sites)
    sites = (_Site * max(n_sites, 1))(*(_Site(*map(int, site)) for site in compiled.sites))
    counts = (c.c_uint64 * max(n_sites, 1))()
    table = (c.c_void_p * len(memories))(*(memory.pointer for memory in memories))
    state.entry, state.arguments = compiled.entry, c.cast(table, c.c_void_p)
    state.grid[:], state.threadgroup[:] = grid, threadgroup
    state.last = 2**64 - 1 if options.last is None else options.last
    state.check, state.strict, state.order = int(compiled.check), int(options.strict), options.order
    state.threadgroup_limit = options.threadgroup_limit
    state.n_buffers = len(memories)
    state.buffers, state.sites, state.site_counts = structures, sites, counts
    with _LOCK:
        start = time.perf_counter()
        if all(grid):
            runtime().mtl_launch(c.byref(state))
        state.seconds = time.perf_counter() - start
    if state.failed:
        raise RunError(f"{compiled.kernel.kernel_name}: {_locate(compiled.kernel, state.message)}")
    return state, structures, counts


def _report(
    compiled: CompiledKernel,
    state: Any,
    structures: Any,
    counts: Any,
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
) -> Report:
    uses = {
        s.name.decode(): BufferUse(s.bytes, s.loaded, s.stored, s.unique_loaded, s.unique_stored) for s in structures
    }
    sites = tuple(
        SiteUse(
            *locate(compiled.kernel, site.line), site.column, _SPACES[site.space], bool(site.is_store), site.size, count
        )
        for site, count in zip(compiled.sites, counts, strict=False)
    )
    return Report(
        threads=int(np.prod(grid, dtype=np.int64)),
        threadgroups=int(np.prod([-(-g // t) if t else 0 for g, t in zip(grid, threadgroup, strict=True)])),
        threadgroup_bytes=state.threadgroup_bytes,
        simd_ops=state.simd_ops,
        matrix_products=state.matrix_products,
        barriers=state.barriers,
        simdgroup_barriers=state.simdgroup_barriers,
        atomics=state.atomics,
        seconds=state.seconds,
        warnings=tuple(_locate(compiled.kernel, state.warnings).splitlines()),
        flops=state.flops,
        specials=state.specials,
        buffers=uses if compiled.check else {},
        sites=sites,
    )


def _locate(kernel: Generated, message: bytes) -> str:
    """The runtime's message with lines of the generated text replaced by those of `source` or `header`."""

    def position(match: re.Match[str]) -> str:
        line, column = map(int, match.groups())
        part, line = locate(kernel, line)
        return f"{part} line {line}:{column}"

    return re.sub(r"\bline (\d+):(\d+)", position, message.decode())


def _require_written(kernel: str, output: Output) -> None:
    missing = output.missing()
    if missing.any():
        first = tuple(int(i) for i in np.unravel_index(int(missing.argmax()), missing.shape))
        raise RunError(
            f"{kernel}: output '{output.name}': {np.count_nonzero(missing)} of {missing.size} elements never written "
            f"(first: {first})"
        )
