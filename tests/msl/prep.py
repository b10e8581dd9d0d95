"""Rewrites the few Metal constructs that clang's C++ grammar lacks. Line numbers are preserved.

1. attributes between `template` and an explicit instantiation are dropped
2. `threadgroup T x[..];` in a function body becomes a reference into the threadgroup arena
3. `vec<T, N>(a, b)` becomes `__mtl_make_vec<T, N>(a, b)`, `float2 v(a, b);` becomes `float2 v = float2(a, b);`
4. `1.0h` and `1.0bf` become calls
5. `device T p[N]` as a function parameter becomes `device T *p`
6. member functions qualified with device / constant / threadgroup cannot be expressed: in MLX's own preamble they are
   dropped (they are overloads), in a kernel they are an error
"""

from __future__ import annotations

import re

from .errors import CompileError
from .lexer import SPACES, Token, after, before, closing, closing_angle, lex, text_at

_VECTOR = re.compile(r"(bool|u?char|u?short|u?int|u?long|half|bfloat|float)[234]")
_SUFFIXED = re.compile(r"((?:[0-9]*\.[0-9]*|[0-9]+)(?:[eE][+-]?[0-9]+)?)(h|H|bf|BF)")
_MEMORY_SPACES = ("device", "constant", "threadgroup")


def rewrite(source: str) -> str:
    """C++ that clang accepts together with the shim, from the text of a kernel."""
    tokens = lex(source)
    _reject_qualified_members(tokens)
    _rewrite(tokens)
    return "".join(token.text for token in tokens)


def rewrite_preamble(source: str) -> str:
    """The same for MLX's own preamble."""
    tokens = lex(source)
    _drop_qualified_members(tokens)
    _rewrite(tokens)
    return "".join(token.text for token in tokens)


def _rewrite(tokens: list[Token]) -> None:
    _drop_instantiation_attributes(tokens)
    _vector_constructors(tokens)
    _vector_declarations(tokens)
    _literals(tokens)
    _array_parameters(tokens)
    _threadgroup_variables(tokens)


def _drop_instantiation_attributes(tokens: list[Token]) -> None:
    for i, token in enumerate(tokens):
        if token.text != "template":
            continue
        j = after(tokens, i)
        while j is not None and tokens[j].text == "[[":
            end = closing(tokens, j)
            assert end is not None
            for k in range(j, end + 1):
                tokens[k].blank()
            j = after(tokens, end)


def _vector_constructors(tokens: list[Token]) -> None:
    for i, token in enumerate(tokens):
        start = after(tokens, i)
        if token.text != "vec" or text_at(tokens, start) != "<":
            continue
        assert start is not None
        end = closing_angle(tokens, start)
        if end is None or text_at(tokens, after(tokens, end)) != "(":
            continue
        previous = before(tokens, i)
        if text_at(tokens, previous) == "operator":
            continue
        if previous is not None and tokens[previous].text == "::":  # metal::vec<...>(...)
            qualifier = before(tokens, previous)
            tokens[previous].blank()
            if qualifier is not None and tokens[qualifier].text == "metal":
                tokens[qualifier].blank()
        token.text = "__mtl_make_vec"


def _vector_declarations(tokens: list[Token]) -> None:
    """`float2 v(a, b);`: vector types are built in, clang knows no constructor for them."""
    for i, token in enumerate(tokens):
        name = after(tokens, i)
        if not _VECTOR.fullmatch(token.text) or name is None or tokens[name].kind != "name":
            continue
        open_ = after(tokens, name)
        if open_ is None or tokens[open_].text != "(":
            continue
        close = closing(tokens, open_)
        if close is None or text_at(tokens, after(tokens, close)) != ";":
            continue
        first = after(tokens, open_)
        second = after(tokens, first) if first is not None else None
        is_prototype = text_at(tokens, first) in (")", "const", *SPACES) or (
            first is not None and second is not None and tokens[first].kind == tokens[second].kind == "name"
        )
        if not is_prototype:
            tokens[open_].text = f" = {token.text}("


def _literals(tokens: list[Token]) -> None:
    for token in tokens:
        match = _SUFFIXED.fullmatch(token.text) if token.kind == "number" else None
        if match is None:
            continue
        digits, suffix = match.groups()
        if "." not in digits and "e" not in digits.lower():
            digits += ".0"
        token.text = f"{'__mtl_half' if suffix in 'hH' else '__mtl_bfloat'}({digits}f)"


def _array_parameters(tokens: list[Token]) -> None:
    for i, token in enumerate(tokens):
        if token.text not in _MEMORY_SPACES:
            continue
        previous = before(tokens, i)
        while text_at(tokens, previous) in ("const", "volatile"):
            assert previous is not None
            previous = before(tokens, previous)
        if text_at(tokens, previous) in ("(", ","):
            _array_parameter(tokens, i)


def _array_parameter(tokens: list[Token], i: int) -> None:
    """`device T name[N][M]` -> `device T (*name)[M]`, starting at the address space."""
    depth, name, j = 0, None, after(tokens, i)
    while j is not None:
        token = tokens[j]
        if depth == 0:
            if token.text == "[" and name is not None:
                break
            if token.text in (",", ")", ";", "{", "}", "=", "*", "&", "[["):
                return
        if token.kind == "name":
            name = j
        depth += {"(": 1, "<": 1, ")": -1, ">": -1}.get(token.text, 0)
        j = after(tokens, j)
    if j is None or name is None:
        return
    end = closing(tokens, j)
    assert end is not None
    following = text_at(tokens, after(tokens, end))
    if following not in (",", ")", "[", "[["):
        return
    for k in range(j, end + 1):
        tokens[k].blank()
    tokens[name].text = f"(*{tokens[name].text})" if following == "[" else f"*{tokens[name].text}"


