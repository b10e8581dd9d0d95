"""Where a conversation's lines come from: an edited line with history on a terminal, else a pipe."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mlxlin_cli.terminal import coloured, interactive, say

if TYPE_CHECKING:
    from prompt_toolkit.history import History

Read = Callable[[str], str]
"""Gives the next message as typed, begun with a draft where it can be edited; "" when given up, EOFError at the end."""

PROMPT, MORE = "> ", ". "
QUOTES = '"""'


def complete(text: str) -> bool:
    """Whether a message is finished: no backslash at its end, no open triple quotes."""
    if text.lstrip().startswith(QUOTES):
        body = text.lstrip()[len(QUOTES) :]
        return QUOTES in body
    return not text.endswith("\\")


def unwrap(text: str) -> str:
    """The message itself: triple quotes around it and backslashes at line ends removed."""
    stripped = text.strip()
    if stripped.startswith(QUOTES) and stripped.endswith(QUOTES) and len(stripped) >= 2 * len(QUOTES):
        return stripped[len(QUOTES) : -len(QUOTES)].strip("\n")
    return text.replace("\\\n", "\n").strip()


def reader(history: Path, commands: Sequence[str]) -> Read:
    """What reads the person's messages: a line editor on a terminal, else plain lines.

    Args:
        history: file of earlier lines, for the arrow keys.
        commands: words to complete, such as "/help".
    """
    on_terminal = sys.stdin.isatty() and interactive(sys.stderr)
    return editor(history, commands) if on_terminal else plain_reader()


def plain_reader() -> Read:
    """Lines from a pipe, or from a terminal without escape codes; what is no UTF-8 becomes U+FFFD."""
    prompt = sys.stdin.isatty()

    def read(draft: str) -> str:
        text = ""
        while True:
            if prompt:
                say(MORE if text else PROMPT, newline=False)
            line = sys.stdin.buffer.readline().decode("utf-8", "replace")
            if not line:
                if text:
                    return text
                raise EOFError
            text += line.removesuffix("\n").removesuffix("\r")
            if complete(text):
                return text
            text += "\n"

    return read


def editor(history: Path, commands: Sequence[str]) -> Read:
    """A line editor on the terminal: Enter sends, Alt-Enter or an unfinished message begins a new line."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
    from prompt_toolkit.output import ColorDepth, create_output

    keys = KeyBindings()

    @keys.add("enter")
    def send_or_continue(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if complete(buffer.text):
            buffer.validate_and_handle()
        else:
            buffer.insert_text("\n")

    @keys.add("escape", "enter")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    session: PromptSession[str] = PromptSession(
        history=open_history(history),
        multiline=True,
        key_bindings=keys,
        prompt_continuation=MORE,
        completer=WordCompleter(list(commands), sentence=True),
        complete_while_typing=False,
        color_depth=None if coloured(sys.stderr) else ColorDepth.DEPTH_1_BIT,
        output=create_output(stdout=sys.stderr),
    )

    def read(draft: str) -> str:
        try:
            return session.prompt(PROMPT, default=draft)
        except KeyboardInterrupt:
            say("(Ctrl-D or /quit leaves)", dim=True)
            return ""

    return read


def open_history(path: Path) -> History:
    """The history file, readable by its owner only; kept in memory alone where it cannot be written."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
        path.chmod(0o600)
    except OSError as error:
        say(f"The history is not kept: {path}: {error.strerror}.")
        return InMemoryHistory()
    return FileHistory(str(path))
