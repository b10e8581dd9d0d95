"""A lossless tokenizer for C++-like source: joining the texts of all tokens gives the source back."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

SPACES = frozenset({"device", "constant", "threadgroup", "thread"})
BLANK = frozenset({"space", "newline", "comment", "directive"})  # kinds that do not matter to the grammar

_TOKEN = re.compile(
    r"""
    (?P<space>(?:[ \t\r\f\v]|\\\n)+)
  | (?P<newline>\n)
  | (?P<comment>//[^\n]*|/\*.*?\*/)
  | (?P<string>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')
  | (?P<number>(?:0[xX][0-9a-fA-F'.]+(?:[pP][+-]?[0-9]+)?
               |(?:[0-9][0-9']*\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)[A-Za-z0-9_]*)
  | (?P<name>[A-Za-z_]\w*)
  | (?P<op>\[\[|\]\]|::|->|<<=|>>=|\.\.\.|[-+*/%&|^!=<>]=|&&|\|\||\+\+|--|.)
    """,
    re.X | re.S,
)
_DIRECTIVE = re.compile(r"[ \t]*#(?:[^\n\\]|\\\n|\\.)*")


@dataclass
class Token:
    kind: str  # space, newline, comment, string, number, name, op or directive
    text: str
    line: int

    def blank(self) -> None:
        """Remove the token but keep its line breaks."""
        self.kind, self.text = "space", "\n" * self.text.count("\n")


def lex(source: str) -> list[Token]:
    tokens: list[Token] = []
    brackets: list[str] = []  # open [ and [[, to tell the end of an attribute from that of a[b[i]]
    position, line, line_start = 0, 1, True
    while position < len(source):
        match = _DIRECTIVE.match(source, position) if line_start else None
        kind = "directive"
        if match is None:
            match = _TOKEN.match(source, position)
            assert match is not None and match.lastgroup is not None
            kind = match.lastgroup
        text = match.group()
        if text in ("[", "[["):
            brackets.append(text)
        elif text in ("]", "]]"):
            text = "]]" if text == "]]" and brackets[-1:] == ["[["] else "]"
            del brackets[-1:]
        tokens.append(Token(kind, text, line))
        line += text.count("\n")
        position += len(text)
        line_start = kind == "newline" or (line_start and kind in ("space", "comment"))
    return tokens


def significant(source: str) -> list[Token]:
    """Tokens without white space and comments (directives stay)."""
    return [token for token in lex(source) if token.kind not in ("space", "newline", "comment")]


def after(tokens: Sequence[Token], i: int) -> int | None:
    """Index of the first token after i that matters to the grammar."""
    return next((j for j in range(i + 1, len(tokens)) if tokens[j].kind not in BLANK), None)


def before(tokens: Sequence[Token], i: int) -> int | None:
    """Index of the last token before i that matters to the grammar."""
    return next((j for j in range(i - 1, -1, -1) if tokens[j].kind not in BLANK), None)


def text_at(tokens: Sequence[Token], i: int | None) -> str:
    return "" if i is None else tokens[i].text


def closing(tokens: Sequence[Token], i: int) -> int | None:
    """Index of the bracket that closes the (, [, { or [[ at i."""
    opening = tokens[i].text
    close = {"(": ")", "[": "]", "{": "}", "[[": "]]"}[opening]
    depth = 0
    for j in range(i, len(tokens)):
        if tokens[j].text == opening:
            depth += 1
        elif tokens[j].text == close:
            depth -= 1
            if depth == 0:
                return j
    return None


def closing_angle(tokens: Sequence[Token], i: int) -> int | None:
    """Index of the > that closes the template bracket at i, if it is one."""
    depth = 0
    for j in range(i, len(tokens)):
        text = tokens[j].text
        if text == "<":
            depth += 1
        elif text == ">":
            depth -= 1
            if depth == 0:
                return j
        elif text in (";", "{", "}", ">="):
            return None
    return None
