"""Rules of the Metal shading language checked in clang's syntax tree: conversions that C++ makes silently."""

from __future__ import annotations

import re

from .errors import Finding

_LINE = re.compile(r"<[^>]*?(?:line|\.metal):(\d+):\d+")
_TYPE = re.compile(r"'([^']*)'(?::'([^']*)')?")
_CONVERSIONS = ("<FloatingCast>", "<IntegralToFloating>")


def needs_ast(text: str) -> bool:
    """Can this kernel break any of the rules here?"""
    return "bfloat" in text or "?" in text


def lint_ast(dump: str) -> list[Finding]:
    """Findings in the text of -ast-dump, which holds the instantiated templates too."""
    findings: dict[Finding, None] = {}
    lines = dump.split("\n")
    number = 0
    for line, operand in zip(lines, [*lines[1:], ""], strict=False):
        if match := _LINE.search(line):
            number = int(match.group(1))
        if "ImplicitCastExpr" in line and "part_of_explicit_cast" not in line and any(c in line for c in _CONVERSIONS):
            target, value = _type(line), _type(operand)
            if target == "__bf16":
                message = f"no implicit conversion from {_metal(value)} to bfloat"
                findings[Finding("bfloat", "kernel", number, message)] = None
            elif target == "_Float16" and value == "__bf16":
                findings[Finding("bfloat", "kernel", number, "no implicit conversion from bfloat to half")] = None
        elif "ConditionalOperator" in line and "ext_vector_type" in _type(operand):
            message = "?: cannot have a vector condition (use select)"
            findings[Finding("vector-ternary", "kernel", number, message)] = None
    return list(findings)


def _type(line: str) -> str:
    match = _TYPE.search(line)
    return (match.group(2) or match.group(1)) if match else ""


def _metal(type_: str) -> str:
    return {"_Float16": "half", "__bf16": "bfloat"}.get(type_, type_)
