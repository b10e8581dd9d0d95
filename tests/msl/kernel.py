"""`metal_kernel`: the emulator behind the call of `mx.fast.metal_kernel`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from mlxlin.backend import mx

from .arrays import as_input, to_mlx
from .compile import CompiledKernel
from .errors import LintError
from .gen import Generated, TemplateArgument, dtype_name, generate
from .launch import launch
from .lint_text import lint_text
from .options import Options
from .report import Report

_compiled: dict[tuple[str, int, bool, bool], CompiledKernel] = {}
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
        options = replace(self.options, **overrides)
        arrays = [as_input(value, row_contiguous=self.ensure_row_contiguous) for value in inputs]
        dtypes = [dtype_name(dtype) for dtype in output_dtypes]
        kernel = self.generate([(a.dtype, a.shape) for a in arrays], dtypes, template)
        if verbose:
            print(f"Generated source code for `{self.name}`:\n```\n{kernel.text}\n```")
        clamped = _clamp(grid, threadgroup, options.max_threads)
        compiled = self._compile(kernel, options, template or ())
        shapes = [tuple(int(n) for n in shape) for shape in output_shapes]
        outputs, _last = launch(compiled, arrays, shapes, dtypes, grid, clamped, init_value, options)
        if options.last is not None:
            return outputs
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

    def _compile(self, kernel: Generated, options: Options, template: Sequence[TemplateArgument]) -> CompiledKernel:
        key = (kernel.text, options.metal, options.check, options.lint)
        if key in _compiled:
            return _compiled[key]
        findings = lint_text(
            source=self.source,
            header=self.header,
            template=template,
            metal=options.metal,
            input_names=self.input_names,
            n_buffers=len(kernel.arguments),
        )
        if findings and options.lint:
            raise LintError(kernel.kernel_name, findings)
        _compiled[key] = CompiledKernel(kernel, metal=options.metal, check=options.check, lint=options.lint)
        return _compiled[key]

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
    **options: Any,
) -> EmulatedKernel:
    """`mx.fast.metal_kernel`, run by the emulator; `options` (see Options) can be given here or at each call."""
    if not output_names:
        raise ValueError("[metal_kernel] Must specify at least one output.")
    return EmulatedKernel(
        name=name,
        input_names=tuple(input_names),
        output_names=tuple(output_names),
        source=source,
        header=header,
        ensure_row_contiguous=ensure_row_contiguous,
        atomic_outputs=atomic_outputs,
        options=Options(**options),
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
