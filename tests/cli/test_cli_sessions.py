"""Saved conversations from the command line: begun, continued, refused, failed, killed, listed and removed."""

from __future__ import annotations

import errno
import os
import random
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

import mlxlin
from mlxlin import archive
from tests.cli.conftest import Script

SESSION = ["chat", "--session", "trip"]


def costs(result: Any) -> list[str]:
    return [line for line in result.err.splitlines() if line.startswith("reused")]


def said(script: Script, number: int) -> list[str]:
    return [text for role, text in script.messages(number) if role == "user"]


def test_b48_a_session_goes_on_where_it_was(cli, script) -> None:
    first = cli(*SESSION, "--system", "Be brief.", input="one\ntwo\n")
    known = script.model.read
    second = cli(*SESSION, input="three\n")
    assert first.code == second.code == 0
    assert script.messages(2)[0] == ("system", "Be brief.") and said(script, 2) == ["one", "two", "three"]
    (cost,) = costs(second)
    match = re.match(r"reused (\d+) of (\d+) tokens \(everything read so far\) · read (\d+) ", cost)
    assert match is not None
    reused, total, read = map(int, match.groups())
    assert reused == known and read == total - reused < 20
    assert script.model.read == known + read + len("Hello world.") + 1


def test_a_continued_session_says_what_an_unbroken_chat_says(cli, script) -> None:
    texts = ["one", "two", "/retry", "three", "/undo", "four"]
    options = ["--seed", "7", "--temp", "1.5", "--logit-bias", "5:-inf", "-n", "12"]
    script.model.scripted = False
    whole = cli("chat", *options, input="\n".join(texts))
    parts = [cli(*SESSION, *options, input="one\ntwo\n")]
    parts += [cli(*SESSION, "-n", "12", input=text) for text in texts[2:]]  # what was set is saved
    assert "".join(part.out for part in parts) == whole.out and len(set(whole.out.splitlines())) > 3
    assert [line.split(" · ")[0] for part in parts for line in costs(part)] == [
        line.split(" · ")[0] for line in costs(whole)
    ]


def test_options_given_win_over_those_saved(cli, script) -> None:
    cli(*SESSION, "--temp", "0.5", "--top-k", "7", input="one\n")
    cli(*SESSION, "--temp", "0", input="two\n/set temp 0.25\n")
    cli(*SESSION, input="three\n")
    chosen = [(options["temperature"], options["top_k"]) for _, options in script.asked]
    assert chosen == [(0.5, 7), (0.0, 7), (0.25, 7)]


def test_branches_are_saved(cli, script) -> None:
    cli(*SESSION, input="one\n/fork\ntwo\n/fork 1\nthree\n")
    result = cli(*SESSION, input="/fork list\nfour\n/fork 2\nfive\n")
    assert result.err.splitlines()[:2] == ["* 1  2 turns  three", "  2  2 turns  two"]
    assert said(script, 3) == ["one", "three", "four"] and said(script, 4) == ["one", "two", "five"]
    assert "you changed turn 2" in costs(result)[1], "what both branches share is not read again"


def test_another_model_is_refused_unless_the_text_is_asked_for(cli, script, tmp_path: Path) -> None:
    cli(*SESSION, input="one\n")
    before = mlxlin.SessionStore().path("trip").read_bytes()
    script.think()  # another chat template
    refused = cli(*SESSION, input="two\n")
    assert refused.code == 1 and len(script.asked) == 1
    assert "saved with another tokenizer or chat template" in refused.err and "--from-text" in refused.err
    assert mlxlin.SessionStore().path("trip").read_bytes() == before
    script.replies = ["</think>yes"]
    again = cli(*SESSION, "--from-text", input="two\n")
    assert again.code == 0 and said(script, 1) == ["one", "two"] and "(nothing was read before)" in again.err
    assert "(checkpoint before" in cli(*SESSION, input="three\n").err
    assert cli("chat", "--from-text").code == cli("chat", "--session", "").code == 2


def test_b42_a_damaged_session_is_refused_and_its_text_is_not_lost(cli, script) -> None:
    cli(*SESSION, input="one\n")
    path = mlxlin.SessionStore().path("trip")
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    refused = cli(*SESSION, input="two\n")
    assert refused.code == 1 and "damaged: its checksum does not fit" in refused.err and "--from-text" in refused.err
    assert cli("sessions", "show", "trip").out == "user: one\nassistant: Hello world.\n"
    assert cli(*SESSION, "--from-text", input="two\n").code == 0 and said(script, 1) == ["one", "two"]
    path.write_bytes(path.read_bytes()[:100])
    assert re.search(r"trip +\d{4}-\d\d-\d\d \d\d:\d\d +damaged", cli("sessions").out)
    assert cli("sessions", "show", "trip").code == 1 and cli("sessions", "rm", "trip", "--yes").code == 0