def _threadgroup_variables(tokens: list[Token]) -> None:
    count = 0
    for i, token in enumerate(tokens):
        if token.text != "threadgroup":
            continue
        previous = before(tokens, i)
        if text_at(tokens, previous) in ("const", "volatile"):
            assert previous is not None
            previous = before(tokens, previous)
        if previous is None or text_at(tokens, previous) in ("{", "}", ";"):
            count = _threadgroup_variable(tokens, i, count)


def _threadgroup_variable(tokens: list[Token], i: int, count: int) -> int:
    """Replace the declaration that starts with `threadgroup` at i; returns the number of variables so far."""
    statement = _statement(tokens, i)
    declarators = _declarators(tokens, statement) if statement else None
    if not declarators:
        return count
    type_text, declared = declarators
    parts = []
    for name, extents, is_zeroed in declared:
        alias = f"__mtl_tg_{count}"
        parts.append(
            f"typedef {type_text} {alias}{extents}; threadgroup {alias} &{name} = "
            f'__mtl_threadgroup_variable<{alias}>({count}, "{name}", {int(is_zeroed)})'
        )
        count += 1
    for j in range(i, statement[-1] + 1):
        tokens[j].blank()
    tokens[i].text = "; ".join(parts) + tokens[i].text
    return count


def _statement(tokens: list[Token], i: int) -> list[int]:
    """Indices of the significant tokens after i up to `;`, or [] if this is no variable declaration."""
    indices: list[int] = []
    j = after(tokens, i)
    while j is not None and tokens[j].text != ";":
        text = tokens[j].text
        is_initialiser = bool(indices) and tokens[indices[-1]].text == "="
        if text == "{" and not is_initialiser:
            return []
        end = closing(tokens, j) if text in ("(", "[", "[[", "{") else j
        if end is None:
            return []
        indices += [k for k in range(j, end + 1) if tokens[k].kind not in ("space", "newline", "comment")]
        j = after(tokens, end)
    return indices if j is not None else []


def _declarators(tokens: list[Token], statement: list[int]) -> tuple[str, list[tuple[str, str, bool]]] | None:
    """(type, [(name, extents, zeroed)]) of a variable declaration; None for pointers, references and functions."""
    parts: list[list[Token]] = [[]]
    depth = 0
    for j in statement:
        token = tokens[j]
        if depth == 0 and token.text in ("*", "&", "&&", "("):
            if not any(t.text == "=" for t in parts[-1]):
                return None
        depth += {"<": 1, ">": -1, "[": 1, "]": -1, "(": 1, ")": -1, "{": 1, "}": -1}.get(token.text, 0)
        if token.text == "," and depth == 0:
            parts.append([])
        else:
            parts[-1].append(token)
    declared = []
    type_text = ""
    for n, part in enumerate(parts):
        equals = next((k for k, t in enumerate(part) if t.text == "="), len(part))
        bracket = next((k for k, t in enumerate(part[:equals]) if t.text == "["), equals)
        if bracket == 0:
            return None
        initialiser = "".join(t.text for t in part[equals + 1 :])
        if equals < len(part) and initialiser not in ("{0}", "{}", "{0.0f}"):
            raise CompileError(
                f"line {part[0].line}: a threadgroup variable cannot have an initialiser other than {{0}}"
            )
        if n == 0:
            type_text = " ".join(t.text for t in part[: bracket - 1])
        extents = "".join(t.text for t in part[bracket:equals])
        declared.append((part[bracket - 1].text, extents, equals < len(part)))
    return type_text, declared


def _qualified_members(tokens: list[Token]) -> list[int]:
    """Indices of device / constant / threadgroup written after a member function's parameter list."""
    found = []
    for i, token in enumerate(tokens):
        if token.text not in _MEMORY_SPACES:
            continue
        previous = before(tokens, i)
        if text_at(tokens, previous) in ("const", "constexpr", "noexcept"):
            assert previous is not None
            previous = before(tokens, previous)
        if text_at(tokens, previous) == ")" and text_at(tokens, after(tokens, i)) in ("{", ":", ";", "="):
            found.append(i)
    return found


def _reject_qualified_members(tokens: list[Token]) -> None:
    for i in _qualified_members(tokens):
        raise CompileError(
            f"line {tokens[i].line}: '{tokens[i].text}' on a member function is valid Metal but not supported here; "
            "use a free function that takes the pointer"
        )


def _drop_qualified_members(tokens: list[Token]) -> None:
    for i in _qualified_members(tokens):
        start, depth = i, 0
        while start > 0:  # back to the end of the previous member
            text = tokens[start - 1].text
            if tokens[start - 1].kind not in ("string", "comment", "directive"):
                if depth == 0 and text in (";", "{", "}"):
                    break
                depth += {")": 1, "]": 1, "]]": 1, "(": -1, "[": -1, "[[": -1}.get(text, 0)
            start -= 1
        for j in range(start, _member_end(tokens, i) + 1):
            tokens[j].blank()


def _member_end(tokens: list[Token], i: int) -> int:
    """Last token of the member function whose qualifier stands at i (after it: initialisers and body, or `;`)."""
    j = after(tokens, i)
    while j is not None and tokens[j].text != ";":
        if tokens[j].text == "{":
            end = closing(tokens, j)
            assert end is not None
            previous = before(tokens, j)
            if previous is None or tokens[previous].kind != "name" or tokens[previous].text in SPACES:
                return end  # a body; `name{...}` would be a member initialiser
            j = end
        elif tokens[j].text == "(":
            end = closing(tokens, j)
            assert end is not None
            j = end
        j = after(tokens, j)
    assert j is not None
    return j
