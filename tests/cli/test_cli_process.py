"""The command as a process, with the shipped model: signals, pipes, terminals."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import mlxlin

PROMPT = "What is the capital of France?"
ENDLESS = ["-n", "4000", "--logit-bias", "2:-inf", "--logit-bias", "0:-inf"]  # the shipped model's stop tokens
STORY = ["generate", "--raw", "Once upon a time", *ENDLESS]


def test_the_shipped_model_answers(command_line: list[str], environment: dict[str, str]) -> None:
    command = [*command_line, "generate", "--json", "--temp", "0", "--logprobs", "1"]
    done = subprocess.run(command, input=PROMPT, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found["finish_reason"] == "stop" and found["generated_tokens"] == len(found["logprobs"]) + 1
    assert found["text"] == "".join(token["text"] for token in found["logprobs"])
    assert all(token["top"][0]["token"] == token["token"] for token in found["logprobs"])


def start(command: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    assert process.stdout is not None
    assert process.stdout.read(1), "it is generating"
    return process


def test_an_interruption_ends_with_130_and_one_line(command_line: list[str], environment: dict[str, str]) -> None:
    process = start([*command_line, *STORY], environment)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err == b"Interrupted.\n"


def test_a_reader_that_leaves_ends_it_quietly(command_line: list[str], environment: dict[str, str]) -> None:
    process = start([*command_line, *STORY], environment)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(timeout=30) == 141


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)], ids=str)
def test_a_closed_stream_is_an_empty_one(
    closed: tuple[int, ...], command_line: list[str], environment: dict[str, str]
) -> None:
    streams = [subprocess.DEVNULL if number in closed else subprocess.PIPE for number in range(3)]
    command = [*command_line, "generate", "--temp", "0", PROMPT]
    process = subprocess.Popen(
        command,
        stdin=streams[0],
        stdout=streams[1],
        stderr=streams[2],
        env=environment,
        preexec_fn=lambda: [os.close(number) for number in closed],
    )
    out, err = process.communicate()
    assert process.returncode == 0 and not err
    assert out is None or b"Paris" in out


@pytest.mark.parametrize("extra", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_b63_a_piped_chat_has_no_escape_codes(
    command_line: list[str], environment: dict[str, str], extra: dict[str, str]
) -> None:
    done = subprocess.run([*command_line, "chat"], input=b"hi\n", capture_output=True, env=environment | extra)
    assert done.returncode == 0 and b"\x1b" not in done.stdout + done.stderr
    assert b"wrote" in done.stderr and b"Traceback" not in done.stderr


class Terminal:
    """A command on a pseudo-terminal."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.execve(command[0], command, environment)
        self.seen = ""

    def send(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def expect(self, pattern: str, seconds: float = 30) -> str:
        """Wait for a pattern behind what was waited for before; returns everything up to it."""
        deadline = time.monotonic() + seconds
        while not (match := re.search(pattern, self.seen)):
            ready, _, _ = select.select([self._fd], [], [], deadline - time.monotonic())
            assert ready, f"no {pattern!r} in {self.seen!r}"
            self.seen += os.read(self._fd, 65536).decode()
        before, self.seen = self.seen[: match.end()], self.seen[match.end() :]
        return before

    def wait(self) -> int:
        """The exit code."""
        try:
            while os.read(self._fd, 65536):
                pass
        except OSError:  # Linux says so when the other side is gone
            pass
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def close(self) -> None:
        os.close(self._fd)


READY = r"\x1b\[\?2004h"  # the line editor asks for bracketed paste when it is ready


@pytest.fixture
def terminal(command_line: list[str], environment: dict[str, str]) -> Iterator[Terminal]:
    extra = {"TERM": "xterm", "NO_COLOR": "1", "PROMPT_TOOLKIT_NO_CPR": "1"}
    made = Terminal([*command_line, "chat", *ENDLESS], environment | extra)
    yield made
    made.close()


def test_a_conversation_on_a_terminal(terminal: Terminal, tmp_path: Path) -> None:
    seen = terminal.expect(READY)
    terminal.send("What is the capital\\\rof France?\r")
    seen += terminal.expect(r"\x1b\[\?2004l[\s\S]*\w{3}")  # the editor is done, the reply has begun
    terminal.send("\x03")
    seen += terminal.expect(r"Stopped after \d+ tokens") + terminal.expect(READY)
    terminal.send("/stats\r")
    seen += terminal.expect(r"turns +[01]") + terminal.expect(READY)
    terminal.send("\x03")
    seen += terminal.expect(r"Ctrl-D or /quit") + terminal.expect(READY)
    terminal.send("\x04")
    assert terminal.wait() == 0
    assert not re.search(r"\x1b\[(2|3\d|38;[\d;]+)m", seen), "NO_COLOR is set"
    history = tmp_path / "home" / "chat-history"
    assert "+What is the capital\\\n+of France?" in history.read_text() and history.stat().st_mode & 0o777 == 0o600


def test_b63_a_dumb_terminal_gets_plain_text(command_line: list[str], environment: dict[str, str]) -> None:
    terminal = Terminal([*command_line, "chat"], environment | {"TERM": "dumb"})
    seen = terminal.expect("> ")
    terminal.send("hi\n")
    seen += terminal.expect("wrote.*\n") + terminal.expect("> ")
    terminal.send("\x04")
    assert terminal.wait() == 0 and "\x1b" not in seen + terminal.seen
    terminal.close()


def test_an_edited_message_begins_with_its_text(
    command_line: list[str], environment: dict[str, str], tmp_path: Path
) -> None:
    extra = {"TERM": "xterm", "NO_COLOR": "1", "PROMPT_TOOLKIT_NO_CPR": "1"}
    terminal = Terminal([*command_line, "chat", "-n", "3", "--session", "trip"], environment | extra)
    terminal.expect(READY)
    for text in ("What is the capital of France?", "And of Japan?"):
        terminal.send(f"{text}\r")
        terminal.expect(r"reused .* state .*\n"), terminal.expect(READY)
    terminal.send("/edit 1\r")
    terminal.expect(READY)
    terminal.send("\x7f" * len("France?") + "Italy?\r")
    terminal.expect(r"you changed turn 1\).*\n"), terminal.expect(READY)
    for given_up in ("\x03", "\x15\r"):  # Ctrl-C, or all deleted
        terminal.send("/edit\r")
        terminal.expect(READY)
        terminal.send(given_up)
        terminal.expect(READY)
    terminal.send("/quit\r")
    assert terminal.wait() == 0
    terminal.close()
    turns = mlxlin.SessionStore(tmp_path / "home" / "sessions").record("trip")["turns"]
    assert [turn["content"] for turn in turns[::2]] == ["What is the capital of Italy?"]
