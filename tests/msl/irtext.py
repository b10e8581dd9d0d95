"""Reading the text of LLVM IR: debug locations, types and instruction operands."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import NamedTuple

_METADATA = re.compile(
    r"^!(\d+) = (?:distinct )?!(DI(?:Location|Subprogram|LexicalBlock|LexicalBlockFile|File))\((.*)\)$", re.M
)
_DBG = re.compile(r"!dbg !(\d+)")
_TRAILING_METADATA = re.compile(r", !\w+.*$")
_SCALAR_BYTES = {"i1": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "half": 2, "bfloat": 2, "float": 4, "double": 8}


class Location(NamedTuple):
    file: str
    line: int
    column: int


class DebugInfo:
    """Source locations of the instructions of one IR module."""

    def __init__(self, module: str) -> None:
        self._nodes = {m.group(1): m.group(3) for m in _METADATA.finditer(module)}

    def location(self, instruction: str, is_wanted: Callable[[str], bool]) -> Location:
        """The innermost inlined frame in a wanted file, else the outermost frame."""
        match = _DBG.search(instruction)
        node = match.group(1) if match else None
        location = Location("?", 0, 0)
        while node is not None and node in self._nodes:
            text = self._nodes[node]
            line, column = self._field(text, "line"), self._field(text, "column")
            location = Location(self.file(self._field(text, "scope")), int(line or 0), int(column or 0))
            if is_wanted(location.file):
                break
            node = self._field(text, "inlinedAt")
        return location

    def scope(self, definition: str) -> Location:
        """Where the function of a `define` line is declared."""
        match = _DBG.search(definition)
        text = self._nodes.get(match.group(1), "") if match else ""
        return Location(self.file(match.group(1) if match else None), int(self._field(text, "line") or 0), 0)

    def file(self, scope: str | None) -> str:
        while scope is not None:
            text = self._nodes.get(scope, "")
            if name := self._field(text, "filename"):
                return name
            scope = self._field(text, "file") or self._field(text, "scope")
        return "?"

    @staticmethod
    def _field(text: str, key: str) -> str | None:
        match = re.search(rf'\b{key}: (?:!(\d+)|"([^"]*)"|(\w+))', text)
        return next((group for group in match.groups() if group is not None), None) if match else None


def body(line: str) -> str:
    """An instruction without indentation and trailing metadata."""
    return _TRAILING_METADATA.sub("", line.strip())


def debug_suffix(line: str) -> str:
    match = _DBG.search(line)
    return f", {match.group()}" if match else ""


def split_operands(text: str) -> list[str]:
    """Split at the commas outside any bracket and string."""
    parts, depth, start, quoted = [], 0, 0, False
    for i, char in enumerate(text):
        if char == '"':
            quoted = not quoted
        elif quoted:
            continue
        elif char in "([{<":
            depth += 1
        elif char in ")]}>":
            depth -= 1
        elif char == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    parts.append(text[start:].strip())
    return [part for part in parts if part]


@functools.cache
def size_of(type_: str) -> int:
    """Bytes that a load or store of this type touches."""
    if type_ in _SCALAR_BYTES:
        return _SCALAR_BYTES[type_]
    if type_.startswith("ptr"):
        return 8
    if match := re.fullmatch(r"<(\d+) x (.+)>", type_):
        count = int(match.group(1))
        return (count + 7) // 8 if match.group(2) == "i1" else count * size_of(match.group(2))
    if match := re.fullmatch(r"\[(\d+) x (.+)\]", type_):
        return int(match.group(1)) * size_of(match.group(2))
    if match := re.fullmatch(r"\{(.+)\}", type_):
        offset = 0
        for member in split_operands(match.group(1)):
            size = size_of(member)
            align = min(size, 16)
            offset = (offset + align - 1) // align * align + size
        return offset
    if match := re.fullmatch(r"i(\d+)", type_):
        return (int(match.group(1)) + 7) // 8
    raise ValueError(f"unknown IR type {type_!r}")


def float_bytes(type_: str) -> int:
    """Size of the elements of a float scalar or vector type, 0 for any other type."""
    match = re.fullmatch(r"(?:<\d+ x )?(float|half|bfloat)>?", type_)
    return _SCALAR_BYTES[match.group(1)] if match else 0


def leading_type(text: str) -> str:
    """The type at the start of an operand such as `<4 x float> %x`."""
    depth = 0
    for i, char in enumerate(text):
        if char in "<[{(":
            depth += 1
        elif char in ">]})":
            depth -= 1
        elif char == " " and depth == 0:
            return text[:i]
    return text
