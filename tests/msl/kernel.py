"""`metal_kernel`: the emulator behind the call of `mx.fast.metal_kernel`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

from mlxlin.backend import mx

from .arrays import as_input, to_mlx
from .compile import METAL_VERSIONS, CompiledKernel
from .errors import LintError
from .gen import Generated, TemplateArgument, dtype_name, generate
from .launch import Options, launch
from .lint_text import lint_text
from .report import Report

_compiled: dict[tuple[str, int, bool], CompiledKernel] = {}
_last: Report | None = None


def last_report() -> Report:
    """Counters of the last kernel that ran to its end in this process."""
    if _last is None:
        raise RuntimeError("no kernel has run yet")
    return _last


@dataclass(frozen=True)
class EmulatedKernel:
    """What `metal_kernel` returns: called like the object that `mx.fast.metal_kernel` returns."""

    name: str
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    source: str
    header: str
    ensure_row_contiguous: bool
    atomic_outputs: bool
    metal: int
    options: Options

    def __call__(
        self,
        *,
        inputs: Sequence[Any],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[Any],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        template: Sequence[TemplateArgument] | None = None,
        init_value: float | None = None,
        verbose: bool = False,
        stream: Any = None,
        **overrides: Any,
    ) -> list[Any]:
        """Outputs as MLX arrays, or as numpy arrays if no input and no output dtype is MLX's."""
        global _last
        self._check_counts(inputs, output_shapes, output_dtypes)
        metal = overrides.pop("metal", self.metal)
        options = Options(**{**vars(self.options), **overrides})
        arrays = [as_input(value, row_contiguous=self.ensure_row_contiguous) for value in inputs]
        dtypes = [dtype_name(dtype) for dtype in output_dtypes]
        kernel = self.generate([(a.dtype, a.shape) for a in arrays], dtypes, template)
        if verbose:
            print(f"Generated source code for `{self.name}`:\n```\n{kernel.text}\n```")
        clamped = _clamp(grid, threadgroup, options.max_threads)
        compiled = self._compile(kernel, metal, options, template)
        shapes = [tuple(int(n) for n in shape) for shape in output_shapes]
        outputs, _last = launch(compiled, arrays, shapes, dtypes, grid, clamped, init_value, options)
        if any(array.is_mlx for array in arrays) or any(isinstance(dtype, mx.Dtype) for dtype in output_dtypes):
            return [to_mlx(output, dtype) for output, dtype in zip(outputs, dtypes, strict=True)]
        return outputs

    def generate(
        self,
        inputs: Sequence[tuple[str, tuple[int, ...]]],
        output_dtypes: Sequence[str],
        template: Sequence[TemplateArgument] | None,
    ) -> Generated:
        """The source MLX would generate for inputs of these (dtype name, shape)."""
        return generate(
            name=self.name,
            input_names=self.input_names,
            output_names=self.output_names,
            source=self.source,
            header=self.header,
            atomic_outputs=self.atomic_outputs,
            inputs=inputs,
            output_dtypes=output_dtypes,
            template=template or (),
        )

    def _compile(
        self, kernel: Generated, metal: int, options: Options, template: Sequence[TemplateArgument] | None
    ) -> CompiledKernel:
        if metal not in METAL_VERSIONS:
            raise ValueError(f"unknown Metal version {metal}; one of {METAL_VERSIONS}")
        key = (kernel.text, metal, options.check)
        if key in _compiled:
            return _compiled[key]
        findings = lint_text(
            source=self.source,
            header=self.header,
            template=template or (),
            metal=metal,
            input_names=self.input_names,
            n_buffers=len(kernel.arguments),
        )
        if findings and options.lint:
            raise LintError(kernel.kernel_name, findings)
        compiled = CompiledKernel(kernel, metal=metal, check=options.check)
        if compiled.findings and options.lint:
            raise LintError(kernel.kernel_name, compiled.findings)
        _compiled[key] = compiled
        return compiled

    def _check_counts(self, inputs: Sequence[Any], shapes: Sequence[Any], dtypes: Sequence[Any]) -> None:
        for what, given, names in (
            ("inputs", inputs, self.input_names),
            ("output_shapes", shapes, self.output_names),
            ("output_dtypes", dtypes, self.output_names),
        ):
            if len(given) != len(names):
                raise ValueError(
                    f"[metal_kernel] Expected `{what}` to have size {len(names)} but got size {len(given)}."
                )


def metal_kernel(
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str = "",
    ensure_row_contiguous: bool = True,
    atomic_outputs: bool = False,
    compile_options: dict[str, str] | None = None,
    *,
    check: bool = True,
    strict: bool = True,
    lint: bool = True,
    order: int = 0,
    align: int | None = None,
    max_threads: int = 1024,
    threadgroup_limit: int = 32768,
    metal: int | None = None,
) -> EmulatedKernel:
    """`mx.fast.metal_kernel`, run by the emulator. The options below can be given here or at each call.

    check: instrument every memory access (default). Without it a kernel runs several times faster, and only
        divergence, barriers and accesses past the end of a buffer are noticed.
    strict: stop also at what many GPUs tolerate (divergent SIMD functions, races, reads of uninitialised memory); with
        strict=False these become `last_report().warnings` and the kernel goes on.
    lint: reject what clang accepts and Apple's compiler does not (LintError).
    order: schedule of the threads, 0..7: bit 0 runs the lanes of a SIMD-group in descending order, bit 1 the
        SIMD-groups, bit 2 the threadgroups. Same order, same result, bit for bit.
    align: alignment in bytes of the buffers; the element size proves that no vector access relies on more.
    max_threads: what the pipeline allows per threadgroup (less than 1024 for kernels with many registers).
    threadgroup_limit: bytes of threadgroup memory.
    metal: language version, 310 (macOS 14, the default), 320, 400 or 410; MLXLIN_MSL_METAL sets the default.
    """
    if not output_names:
        raise ValueError("[metal_kernel] Must specify at least one output.")
    if order not in range(8):
        raise ValueError(f"order must be 0..7, not {order}")
    version = metal or int(os.environ.get("MLXLIN_MSL_METAL", METAL_VERSIONS[0]))
    options = Options(check, strict, lint, order, align, max_threads, threadgroup_limit)
    return EmulatedKernel(
        name,
        tuple(input_names),
        tuple(output_names),
        source,
        header,
        ensure_row_contiguous,
        atomic_outputs,
        version,
        options,
    )


@contextlib.contextmanager
def install(**options: Any) -> Iterator[None]:
    """Within the `with` block MLX claims to have Metal and `mx.fast.metal_kernel` is the emulator.

    `options` become the defaults of every kernel made in the block. The emulated call is eager: it cannot be traced by
    mx.compile or mx.grad.
    """

    def make(*args: Any, **kwargs: Any) -> EmulatedKernel:
        return metal_kernel(*args, **{**options, **kwargs})

    with mock.patch.object(mx.fast, "metal_kernel", make), mock.patch.object(mx.metal, "is_available", lambda: True):
        yield


def _clamp(grid: Sequence[int], threadgroup: Sequence[int], limit: int) -> tuple[int, int, int]:
    """Threadgroup sizes as dispatched: no larger than the grid."""
    x, y, z = (min(int(t), int(g)) for t, g in zip(threadgroup, grid, strict=True))
    if x * y * z > limit:
        raise ValueError(
            f"Thread group size ({x * y * z}) is greater than  the maximum allowed threads per threadgroup ({limit})."
        )
    return x, y, z
