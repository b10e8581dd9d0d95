"""A tiny model that says what it is told in the place of the loaded one, and the command line run against it."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click.testing
import pytest

import mlxlin
from mlxlin_cli import main
from tests.scripted import FORGETFUL, PLAIN, Reply, scripted


@dataclass
class Script:
    """What the model says, and what was asked of it. Its template keeps everything; `think()` gives it one that thinks.

    Attributes:
        replies: what it says next; "Hello world." when nothing is left.
        loads: every name that was loaded, with the options.
        asked: the prompt of every reply that was begun, with the options.
    """

    folder: Path
    replies: list[Reply] = field(default_factory=list)
    loads: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    asked: list[tuple[Any, dict[str, Any]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._make(PLAIN)

    def think(self) -> None:
        self._make(FORGETFUL)

    def load(self, source: str, **options: Any) -> tuple[Any, Any]:
        self.loads.append((source, options))
        return self.model, self.tokenizer

    def messages(self, number: int) -> list[tuple[str, str]]:
        """Role and text of all messages behind reply `number`, from 0."""
        return [(message["role"], message["content"]) for message in self.asked[number][0]]

    def _make(self, template: str) -> None:
        said = (self.replies.pop(0) if self.replies else "Hello world." for _ in itertools.count())
        defaults = {"do_sample": True, "temperature": 0.7, "top_p": 0.9}
        self.model, self.tokenizer = scripted(self.folder, template, said, generation_config=defaults)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Script:
    """A script in the place of `mlxlin.load`, and a home of its own."""
    made = Script(tmp_path / "model")
    ask, stream = mlxlin.Conversation.ask, mlxlin.stream

    def asked(self: Any, text: str, **options: Any) -> Generator[Any, None, None]:
        made.asked.append(([*map(dict, self.messages), {"role": "user", "content": text}], options))
        return ask(self, text, **options)

    def streamed(model: Any, tokenizer: Any, prompt: Any, **options: Any) -> Iterator[Any]:
        made.asked.append((prompt, options))
        return stream(model, tokenizer, prompt, **options)

    monkeypatch.setattr(mlxlin.Conversation, "ask", asked)
    monkeypatch.setitem(mlxlin.__dict__, "load", made.load)
    monkeypatch.setitem(mlxlin.__dict__, "stream", streamed)
    monkeypatch.setenv("MLXLIN_HOME", str(tmp_path / "home"))
    return made


@dataclass(frozen=True)
class Result:
    """What a command line left: exit code and the two streams."""

    code: int
    out: str
    err: str


@pytest.fixture
def cli() -> Callable[..., Result]:
    """Runs a command line in this process; `input` is what a pipe would bring."""

    def run(*arguments: str, input: str | bytes | None = None) -> Result:
        with click.testing.CliRunner().isolation(input=input) as (out, err, _):
            code = main.run(arguments)
            return Result(code, out.getvalue().decode(), err.getvalue().decode())

    return run


ROOT = Path(__file__).parents[2]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """For subprocesses: this tree's packages, a home of its own, no network, warnings shown."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "cli")]),
        "MLXLIN_HOME": str(tmp_path / "home"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONWARNINGS": "error",
    }


@pytest.fixture
def command_line() -> list[str]:
    """The `mlxlin` command as a subprocess."""
    return [sys.executable, "-m", "mlxlin_cli"]


@pytest.fixture
def run_python(environment: dict[str, str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs Python code in a fresh process."""

    def run(code: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, env=environment
        )

    return run
