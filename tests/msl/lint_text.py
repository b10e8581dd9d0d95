"""Rules of the Metal shading language that clang's C++ does not know: those visible in the text of a kernel."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from .errors import Finding
from .gen import ATTRIBUTES, TemplateArgument
from .lexer import SPACES, Token, closing, lex
from .lint_names import taken_names

_ABSENT = {
    "asm": "inline assembly",
    "__asm__": "inline assembly",
    "catch": "exceptions",
    "co_await": "coroutines",
    "delete": "operator delete",
    "double": "double precision",
    "dynamic_cast": "dynamic_cast",
    "goto": "goto",
    "new": "operator new",
    "register": "the register storage class",
    "thread_local": "thread_local",
    "throw": "exceptions",
    "try": "exceptions",
    "typeid": "typeid",
    "virtual": "virtual functions",
    "wchar_t": "wchar_t",
}
_RESERVED = frozenset(
    "bfloat fragment global half imageblock intersection kernel local mesh object object_data patch_control_point "
    "ray_data sampler stage_in texture1d texture2d texture3d texturecube threadgroup_imageblock vertex visible".split()
)
_SCALARS = frozenset(
    "bool char uchar short ushort int uint long ulong half bfloat float void size_t ptrdiff_t unsigned signed "
    "float16_t bfloat16_t int8_t uint8_t int16_t uint16_t int32_t uint32_t int64_t uint64_t complex64_t".split()
)
_VECTORS = frozenset(
    f"{scalar}{n}"
    for scalar in "bool char uchar short ushort int uint long ulong half bfloat float".split()
    for n in (2, 3, 4)
)
_INCLUDE = re.compile(r"\s*#\s*include\s*<(metal_\w+|simd/[\w.]+|MetalPerformancePrimitives/[\w.]+)>")
_MAX_BUFFERS = 31

Rule = Callable[[Sequence[Token], str, int, frozenset[str]], Iterator[tuple[Token, str, str]]]


def lint_text(
    *,
    source: str,
    header: str,
    template: Sequence[TemplateArgument],
    metal: int,
    input_names: Sequence[str],
    n_buffers: int,
) -> list[Finding]:
    """Findings in `header` and `source`, in this order."""
    findings = []
    types = set(_SCALARS | _VECTORS | {name for name, value in template if not isinstance(value, (bool, int))})
    parts = {
        part: [t for t in lex(text) if t.kind != "space"] for part, text in (("header", header), ("source", source))
    }
    for tokens in parts.values():
        types |= _declared_types(tokens)
    for part, tokens in parts.items():
        code = [token for token in tokens if token.kind not in ("newline", "comment")]
        for rule in _RULES:
            for token, name, message in rule(code, part, metal, frozenset(types)):
                findings.append(Finding(name, part, token.line, message))
    findings += _accidental_parameters(parts["source"], input_names)
    if n_buffers > _MAX_BUFFERS:
        message = f"{n_buffers} buffer arguments; Metal allows {_MAX_BUFFERS}"
        findings.append(Finding("buffers", "kernel", 1, message))
    return findings


def _declared_types(tokens: Sequence[Token]) -> set[str]:
    words = [token for token in tokens if token.kind not in ("newline", "comment", "directive")]
    return {
        name.text
        for keyword, name in zip(words, words[1:], strict=False)
        if keyword.text in ("struct", "class", "enum", "typename", "using") and name.kind == "name"
    }


def _text(tokens: Sequence[Token], i: int) -> str:
    return tokens[i].text if 0 <= i < len(tokens) else ""


def _words(tokens: Sequence[Token], part: str, metal: int, types: frozenset[str]) -> Iterator[tuple[Token, str, str]]:
    """Keywords, literals and directives that Metal does not have."""
    for i, token in enumerate(tokens):
        previous, following = _text(tokens, i - 1), _text(tokens, i + 1)
        if token.kind == "directive":
            if re.match(r"\s*#\s*include", token.text) and not _INCLUDE.match(token.text):
                yield token, "include", f"the run-time compiler only has Metal's own headers: {token.text.strip()}"
        elif token.kind == "number":
            is_float = "." in token.text or re.search(r"[0-9][eE]", token.text)
            if token.text[-1] in "lL" and is_float and not token.text.lower().startswith("0x"):
                yield token, "double", f"long double literal {token.text}"
        elif token.kind == "string":
            if token.text.startswith('"') and previous not in ("(", ","):
                yield token, "string", "string literal"
        elif token.kind == "name" and previous not in (".", "->", "::"):
            if token.text in _ABSENT and not (token.text == "delete" and previous == "="):
                yield token, "c++", f"{_ABSENT[token.text]} is not available in Metal"
            elif token.text == "std" and following == "::":
                yield token, "c++", "the C++ standard library is not available in Metal"
            elif token.text == "long" and following in ("long", "double"):
                yield token, "c++", f"'long {following}' is not available in Metal"
            elif token.text in _RESERVED and (previous in types or previous == "auto"):
                if following in ("=", ";", "[", ",", ")"):
                    yield token, "reserved", f"'{token.text}' is a reserved word"


def _lambdas(tokens: Sequence[Token], part: str, metal: int, types: frozenset[str]) -> Iterator[tuple[Token, str, str]]:
    for i, token in enumerate(tokens):
        starts = token.text == "[" and _text(tokens, i + 1) in ("&", "=", "]")
        if starts and metal < 320 and _text(tokens, i - 1) in ("", "=", "(", ",", "return", "{", ";"):
            yield token, "lambda", "lambda expressions need Metal 3.2 (macOS 15)"


def _pointers(
    tokens: Sequence[Token], part: str, metal: int, types: frozenset[str]
) -> Iterator[tuple[Token, str, str]]:
    """Pointers and references to a known type without an address space, in declarations and casts."""
    for i, token in enumerate(tokens):
        if token.text not in ("*", "&") or i == 0:
            continue
        pointee = tokens[i - 1]
        follows_type = pointee.text in types or pointee.text == "const"
        following = tokens[i + 1] if i + 1 < len(tokens) else None
        if not follows_type or following is None:
            continue
        if following.kind != "name" and following.text not in (",", ")", "&", "*", ">"):
            continue
        start = i - 1
        while start >= 0 and tokens[start].text not in ("(", ",", ";", "{", "}", "<", ">", "=", "return"):
            start -= 1
        if _text(tokens, start) in ("=", "return") or _text(tokens, start - 1) in ("sizeof", "decltype", "alignof"):
            continue
        declaration = {t.text for t in tokens[start + 1 : i + 3]}
        if not declaration & SPACES and "auto" not in declaration and "sizeof" not in declaration:
            message = f"pointer or reference to '{pointee.text}' without an address space (thread, device, ...)"
            yield token, "address-space", message


def _statics(tokens: Sequence[Token], part: str, metal: int, types: frozenset[str]) -> Iterator[tuple[Token, str, str]]:
    for i, token in enumerate(tokens):
        if part == "source" and token.text == "static" and all(t.text != "constant" for t in tokens[i : i + 5]):
            yield token, "static-local", "a static local variable must be in the constant address space"


def _program_scope(
    tokens: Sequence[Token], part: str, metal: int, types: frozenset[str]
) -> Iterator[tuple[Token, str, str]]:
    """Variables at program scope and static members must be `constant`; threadgroup variables belong in the kernel."""
    if part != "header":
        return
    statement: list[Token] = []
    scopes: list[str] = []  # "type" (struct, namespace), "function" or "initialiser"
    for i, token in enumerate(tokens):
        if token.kind == "directive":
            continue
        in_function = "function" in scopes
        if token.text == "{":
            scopes.append(_scope(statement, in_function))
            statement = statement if scopes[-1] == "initialiser" else []
        elif token.text == "}":
            if scopes and scopes.pop() != "initialiser":
                statement = []
        elif token.text == ";" and "initialiser" not in scopes:
            if not in_function and _is_variable(statement, is_member=bool(scopes)):
                text = " ".join(t.text for t in statement[:8])
                yield statement[0], "program-scope", f"must be in the constant address space: {text}"
            statement = []
        else:
            statement.append(token)
        if token.text == "threadgroup" and _text(tokens, i - 1) in ("", ";", "{", "}"):
            end = next((t.text for t in tokens[i:] if t.text in (";", "*", "&", "(")), "")
            if end == ";":
                yield token, "threadgroup-scope", "a threadgroup variable can only be declared in a kernel function"


def _scope(statement: Sequence[Token], in_function: bool) -> str:
    texts = [token.text for token in statement]
    if "=" in texts:
        return "initialiser"
    keywords = ("struct", "class", "namespace", "enum", "union")
    is_type = any(keyword in texts for keyword in keywords) and ")" not in texts
    return "function" if in_function or (")" in texts and not is_type) else "type"


def _is_variable(statement: Sequence[Token], *, is_member: bool) -> bool:
    """Is this a program-scope variable or static member that is not `constant`?"""
    texts = [token.text for token in statement]
    if texts[:1] == ["template"]:
        depth = 0
        for i, text in enumerate(texts):
            depth += (text == "<") - (text == ">")
            if text == ">" and depth == 0:
                return _is_variable(statement[i + 1 :], is_member=is_member)
        return False
    other = "typedef using struct class enum union namespace static_assert friend extern public private protected"
    if len(texts) < 2 or texts[0] in other.split() or "operator" in texts or "constant" in texts:
        return False
    declarator = texts[: texts.index("=")] if "=" in texts else texts
    return "(" not in declarator and (not is_member or "static" in texts)


def _thread_methods(
    tokens: Sequence[Token], part: str, metal: int, types: frozenset[str]
) -> Iterator[tuple[Token, str, str]]:
    """From Metal 4.1 an unqualified `this` is generic: a method that returns `thread T&` must be marked `thread`."""
    depths = []  # brace depth at which each enclosing struct's members stand
    depth, is_type = 0, False
    for i, token in enumerate(tokens):
        if token.text in ("struct", "class"):
            is_type = True
        elif token.text == ";":
            is_type = False
        elif token.text == "{":
            depth += 1
            if is_type:
                depths.append(depth)
            is_type = False
        elif token.text == "}":
            if depths and depths[-1] == depth:
                depths.pop()
            depth -= 1
        elif token.text == "(" and depths and depths[-1] == depth:
            end = closing(tokens, i)
            start = max((k for k in range(i) if tokens[k].text in (";", "{", "}", ":")), default=-1)
            head = [t.text for t in tokens[start + 1 : i]]
            tail = [_text(tokens, k) for k in range(end + 1, end + 4)] if end is not None else []
            if "thread" in head and ("&" in head or "*" in head) and "thread" not in tail and "static" not in head:
                yield token, "thread-method", "a method that returns a thread reference must be marked `thread`"


def _accidental_parameters(tokens: Sequence[Token], input_names: Sequence[str]) -> Iterator[Finding]:
    """MLX finds attributes and X_shape by text search: a word that only stands in a comment adds a parameter too."""
    code = "\n".join(token.text for token in tokens if token.kind != "comment")
    words = [*ATTRIBUTES, *(f"{name}_{what}" for name in input_names for what in ("shape", "strides", "ndim"))]
    for token in tokens:
        if token.kind == "comment":
            for word in words:
                if word in token.text and word not in code:
                    message = f"'{word}' stands only in a comment, yet MLX adds it to the parameters"
                    yield Finding("comment", "source", token.line, message)


_RULES: tuple[Rule, ...] = (_words, _lambdas, _pointers, _statics, _program_scope, _thread_methods, taken_names)
