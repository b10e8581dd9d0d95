"""A reply as it arrives: the answer to standard output, thoughts and figures to standard error."""

from __future__ import annotations

import signal
import sys
import termios
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING

from mlxlin_cli.terminal import number, say, size, write

if TYPE_CHECKING:
    from mlxlin.generate import Piece, Stats
    from mlxlin.tokenizer import ThoughtSplitter


@dataclass
class Reply:
    """What came of one streamed reply; `stats` is None where it was stopped before its end."""

    answer: str = ""
    thought: str = ""
    pieces: list[Piece] = field(default_factory=list)
    stats: Stats | None = None
    finish_reason: str | None = None


class Printer:
    """Prints a reply while it streams in.

    Args:
        splitter: tells thought from answer; None takes everything as answer.
        hide_thoughts: leave thoughts out.
        quiet: print nothing, only collect.
    """

    def __init__(
        self, splitter: ThoughtSplitter | None = None, *, hide_thoughts: bool = False, quiet: bool = False
    ) -> None:
        self.reply = Reply()
        self._splitter = splitter
        self._show_answer = not quiet
        self._show_thoughts = not (quiet or hide_thoughts)

    def show(self, pieces: Iterable[Piece], stopped: Callable[[], bool] = lambda: False) -> Reply:
        """Print every piece until the end, or until `stopped()` is true after one."""
        for piece in pieces:
            self.reply.pieces.append(piece)
            self.reply.stats, self.reply.finish_reason = piece.stats, piece.finish_reason
            self._parts(self._splitter.add(piece.text) if self._splitter else [(False, piece.text)])
            if stopped():
                break
        if self._splitter:
            self._parts(self._splitter.finish())
        if self._show_answer and self.reply.answer and not self.reply.answer.endswith("\n"):
            write("\n")
        return self.reply

    def _parts(self, parts: Iterable[tuple[bool, str]]) -> None:
        for is_thought, text in parts:
            self._thought(text) if is_thought else self._answer(text)

    def _thought(self, text: str) -> None:
        text = text if self.reply.thought else text.lstrip()
        self.reply.thought += text
        if self._show_thoughts and text:
            say(text, newline=False, dim=True)

    def _answer(self, text: str) -> None:
        if self.reply.thought and not self.reply.answer:  # templates put blank lines between the two
            text = text.lstrip("\n")
            if text and self._show_thoughts:
                say("" if self.reply.thought.endswith("\n") else "\n")
        self.reply.answer += text
        if self._show_answer and text:
            write(text)


def stats_line(stats: Stats) -> str:
    """One line: what was reused and why not more, tokens and speeds, the size of the state."""
    parts = [f"reused {stats.reused_tokens:,} of {stats.prompt_tokens:,} tokens ({stats.reuse})"] if stats.reuse else []
    read = ("read", stats.prompt_tokens - stats.reused_tokens, stats.prefill_tps)
    for verb, tokens, speed in (read, ("wrote", stats.generated_tokens, stats.decode_tps)):
        parts.append(f"{verb} {tokens:,}" + (f" at {number(speed)}/s" if speed else ""))
    return " · ".join([*parts, f"state {size(stats.state_bytes)}"])


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Ctrl-C sets a flag, which the yielded function tells; a second Ctrl-C raises KeyboardInterrupt.

    What is typed meanwhile does not appear in the text; it is there at the next prompt.
    """
    pressed = False

    def press(signum: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    before = signal.signal(signal.SIGINT, press)
    try:
        with _no_echo():
            yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _no_echo() -> Iterator[None]:
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    quiet = list(before)
    quiet[3] &= ~termios.ECHO  # local modes
    termios.tcsetattr(sys.stdin, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)
