"""A model made of plain Python in the place of mlxlin's, and the command line run against it."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click.testing
import pytest
from mlxlin_cli import main

import mlxlin


@dataclass(frozen=True)
class FakeStats:
    prompt_tokens: int
    reused_tokens: int
    generated_tokens: int
    finish_reason: str
    reuse: str = ""
    prefill_seconds: float = 0.5
    decode_seconds: float = 1.0
    prefill_tps: float = 1234.0
    decode_tps: float = 56.7
    state_bytes: int = 1_000_000
    peak_memory_bytes: int = 5_000_000


@dataclass(frozen=True)
class FakePiece:
    text: str
    token: int | None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    finish_reason: str | None = None
    stats: FakeStats | None = None


class FakeSplitter:
    """Whole <think> and </think> pieces only."""

    def __init__(self) -> None:
        self.inside = False

    def add(self, text: str) -> list[tuple[bool, str]]:
        if text in ("<think>", "</think>"):
            self.inside = text == "<think>"
            return []
        return [(self.inside, text)]

    def finish(self) -> list[tuple[bool, str]]:
        return []


class FakeTokenizer:
    has_chat_template = True
    can_think = True
    generation_defaults = {"temperature": 0.7, "top_p": 0.9}
    vocab_size = 100

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        return f"<{ids[0]}>"

    def chat(self, messages: list[dict[str, str]], *, think: bool | None = None) -> list[int]:
        return [1] * sum(len(m["content"]) for m in messages)

    def thought_splitter(self, messages: list[dict[str, str]], *, think: bool | None = None) -> FakeSplitter | None:
        return FakeSplitter() if think else None


@dataclass
class FakeModel:
    nbytes: int = 10_000_000
    context: int = 1000
    parameter_count: int = 4_300_000
    dtype: str = "float32"
    vocab_size: int = 100

    fingerprint: str = "f" * 64

    def fresh(self) -> None:
        return None

    def state_nbytes(self, context: int) -> int:
        return 1_000_000 + 100 * context


@dataclass
class Fakes:
    """What the fakes do and what was asked of them.

    Attributes:
        say: the words of every reply.
        before_piece: called with the number of the piece about to be yielded.
    """

    say: Callable[[Any], list[str]] = lambda prompt: ["Hello", " world", "."]
    before_piece: Callable[[int], None] = lambda number: None
    loads: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    streams: list[tuple[Any, dict[str, Any]]] = field(default_factory=list)
    model: FakeModel = field(default_factory=FakeModel)
    tokenizer: FakeTokenizer = field(default_factory=FakeTokenizer)

    def load(self, source: str, **options: Any) -> tuple[FakeModel, FakeTokenizer]:
        self.loads.append((source, options))
        return self.model, self.tokenizer

    def stream(self, model: FakeModel, tokenizer: FakeTokenizer, prompt: Any, **options: Any) -> Iterator[FakePiece]:
        self.streams.append((prompt, options))
        length = len(tokenizer.encode(prompt) if options.get("raw") else tokenizer.chat(prompt))
        if options["progress"]:
            options["progress"](length, length)
        words = self.say(prompt)[: options["max_tokens"]]
        likely = {}
        if options.get("logprobs") is not None:
            likely = {"logprob": -0.5, "top": ((7, -0.5),)[: options["logprobs"]]}
        pieces = [FakePiece(word, number, **likely) for number, word in enumerate(words)]
        pieces.append(FakePiece("", None, finish_reason="stop", stats=FakeStats(length, 0, len(words), "stop")))
        for number, piece in enumerate(pieces):
            self.before_piece(number)
            yield piece

    def conversation(self) -> type:
        """A conversation that replies with `stream`, and does the rest as the real one."""
        from mlxlin.conversation import Conversation

        fakes = self

        class FakeConversation(Conversation):
            def ask(self, text: str, **options: Any) -> Iterator[Any]:
                messages = [*self.messages, {"role": "user", "content": text}]
                splitter = self.tokenizer.thought_splitter(messages, think=options["think"])
                said: list[tuple[bool, str]] = []
                try:
                    for piece in fakes.stream(self.model, self.tokenizer, messages, **options):
                        said += splitter.add(piece.text) if splitter else [(False, piece.text)]
                        yield piece
                finally:
                    thought, answer = (
                        "".join(t for is_thought, t in said if is_thought is kind) for kind in (True, False)
                    )
                    if said:
                        message = {"role": "assistant", "content": answer}
                        self.turns += [messages[-1], message | ({"reasoning_content": thought} if thought else {})]

            def fork(self) -> Any:
                twin = FakeConversation(self.model, self.tokenizer, system=self.system, timeline=self.timeline)
                twin.turns = list(self.turns)
                return twin

        return FakeConversation


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Fakes:
    """Fakes in the place of `mlxlin.load`, `mlxlin.stream` and `mlxlin.describe_backend`."""
    found = Fakes()
    backend = {"device": "cpu", "path": "chunkwise", "memory_bytes": 10**10}
    for name, value in {
        "load": found.load,
        "stream": found.stream,
        "describe_backend": lambda: backend,
    }.items():
        monkeypatch.setitem(mlxlin.__dict__, name, value)
    monkeypatch.setattr("mlxlin.conversation.Conversation", found.conversation())
    monkeypatch.setenv("MLXLIN_HOME", str(tmp_path / "home"))
    return found


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
