"""Rules of the Metal shading language checked in unoptimised LLVM IR, where types and calls are explicit."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from .errors import Finding
from .irtext import DebugInfo, body

_DEFINE = re.compile(r'define .*?@([\w.$"]+)\(')
_GLOBAL = re.compile(r"@([A-Za-z_][\w.$]*) = .*\bglobal\b")
_CALL = re.compile(r'\bcall [^@]*@([\w.$"]+)\(')
_RULES = (
    (re.compile(r" addrspacecast "), "address-space", "cast between address spaces"),
    (re.compile(r"\bcall [^@]*%[\w.]+\("), "function-pointer", "call through a pointer"),
    (re.compile(r"@_Z(?:nw|na|dl|da)"), "c++", "operator new or delete is not available in Metal"),
    (re.compile(r"@(?:__cxa_|_ZTV)"), "c++", "virtual functions are not available in Metal"),
    (re.compile(r"\bi128\b"), "type", "128-bit integers are not available in Metal"),
    # not every `double`: small structs are passed in registers of that type
    (
        re.compile(r"\b(?:f(?:add|sub|mul|div|rem|cmp|neg|pext|ptrunc|ptosi|ptoui)|[su]itofp)\b.*\bdouble\b"),
        "double",
        "double precision is not available in Metal",
    ),
    (re.compile(r"\b(?:fp128|x86_fp80)\b"), "double", "long double is not available in Metal"),
)


def lint_ir(module: str, is_user: Callable[[str], bool], entry: str) -> list[Finding]:
    """Findings in the functions of the kernel's own text; `entry` is the emulator's wrapper."""
    debug = DebugInfo(module)
    findings: dict[Finding, None] = {}
    calls: dict[str, set[str]] = {}
    where: dict[str, int] = {}  # first line of the user's functions
    function = ""
    for line in module.split("\n"):
        if match := _DEFINE.match(line):
            function = match.group(1)
            calls[function] = set()
            location = debug.scope(line)
            if is_user(location.file) and function != entry:
                where[function] = location.line
        elif line.startswith("}"):
            function = ""
        elif not function:
            match = _GLOBAL.match(line)
            if match and "addrspace(" not in line and not match.group(1).startswith("llvm."):
                message = f"static variable '{match.group(1)}' is not in the constant address space"
                findings[Finding("program-scope", "kernel", 0, message)] = None
        else:
            text = body(line)
            calls[function].update(_CALL.findall(text))
            if function in where:
                for pattern, rule, message in _RULES:
                    if pattern.search(text):
                        findings[Finding(rule, "kernel", debug.location(line, is_user).line, message)] = None
    findings.update(dict.fromkeys(_recursion(calls, where)))
    return list(findings)


def _recursion(calls: dict[str, set[str]], where: dict[str, int]) -> Iterator[Finding]:
    for function, line in where.items():
        reached, frontier = set(), [function]
        while frontier:
            for callee in calls.get(frontier.pop(), ()):
                if callee not in reached:
                    reached.add(callee)
                    frontier.append(callee)
        if function in reached:
            yield Finding("recursion", "kernel", line, "recursive call")
