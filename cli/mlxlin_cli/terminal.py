"""What the terminal can show: messages, colour, progress, and numbers as people read them."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import IO

import click

Progress = Callable[[int, int], None]
"""Called with (done, total)."""

PATIENCE = 0.3  # seconds before a progress bar is worth showing


def interactive(stream: IO[str]) -> bool:
    """Whether `stream` is a terminal that understands escape codes."""
    return stream.isatty() and os.environ.get("TERM", "") != "dumb"


def coloured(stream: IO[str]) -> bool:
    """Whether `stream` may carry colours (https://no-color.org)."""
    return interactive(stream) and not os.environ.get("NO_COLOR")


def say(text: str = "", *, newline: bool = True, dim: bool = False) -> None:
    """Print to standard error."""
    if dim and coloured(sys.stderr):
        text = f"\x1b[2m{text}\x1b[0m"
    click.echo(text, err=True, nl=newline)


def write(text: str) -> None:
    """Write to standard output, now."""
    click.echo(text, nl=False)


def flush() -> None:
    """Send on what standard output still holds."""
    sys.stdout.flush()


def open_streams() -> None:
    """Put the null device where whoever started us closed a standard stream.

    Else the next file would be opened under its number; at number 0, MLX takes it for one that could not be opened.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8", closefd=False))


@contextmanager
def closing() -> Iterator[None]:
    """When the terminal is closed or the process is asked to end, unwind (exit code 128 + signal) and clean up.

    What was told to be ignored, as nohup does, stays ignored.
    """

    def leave(signum: int, frame: FrameType | None) -> None:
        sys.exit(128 + signum)

    ends = [number for number in (signal.SIGHUP, signal.SIGTERM) if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, leave) for number in ends}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def complain(message: str, hint: str = "") -> None:
    """The two lines of an error."""
    say(f"Error: {' '.join(message.split())}")
    if hint:
        say(f"Hint: {' '.join(hint.split())}")


def table(rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> str:
    """Columns aligned with two spaces between; the column numbers in `right` are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def bar(value: float, largest: float, width: int = 30) -> str:
    """A horizontal bar in eighths of a character; `#` where the output's encoding has no blocks."""
    eighths = round(8 * width * value / largest) if largest > 0 else 0
    if not (sys.stdout.encoding or "").lower().startswith("utf"):
        return "#" * (-(-eighths // 8))
    full, rest = divmod(eighths, 8)
    return "█" * full + " ▏▎▍▌▋▊▉"[rest].strip()


def size(count: float) -> str:
    """Bytes for people, decimal units: 512 B, 8.57 MB, 123 GB."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 999.5 or unit == "TB":
            break
        count /= 1000
    return f"{number(count)} {unit}"


def number(value: float) -> str:
    """Three significant digits, thousands separated: 1,234  56.7  0.89."""
    return f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:.3g}"


@contextmanager
def progress(description: str, *, in_bytes: bool = False) -> Iterator[Progress | None]:
    """A bar on standard error that appears when something takes long, and leaves no trace.

    Yields None, nothing to call, where standard error is not a terminal.
    """
    if not interactive(sys.stderr):
        yield None
        return
    bar = _Bar(description, in_bytes)
    try:
        yield bar
    finally:
        bar.close()


class _Bar:
    def __init__(self, description: str, in_bytes: bool) -> None:
        self._description, self._in_bytes = description, in_bytes
        self._began = time.monotonic()
        self._close: Callable[[], None] | None = None

    def __call__(self, done: int, total: int) -> None:
        if self._close is None:
            if time.monotonic() - self._began < PATIENCE:
                return
            self._open()
        self._bars.update(self._task, completed=done, total=total)
        if done >= total:
            self.close()

    def _open(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.progress import TimeRemainingColumn as Remaining

        count = DownloadColumn() if self._in_bytes else MofNCompleteColumn()
        columns = (TextColumn("{task.description}"), BarColumn(), count, Remaining())
        self._bars = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._bars.add_task(self._description, total=None)
        self._bars.start()
        self._close = self._bars.stop

    def close(self) -> None:
        if self._close is not None:
            self._close()
            self._close = None
