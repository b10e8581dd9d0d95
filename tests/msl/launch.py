"""Runs a compiled kernel once: argument table, guarded memory, verdict and report."""

from __future__ import annotations

import ctypes as c
import re
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from .arrays import InputArray, filled, untouched
from .compile import CompiledKernel, locate, runtime
from .errors import RunError
from .gen import Argument, Generated
from .options import Options
from .report import BufferUse, Report, SiteUse

_SPACES = {1: "device", 2: "constant", 3: "threadgroup"}
_VALID, _READ, _WRITTEN, _FOREIGN = 1, 2, 4, 8  # Byte in rt/abi.h
_FAR = 1 << 28  # bytes from end to end of an input, from which on it is not copied
_LOCK = threading.Lock()  # the runtime keeps its state in globals


class _Site(c.Structure):
    _fields_ = [(name, c.c_uint32) for name in ("size", "align", "space", "is_store", "float_bytes", "line", "column")]


class _Buffer(c.Structure):
    _fields_ = [
        ("base", c.c_void_p),
        ("bytes", c.c_uint64),
        ("item_size", c.c_uint32),
        ("is_output", c.c_uint32),
        ("name", c.c_char_p),
        ("state", c.c_void_p),
        ("loaded", c.c_uint64),
        ("stored", c.c_uint64),
    ]


class _Launch(c.Structure):
    _fields_ = [
        ("entry", c.c_void_p),
        ("arguments", c.c_void_p),
        ("grid", c.c_uint32 * 3),
        ("threadgroup", c.c_uint32 * 3),
        *((name, c.c_uint32) for name in ("check", "strict", "order", "threadgroup_limit", "n_buffers")),
        ("buffers", c.POINTER(_Buffer)),
        ("sites", c.POINTER(_Site)),
        ("site_counts", c.POINTER(c.c_uint64)),
        ("failed", c.c_uint32),
        ("threadgroup_bytes", c.c_uint32),
        *((name, c.c_uint64) for name in ("simd_ops", "barriers", "simdgroup_barriers", "matrix_products")),
        *((name, c.c_uint64) for name in ("flops", "specials", "atomics", "n_warnings")),
        ("message", c.c_char * 2048),
        ("warnings", c.c_char * 4096),
    ]


class _GuardedBuffer:
    """Memory of one argument, followed by a page that faults when touched.

    It starts aligned for vectors if its size allows that with the end at the guard page, else aligned to an element.
    """

    def __init__(
        self,
        argument: Argument,
        contents: np.ndarray[Any, Any],  # bytes
        state: np.ndarray[Any, Any],  # one Byte (rt/abi.h) per byte
        item: int,
        align: int | None = None,
    ) -> None:
        self.argument = argument
        self.name = argument.name + ("" if argument.kind in ("in", "out") else f"_{argument.kind}")
        self.item = item
        self.bytes = contents.nbytes
        self.state = state
        self._mapped_bytes, self._mapped = c.c_uint64(), c.c_void_p()
        start = max(align or (16 if self.bytes % 16 == 0 else item), item)
        allocate = runtime().mtl_guarded_alloc
        allocate.restype = c.c_void_p
        mapped = c.byref(self._mapped_bytes), c.byref(self._mapped)
        self.address: int = allocate(c.c_uint64(self.bytes), c.c_uint64(start), *mapped)
        c.memmove(self.address, contents.ctypes.data, self.bytes)

    @property
    def used(self) -> np.ndarray[Any, Any]:
        """State of the bytes that may have been touched."""
        return self.state

    def structure(self) -> _Buffer:
        output = int(self.argument.kind == "out")
        state = self.state.ctypes.data
        return _Buffer(self.address, self.bytes, self.item, output, self.name.encode(), state, 0, 0)

    def read(self) -> np.ndarray[Any, Any]:
        return np.frombuffer(c.string_at(self.address, self.bytes), np.uint8)

    def free(self) -> None:
        runtime().mtl_guarded_free(self._mapped, self._mapped_bytes)


