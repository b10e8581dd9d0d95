"""Chat templates, rendered exactly as transformers renders them, without transformers.

A template comes from a checkpoint and is untrusted code: it runs in jinja2's immutable sandbox, and everything it sees
is rebuilt from plain JSON types first.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, cast

from ..errors import InputError, TokenizerError

if TYPE_CHECKING:
    import jinja2

Message = Mapping[str, Any]

_THINKING_SWITCHES = ("enable_thinking", "thinking")  # variables that templates read, in the order of preference
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
_ROUGH = "The template may expect other roles or contents; --raw (raw=True) goes without it."
_MARKERS = (("<think>", "</think>"), ("◁think▷", "◁/think▷"))


class ChatTemplate:
    """One compiled template.

    Args:
        source: jinja text.
        origin: what to call it in messages, e.g. its file.

    Raises:
        TokenizerError: the template does not compile.
    """

    def __init__(self, source: str, origin: str) -> None:
        import jinja2
        import jinja2.meta

        self.source = source
        self.origin = origin
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            self.variables = frozenset(jinja2.meta.find_undeclared_variables(environment.parse(source)))
        except jinja2.TemplateSyntaxError as error:
            raise TokenizerError(f"{origin} does not compile: line {error.lineno}: {error.message}") from error

    @property
    def thinking_switch(self) -> str | None:
        """The variable that turns thinking on and off, if the template has one."""
        return next((name for name in _THINKING_SWITCHES if name in self.variables), None)

    @property
    def thinking_markers(self) -> tuple[str, str] | None:
        """The texts around a thought in this template's conversations, if it knows thoughts."""
        return next((markers for markers in _MARKERS if markers[1] in self.source), None)

    def render(self, messages: Sequence[Message], *, think: bool | None = None, **variables: Any) -> str:
        """The conversation as text.

        Args:
            messages: mappings with "role" and "content", optionally "reasoning_content", "tool_calls", ...
            think: thinking on or off; None leaves the template's default.
            variables: what else the template may read: tools, documents, add_generation_prompt, special tokens.

        Raises:
            InputError: messages that are no conversation, or a switch the template does not have.
            TokenizerError: the template refuses the conversation or fails on it.
        """
        import jinja2
        import jinja2.sandbox

        if think is not None:
            switch = self.thinking_switch
            if switch is None:
                raise InputError("This model's chat template cannot switch thinking.", "Leave the thinking option out.")
            variables[switch] = think
        variables = {"tools": None, "documents": None, "add_generation_prompt": False} | variables
        try:
            return self._template.render(messages=normalize(messages), **cast(dict[str, Any], plain(variables)))
        except InputError:  # a ValueError too
            raise
        except jinja2.sandbox.SecurityError as error:
            raise TokenizerError(f"{self.origin} does what a chat template may not: {error}", _ROUGH) from error
        except jinja2.UndefinedError as error:
            raise TokenizerError(f"{self.origin} fails on this conversation: {error}", _ROUGH) from error
        except jinja2.TemplateError as error:
            hint = "Check the order and the roles of the messages."
            raise TokenizerError(f"The chat template refuses this conversation: {error}", hint) from error
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            what = f"{type(error).__name__}: {error}"
            raise TokenizerError(f"{self.origin} fails on this conversation: {what}", _ROUGH) from error


def normalize(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as templates expect them, copied: plain types, no None values, reasoning under each of its names, and
    tool-call arguments as mappings.

    Raises:
        InputError: an empty conversation, a message that is no mapping or has no role, arguments that are not JSON.
    """
    if isinstance(messages, (str, Mapping)) or not messages:
        raise InputError("A conversation is a list of at least one message.")
    normal = []
    for number, message in enumerate(messages, 1):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InputError(f"Message {number} is not a mapping with a role: {message!r:.80}")
        copy = cast(dict[str, Any], plain({key: value for key, value in message.items() if value is not None}))
        for call in copy.get("tool_calls") or []:
            _parse_arguments(call, number)
        reasoning = next((copy[key] for key in _REASONING_FIELDS if copy.get(key) is not None), None)
        if reasoning is not None:
            copy = {"thinking": reasoning, **copy, "reasoning_content": reasoning}
        normal.append(copy)
    return normal


def _parse_arguments(call: Any, number: int) -> None:
    """Tool-call arguments arrive as a mapping or, as in OpenAI's API, as JSON text; templates want the mapping."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise InputError(f"Message {number}: a tool call is not a mapping: {call!r:.80}")
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return
    where = f"Message {number}: the arguments of the tool call {function.get('name', '?')!r}"
    try:
        parsed = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where} are not valid JSON: {error}", "Pass an object, or its JSON text.") from error
    if not isinstance(parsed, dict):
        raise InputError(f"{where} are JSON, but not an object: {arguments:.80}", "Pass an object, or its JSON text.")
    function["arguments"] = parsed


def plain(value: Any) -> Any:
    """A copy made of plain JSON types only; anything else becomes text that names its type, and is thereby inert."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, tuple):
        return tuple(plain(item) for item in value)
    import numpy

    return plain(value.item()) if isinstance(value, numpy.generic) else f"<{type(value).__name__}>"


def _environment() -> jinja2.Environment:
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
    from jinja2.utils import Namespace

    class Generation(Extension):
        """`{% generation %}` marks what the assistant wrote, for training; rendering passes it through."""

        tags = {"generation"}

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_pass"), [], [], body).set_lineno(line)

        def _pass(self, caller: Any) -> str:
            return str(caller())

    class PlainDict:
        """`dict(...)` without the attributes of the type."""

        def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
            return dict(*args, **kwargs)

        def fromkeys(self, *args: Any) -> dict[Any, Any]:
            return dict.fromkeys(*args)

    class PlainNamespace(Namespace):
        """`namespace(...)` that cannot take names reserved to Python's internals."""

        def __init__(*args: Any, **kwargs: Any) -> None:  # no named self: a template may pass one
            self, *rest = args
            attributes = dict(*rest, **kwargs)
            for name in attributes:
                _check(name)
            Namespace.__init__(self, attributes)

        def __setitem__(self, name: str, value: Any) -> None:
            _check(name)
            Namespace.__setitem__(self, name, value)

    def _check(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a namespace cannot hold {name!r}")

    def raise_exception(message: Any) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def strftime_now(format: str) -> str:
        return datetime.now().strftime(format)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": strftime_now,
        "dict": PlainDict(),
        "namespace": PlainNamespace,
    }
    return environment
