"""Inserts checks into LLVM IR.

Address spaces survive into the IR (device 1, constant 2, threadgroup 3), so every access to GPU memory is recognisable
without wrapping any type. A call `mtl_check(address, site)` goes before each, and one `mtl_count_math` per basic block
counts the arithmetic.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from .irtext import DebugInfo, Location, body, debug_suffix, float_bytes, leading_type, size_of, split_operands

_DECLARATIONS = """
declare void @mtl_check(ptr, i32)
declare void @mtl_check_range(ptr, i64, i32)
declare void @mtl_count_math(i32, i32)
"""
_LABEL = re.compile(r'[-\w.$"%]+:( |$)')
_TERMINATOR = re.compile(r"(br|ret|switch|unreachable|indirectbr)\b")
_POINTER = re.compile(r"ptr addrspace\(([123])\) (.*)$")
_ORDERING = re.compile(r" (monotonic|seq_cst|acquire|release|unordered)$")
_MEMORY_CALL = re.compile(r"call void @llvm\.(memcpy|memmove|memset)[\w.]*\((.*)\)")
_FLOP = re.compile(
    r"= (?:fadd|fsub|fmul|fdiv|frem)(?: (?:nnan|ninf|nsz|arcp|contract|afn|reassoc|fast))* "
    r"(?:<(\d+) x )?(?:float|half|bfloat)"
)
_FMA = re.compile(r"call [^@]*@llvm\.(?:fma|fmuladd)\.(?:v(\d+))?(?:f16|bf16|f32)")
_SPECIAL = re.compile(
    r"call [^@]*@(?:llvm\.(?:exp2?|exp10|log2?|log10|sin|cos|tanh?|pow|sqrt)\.(?:v(\d+))?"
    r"|(?:a?(?:sin|cos|tan)h?|exp2?|exp10|log2?|log10|atan2|pow|sqrt)f\()"
)


class Site(NamedTuple):
    """One place in the kernel that accesses memory."""

    size: int  # bytes; 0 for a struct copy, whose length is known when it runs
    align: int
    space: int  # 1 device, 2 constant, 3 threadgroup
    is_store: bool
    float_bytes: int  # size of one element if they are floats, else 0
    line: int  # of the generated text
    column: int


@dataclass
class _Instrumenter:
    debug: DebugInfo
    is_user: Callable[[str], bool]
    sites: dict[Site, int] = field(default_factory=dict)
    output: list[str] = field(default_factory=list)
    calls: int = 0
    flops: int = 0
    specials: int = 0

    def check(
        self,
        line: str,
        pointer: str,
        space: int,
        type_: str,
        align: int,
        is_store: bool,
        length: str = "",
    ) -> None:
        location: Location = self.debug.location(line, self.is_user)
        size = 0 if length else size_of(type_)
        site = Site(size, align, space, is_store, float_bytes(type_), location.line, location.column)
        number = self.sites.setdefault(site, len(self.sites))
        self.calls += 1
        suffix = debug_suffix(line)
        name = f"%mtl.{self.calls}"
        function, argument = ("mtl_check_range", f"{length}, ") if length else ("mtl_check", "")
        self.output.append(f"  {name} = addrspacecast ptr addrspace({space}) {pointer} to ptr")
        self.output.append(f"  call void @{function}(ptr {name}, {argument}i32 {number}){suffix}")

    def access(self, line: str, operands: str, is_store: bool) -> None:
        """`operands` of a load (type, pointer, align) or a store (value, pointer, align)."""
        for keyword in ("atomic ", "volatile "):
            operands = operands.removeprefix(keyword)
        parts = split_operands(operands)
        match = _POINTER.match(parts[1])
        if match is None:
            return
        type_ = leading_type(parts[0])
        align = next((int(part.split()[1]) for part in parts if part.startswith("align ")), 1)
        self.check(line, _ORDERING.sub("", match.group(2)), int(match.group(1)), type_, align, is_store)

    def memory_call(self, line: str, function: str, operands: str) -> None:
        parts = split_operands(operands)
        for index, is_store in ((0, True), (1, False))[: 1 if function == "memset" else 2]:
            attributes = re.sub(r"\b(noundef|nonnull|readonly|writeonly|captures\(none\)) ", "", parts[index])
            match = re.match(r"ptr addrspace\(([123])\) (?:align (\d+) )?(.*)$", attributes)
            if match:
                space, align, pointer = match.groups()
                self.check(line, pointer, int(space), "", int(align or 1), is_store, length=parts[2])

    def count(self, instruction: str) -> None:
        if match := _FLOP.search(instruction):
            self.flops += int(match.group(1) or 1)
        elif match := _FMA.search(instruction):
            self.flops += 2 * int(match.group(1) or 1)
        elif match := _SPECIAL.search(instruction):
            self.specials += int(match.group(1) or 1)

    def instruction(self, line: str) -> None:
        text = body(line)
        if _LABEL.match(text):
            self.flops = self.specials = 0
        self.count(text)
        if " = load " in text and "addrspace(" in text:
            self.access(line, text.split(" = load ", 1)[1], is_store=False)
        elif text.startswith("store ") and "addrspace(" in text:
            self.access(line, text.removeprefix("store "), is_store=True)
        elif match := _MEMORY_CALL.search(text):
            self.memory_call(line, match.group(1), match.group(2))
        elif _TERMINATOR.match(text) and (self.flops or self.specials):
            suffix = debug_suffix(line)
            self.output.append(f"  call void @mtl_count_math(i32 {self.flops}, i32 {self.specials}){suffix}")
            self.flops = self.specials = 0
        self.output.append(line)


def instrument(module: str, is_user: Callable[[str], bool], entry: str) -> tuple[str, list[Site]]:
    """The module with checks in every function but `entry` and the shim's, and the sites they refer to by number."""
    instrumenter = _Instrumenter(DebugInfo(module), is_user)
    inside = False
    for line in module.split("\n"):
        if line.startswith("define "):
            inside = f"@{entry}(" not in line and "@_ZN5__mtl" not in line
            instrumenter.flops = instrumenter.specials = 0
        elif line.startswith("}"):
            inside = False
        elif inside:
            instrumenter.instruction(line)
            continue
        instrumenter.output.append(line)
    return "\n".join(instrumenter.output) + _DECLARATIONS, list(instrumenter.sites)
