"""The exact Metal source that `mx.fast.metal_kernel` generates (MLX 0.32, metal_kernel.cpp).

`tests/test_msl_gen.py` compares this text byte for byte with what MLX itself prints under
`mx.export_function(..., verbose=True)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# An input with fewer elements than this is passed in the `constant` address space.
CONSTANT_BELOW = 8

# A kernel attribute becomes a parameter when its name occurs anywhere in `source` (comments included).
# Alphabetical, as MLX emits them.
ATTRIBUTES = {
    "dispatch_quadgroups_per_threadgroup": "uint",
    "dispatch_simdgroups_per_threadgroup": "uint",
    "dispatch_threads_per_threadgroup": "uint3",
    "grid_origin": "uint3",
    "grid_size": "uint3",
    "quadgroup_index_in_threadgroup": "uint",
    "quadgroups_per_threadgroup": "uint",
    "simdgroup_index_in_threadgroup": "uint",
    "simdgroups_per_threadgroup": "uint",
    "thread_execution_width": "uint",
    "thread_index_in_quadgroup": "uint",
    "thread_index_in_simdgroup": "uint",
    "thread_index_in_threadgroup": "uint",
    "thread_position_in_grid": "uint3",
    "thread_position_in_threadgroup": "uint3",
    "threadgroup_position_in_grid": "uint3",
    "threadgroups_per_grid": "uint3",
    "threads_per_grid": "uint3",
    "threads_per_simdgroup": "uint",
    "threads_per_threadgroup": "uint3",
}

METAL_TYPE = {
    "bool": "bool",
    **{f"{sign}int{bits}": f"{sign}int{bits}_t" for sign in ("", "u") for bits in (8, 16, 32, 64)},
    "float16": "float16_t",
    "bfloat16": "bfloat16_t",
    "float32": "float",
    "float64": "double",
    "complex64": "complex64_t",
}

TemplateArgument = tuple[str, Any]  # (name, bool | int | dtype)


@dataclass(frozen=True)
class Argument:
    """One entry of the argument table; its position is its [[buffer(i)]] index."""

    kind: str  # "in", "shape", "strides", "ndim" or "out"
    name: str  # the input or output it belongs to
    metal_type: str  # of the pointee
    space: str  # "device" or "constant"
    is_reference: bool
    index: int  # which input / output


@dataclass(frozen=True)
class Generated:
    """One specialisation of a kernel: everything that depends on dtypes, ranks and template arguments."""

    kernel_name: str
    instance: str  # kernel_name, or kernel_name<...> for templated kernels
    text: str  # header + signature + body: what MLX prints and appends to its own preamble
    arguments: tuple[Argument, ...]
    attributes: tuple[str, ...]
    signature_line: int  # line of `text` on which the signature starts, after `header`
    body_line: int  # line on which `source` starts

    def locate(self, line: int) -> tuple[str, int]:
        """("source" | "header" | "signature", line of that part) of a line of `text`."""
        if line >= self.body_line:
            return "source", line - self.body_line + 1
        return ("header", line) if line < self.signature_line else ("signature", line - self.signature_line + 1)


def dtype_name(dtype: object) -> str:
    """'float16' from mx.float16, np.float16, np.dtype('float16') or the string itself."""
    if isinstance(dtype, type):  # numpy scalar types
        return dtype.__name__.rstrip("_")
    return str(dtype).rsplit(".", 1)[-1]


def generate(
    *,
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str,
    atomic_outputs: bool,
    inputs: Sequence[tuple[str, tuple[int, ...]]],
    output_dtypes: Sequence[str],
    template: Sequence[TemplateArgument],
) -> Generated:
    """Text and argument table for `inputs` given as (dtype name, shape)."""
    values = [_template_value(value) for _, value in template]
    kernel_name = _kernel_name(name, values, inputs, output_dtypes)
    arguments = _arguments(input_names, output_names, source, atomic_outputs, inputs, output_dtypes)
    attributes = tuple(attribute for attribute in ATTRIBUTES if attribute in source)

    parameters = [_parameter(argument, i) for i, argument in enumerate(arguments)]
    parameters += [f"  {ATTRIBUTES[attribute]} {attribute} [[{attribute}]]" for attribute in attributes]
    text = header
    if template:
        text += (
            "template <" + ", ".join(f"{kind} {n}" for (n, _), (kind, _) in zip(template, values, strict=True)) + ">\n"
        )
    text += f"[[kernel]] void {kernel_name}(\n" + ",\n".join(parameters) + ") {\n"
    body_line = text.count("\n") + 1
    text += source + "\n}\n"
    instance = kernel_name
    if template:
        instance += "<" + ", ".join(value for _, value in values) + ">"
        text += f'\ntemplate [[host_name("{kernel_name}")]] [[kernel]] decltype({instance}) {instance};\n'
    return Generated(kernel_name, instance, text, arguments, attributes, header.count("\n") + 1, body_line)


def _template_value(value: object) -> tuple[str, str]:
    """(kind of template parameter, text of the argument)."""
    if isinstance(value, bool):
        return "bool", str(int(value))
    if isinstance(value, int):
        return "int", str(value)
    return "typename", METAL_TYPE[dtype_name(value)]


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for dim in shape:
        size *= dim
    return size


def _kernel_name(
    name: str,
    values: list[tuple[str, str]],
    inputs: Sequence[tuple[str, tuple[int, ...]]],
    output_dtypes: Sequence[str],
) -> str:
    parts = [f"custom_kernel_{name}"]
    if values:
        # MLX replaces the brackets, ", " and "-" of "<a, b>" by "_" and drops the last character
        parts.append("_" + "_".join(value for _, value in values).replace("-", "_"))
    for dtype, shape in inputs:
        suffix = "s" if not shape else "c" if _size(shape) < CONSTANT_BELOW else ""
        parts.append(METAL_TYPE[dtype] + suffix)
    parts += [METAL_TYPE[dtype] for dtype in output_dtypes]
    return "_".join(parts)


def _arguments(
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    atomic_outputs: bool,
    inputs: Sequence[tuple[str, tuple[int, ...]]],
    output_dtypes: Sequence[str],
) -> tuple[Argument, ...]:
    table = []
    for i, (name, (dtype, shape)) in enumerate(zip(input_names, inputs, strict=True)):
        space = "constant" if _size(shape) < CONSTANT_BELOW else "device"
        table.append(Argument("in", name, METAL_TYPE[dtype], space, not shape, i))
        if shape:
            # a plain substring search: an input called `a` gets `a_shape` if the source says `data_shape`
            if f"{name}_shape" in source:
                table.append(Argument("shape", name, "int", "constant", False, i))
            if f"{name}_strides" in source:
                table.append(Argument("strides", name, "int64_t", "constant", False, i))
            if f"{name}_ndim" in source:
                table.append(Argument("ndim", name, "int", "constant", True, i))
    for i, (name, dtype) in enumerate(zip(output_names, output_dtypes, strict=True)):
        metal_type = METAL_TYPE[dtype]
        table.append(
            Argument("out", name, f"atomic<{metal_type}>" if atomic_outputs else metal_type, "device", False, i)
        )
    return tuple(table)


def _parameter(argument: Argument, index: int) -> str:
    suffix = "" if argument.kind in ("in", "out") else f"_{argument.kind}"
    mark = "&" if argument.is_reference else "*"
    # MLX writes "const device T*" for inputs, "const constant int*" for shapes, "device T*" for outputs
    const = "" if argument.kind == "out" else "const "
    return f"  {const}{argument.space} {argument.metal_type}{mark} {argument.name}{suffix} [[buffer({index})]]"