class _PlacedBuffer:
    """An input whose elements lie far apart, used where it lies: nothing between them is touched, so that neither it
    nor its state needs memory. Nothing guards its ends in fast mode."""

    def __init__(self, argument: Argument, array: InputArray) -> None:
        elements, (low, high) = array.elements, array.reach
        self.argument, self.name, self.item = argument, argument.name, elements.itemsize
        self.bytes = high - low
        self.address: int = elements.__array_interface__["data"][0] + low
        self.state = np.frombuffer(untouched(self.bytes), np.uint8)
        self.used = as_strided(self.state[-low:], (*array.shape, self.item), (*elements.strides, 1))
        self.used[...] = _VALID

    def structure(self) -> _Buffer:
        return _Buffer(self.address, self.bytes, self.item, 0, self.name.encode(), self.state.ctypes.data, 0, 0)

    def free(self) -> None:
        pass


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
    outputs = [filled(shape, dtype, init_value) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]
    buffers: list[_GuardedBuffer | _PlacedBuffer] = []
    addresses = []
    try:
        for argument in compiled.kernel.arguments:
            buffer, offset = _buffer(argument, inputs, outputs, init_value is not None, options.align)
            buffers.append(buffer)
            addresses.append(buffer.address + offset)
        state, structures, counts = _run(compiled, buffers, addresses, grid, threadgroup, options)
        report = _report(compiled, state, structures, counts, buffers, grid, threadgroup)
        if compiled.check and init_value is None:
            for buffer in buffers:
                if isinstance(buffer, _GuardedBuffer) and buffer.argument.kind == "out" and buffer.bytes:
                    _require_written(compiled.kernel.kernel_name, buffer, outputs[buffer.argument.index])
        results = [
            buffer.read().view(outputs[buffer.argument.index].dtype).reshape(outputs[buffer.argument.index].shape)
            for buffer in buffers
            if isinstance(buffer, _GuardedBuffer) and buffer.argument.kind == "out"
        ]
    finally:
        for buffer in buffers:
            buffer.free()
    return results, report


def _buffer(
    argument: Argument,
    inputs: Sequence[InputArray],
    outputs: Sequence[np.ndarray[Any, Any]],
    is_initialised: bool,
    align: int | None,
) -> tuple[_GuardedBuffer | _PlacedBuffer, int]:
    """The buffer of one argument and the byte offset of the pointer that the kernel gets."""
    if argument.kind == "out":
        output = outputs[argument.index]
        contents = output.reshape(-1).view(np.uint8)
        state = np.full(contents.nbytes, _VALID if is_initialised else 0, np.uint8)
        return _GuardedBuffer(argument, contents, state, output.itemsize, align), 0
    array = inputs[argument.index]
    if argument.kind == "in" and array.reach[1] - array.reach[0] > _FAR:
        return _PlacedBuffer(argument, array), -array.reach[0]
    if argument.kind == "in":
        contents, belongs, offset = array.memory()
        state = np.where(belongs, _VALID, _VALID | _FOREIGN).astype(np.uint8)
        return _GuardedBuffer(argument, contents, state, array.elements.itemsize, align), offset
    values = {
        "shape": np.array(array.shape, np.int32),
        "strides": np.array(array.strides, np.int64),
        "ndim": np.array([len(array.shape)], np.int32),
    }[argument.kind]
    contents = values.view(np.uint8)
    return _GuardedBuffer(argument, contents, np.full(contents.nbytes, _VALID, np.uint8), values.itemsize), 0


def _run(
    compiled: CompiledKernel,
    buffers: Sequence[_GuardedBuffer | _PlacedBuffer],
    addresses: Sequence[int],
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
    options: Options,
) -> tuple[_Launch, Any, Any]:
    state = _Launch()
    structures = (_Buffer * len(buffers))(*(buffer.structure() for buffer in buffers))
    n_sites = len(compiled.sites)
    sites = (_Site * max(n_sites, 1))(*(_Site(*map(int, site)) for site in compiled.sites))
    counts = (c.c_uint64 * max(n_sites, 1))()
    table = (c.c_void_p * max(len(addresses), 1))(*addresses)
    state.entry, state.arguments = compiled.entry, c.cast(table, c.c_void_p)
    state.grid[:], state.threadgroup[:] = grid, threadgroup
    state.check, state.strict, state.order = int(compiled.check), int(options.strict), options.order
    state.threadgroup_limit = options.threadgroup_limit
    state.n_buffers = len(buffers)
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
    buffers: Sequence[_GuardedBuffer | _PlacedBuffer],
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
) -> Report:
    uses = {}
    for buffer, structure in zip(buffers, structures, strict=True):
        unique_loaded = int(np.count_nonzero(buffer.used & _READ))
        unique_stored = int(np.count_nonzero(buffer.used & _WRITTEN))
        uses[buffer.name] = BufferUse(buffer.bytes, structure.loaded, structure.stored, unique_loaded, unique_stored)
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


def _require_written(kernel: str, buffer: _GuardedBuffer, output: np.ndarray[Any, Any]) -> None:
    missing = ~(buffer.state.reshape(-1, buffer.item) & _WRITTEN).all(axis=1)
    if missing.any():
        first = tuple(int(i) for i in np.unravel_index(int(missing.argmax()), output.shape))
        raise RunError(
            f"{kernel}: output '{buffer.name}': {np.count_nonzero(missing)} of {len(missing)} elements never written "
            f"(first: {first})"
        )