def test_b42_a_state_that_is_not_finite_is_not_saved_over_a_good_one(
    cli, script, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli(*SESSION, input="one\n")
    before = mlxlin.SessionStore().path("trip").read_bytes()
    monkeypatch.setattr(archive, "_not_finite", lambda arrays: "live.layers.0.S" if len(script.asked) > 1 else "")
    result = cli(*SESSION, input="two\nthree\n")
    assert said(script, 2) == ["one", "two", "three"], "the chat goes on"
    assert result.code == 1 and result.err.count("Error: 'live.layers.0.S' holds numbers that are not finite") == 3
    assert mlxlin.SessionStore().path("trip").read_bytes() == before


def test_b10_a_full_disk_is_a_message_and_the_chat_goes_on(cli, script, monkeypatch: pytest.MonkeyPatch) -> None:
    cli(*SESSION, input="one\n")
    replace = os.replace

    def full(source: Any, target: Any) -> None:
        if len(script.asked) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", full)
    result = cli(*SESSION, input="two\nthree\n")
    assert result.err.count("Error: ") == 1 and "could not be saved: No space left on device" in result.err
    assert result.code == 0, "the next save was whole"
    assert len(mlxlin.SessionStore().record("trip")["turns"]) == 6


def test_save_and_load_in_a_chat(cli, script) -> None:
    result = cli("chat", input="one\n/save a\ntwo\n/save b\nthree\n/load a\nfour\n")
    assert result.code == 0 and said(script, 3) == ["one", "two", "four"]
    assert "Saved as 'a'" in result.err and "Session 'a': 2 turns." in result.err
    store = mlxlin.SessionStore()
    assert [len(store.record(name)["turns"]) // 2 for name in ("a", "b")] == [3, 3]
    for line, words in (("/load b", "would be lost"), ("/save b", "There is a session 'b' already")):
        refused = cli("chat", input=f"hi\n{line}\n")
        assert refused.code == 1 and words in refused.err
    refused = cli("chat", input="/load c\nhi\n")
    assert refused.code == 1 and "There is no session 'c'" in refused.err and "'a'" in refused.err
    script.think()
    script.replies = ["</think>yes"]
    assert cli("chat", input="/load a text\nfive\n").code == 0 and said(script, -1)[-2:] == ["four", "five"]


def test_two_chats_do_not_share_a_session(cli, script) -> None:
    cli(*SESSION, input="one\n")
    claim = mlxlin.SessionStore().claim("trip")
    for arguments, text in ((SESSION, "two\n"), (["chat"], "/load trip\n"), (["sessions", "rm", "trip", "-y"], "")):
        refused = cli(*arguments, input=text)
        assert refused.code == 1 and "open in another chat" in refused.err
    claim.release()
    assert cli(*SESSION, input="two\n").code == 0


def test_a_session_without_a_word_is_none(cli, script) -> None:
    assert cli(*SESSION, input="/stats\n").code == 0
    assert cli("sessions").err.startswith("No conversation is saved")
    assert not list(mlxlin.SessionStore().folder.iterdir())


def test_sessions_are_listed_shown_and_removed(cli, script) -> None:
    cli(*SESSION, "--system", "Be brief.", "-m", "x", "-q", "4", input="one\ntwo\n")
    head, row = cli("sessions", "list").out.splitlines()
    assert head.split() == ["session", "saved", "turns", "model", "size"]
    assert re.fullmatch(r"trip +\d{4}-\d\d-\d\d \d\d:\d\d +2 +x -q 4 +[\d.]+ kB", row)
    assert cli("sessions").out.splitlines()[1] == row
    shown = cli("sessions", "show", "trip").out.splitlines()
    assert shown[:2] == ["system: Be brief.", "user: one"] and len(shown) == 5
    assert cli("sessions", "rm", "trip").code == 2
    assert cli("sessions", "rm", "trip", "--yes").err == "Deleted 'trip'.\n"
    for arguments in (["show", "trip"], ["rm", "trip"]):
        result = cli("sessions", *arguments)
        assert result.code == 1 and "There is no session 'trip'" in result.err


def start(command: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=subprocess.DEVNULL, stderr=pipe, text=True, env=environment)


def test_a_killed_chat_leaves_the_last_whole_session(
    command_line: list[str], environment: dict[str, str], tmp_path: Path
) -> None:
    """The real command and the shipped model, killed at random points of saving after every line."""
    rng, store = random.Random(0), mlxlin.SessionStore(tmp_path / "home" / "sessions")
    before = 0
    for _ in range(3):
        process = start([*command_line, "chat", "--session", "trip", "-n", "1"], environment)
        assert process.stdin is not None and process.stderr is not None
        process.stdin.write("hi\n" * 40)
        process.stdin.flush()
        assert process.stderr.readline().startswith("reused"), "a first reply, with a save behind it"
        time.sleep(rng.random() * 0.5)
        process.send_signal(signal.SIGKILL)
        _, err = process.communicate()
        turns = len(store.load("trip")[1]["turns"]) // 2 if store.exists("trip") else 0
        replies = 1 + err.count("reused")
        assert before + replies - 1 <= turns <= before + replies, "all replies are saved but the last one at most"
        before = turns
    done = start([*command_line, "chat", "--session", "trip", "-n", "1"], environment)
    _, err = done.communicate("hi\n", timeout=60)
    assert before and done.returncode == 0 and "(everything read so far)" in err
    assert len(store.load("trip")[1]["turns"]) // 2 == before + 1


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_closed_terminal_saves(
    command_line: list[str], environment: dict[str, str], tmp_path: Path, number: signal.Signals
) -> None:
    process = start([*command_line, "chat", "--session", "trip", "-n", "2"], environment)
    assert process.stdin is not None and process.stderr is not None
    process.stdin.write("hi\n/set temp 0.125\n/undo\n")
    process.stdin.flush()
    while "Taken back" not in (line := process.stderr.readline()):
        assert line
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number and "Traceback" not in err
    record = mlxlin.SessionStore(tmp_path / "home" / "sessions").record("trip")
    assert record["turns"] == [] and record["options"]["temperature"] == 0.125
