"""`mlxlin chat` through a pipe: turns, commands, interruptions, no escape codes."""

from __future__ import annotations

import os
import re
import signal

import pytest
from mlxlin_cli import lines

import mlxlin

USER, ASSISTANT = "user", "assistant"


def contents(call) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in call[0]]


def test_b63_a_piped_conversation_has_no_escape_codes_and_ends_cleanly(cli, fakes) -> None:
    result = cli("chat", input="hi\nand now?\n")
    assert result.code == 0 and "\x1b" not in result.out + result.err
    assert result.out == "Hello world.\nHello world.\n"
    assert len(result.err.splitlines()) == 2


def test_every_turn_reads_what_was_said_before(cli, fakes) -> None:
    cli("chat", "--system", "Be brief.", input="hi\nand now?")
    assert contents(fakes.streams[1]) == [
        ("system", "Be brief."),
        (USER, "hi"),
        (ASSISTANT, "Hello world."),
        (USER, "and now?"),
    ]


def test_the_cost_of_every_reply_is_told(cli, fakes) -> None:
    line = cli("chat", input="hi\n").err
    assert line == "read 2 at 1,234/s · wrote 3 at 56.7/s · state 1 MB\n"


def test_empty_input_is_no_message(cli, fakes) -> None:
    assert cli("chat", input="").code == 0
    assert cli("chat", input="\n  \n\n").code == 0
    assert not fakes.streams


@pytest.mark.parametrize(
    ("input", "message"),
    [
        ("one \\\ntwo\n", "one \ntwo"),
        ('"""one\n\ntwo"""\n', "one\n\ntwo"),
        ('"""\none\ntwo\n"""\n', "one\ntwo"),
        ("ends with a backslash\\", "ends with a backslash"),
        ("\xe4\xf6\n".encode("latin-1"), "��"),
        ("/usr/bin is what?\n", "/usr/bin is what?"),
        ("// comment\n", "// comment"),
    ],
)
def test_messages_of_several_lines(cli, fakes, input: str | bytes, message: str) -> None:
    cli("chat", input=input)
    assert contents(fakes.streams[0]) == [(USER, message)]


def test_quit_leaves_and_the_rest_is_not_read(cli, fakes) -> None:
    assert cli("chat", input="hi\n/quit\nmore\n").code == 0
    assert len(fakes.streams) == 1


def test_help_lists_what_exists(cli, fakes) -> None:
    listed = [line.split()[0] for line in cli("chat", input="/help\n").err.splitlines()]
    from mlxlin_cli.commands import COMMANDS

    assert listed == [f"/{name}" for name in COMMANDS]


def test_undo_and_retry(cli, fakes) -> None:
    result = cli("chat", input="one\ntwo\n/undo\nthree\n/retry\n/undo\n/undo\n/undo\n")
    assert [contents(call)[-1][1] for call in fakes.streams] == ["one", "two", "three", "three"]
    assert (
        contents(fakes.streams[3])
        == contents(fakes.streams[2])
        == [
            (USER, "one"),
            (ASSISTANT, "Hello world."),
            (USER, "three"),
        ]
    )
    assert "Taken back: two" in result.err and "nothing to take back" in result.err


def test_clear_keeps_the_system_prompt(cli, fakes) -> None:
    cli("chat", input="/system Be kind.\nhi\n/clear\nhello\n")
    assert contents(fakes.streams[1]) == [("system", "Be kind."), (USER, "hello")]


def test_set_changes_the_next_replies(cli, fakes) -> None:
    result = cli("chat", "--temp", "0.3", input="/set\n/set temp 0\n/set top-k 5\nhi\n")
    options = fakes.streams[0][1]
    assert (options["temperature"], options["top_k"]) == (0.0, 5)
    assert "temp              0.3" in result.err and "top-p             0.9" in result.err


@pytest.mark.parametrize(
    "line",
    [
        "/set temp warm",
        "/set colour 1",
        "/set top-p 7",
        "/nothing",
        "/retry",
        "/edit 1 x",
        "/fork",
        "/save",
        "/load",
        "/load x",
    ],
)
def test_a_wrong_command_in_a_pipe_ends_it_with_two_lines(cli, fakes, line: str) -> None:
    result = cli("chat", input=f"{line}\nhi\n")
    assert result.code == 1 and len(result.err.splitlines()) in (1, 2) and result.err.startswith("Error: ")
    assert not fakes.streams


def test_each_reply_has_its_own_seed_under_a_given_one(cli, fakes) -> None:
    cli("chat", "--seed", "0", input="one\ntwo\n/retry\n")
    assert [options["seed"] for _, options in fakes.streams] == [0, 1, 2]


def test_an_interrupted_reply_stays_as_far_as_it_came(cli, fakes) -> None:
    def interrupt(number: int) -> None:
        if number == 1 and len(fakes.streams) == 1:
            os.kill(os.getpid(), signal.SIGINT)

    fakes.before_piece = interrupt
    result = cli("chat", input="one\ntwo\n")
    assert result.code == 0
    assert result.err.splitlines()[0] == "Stopped after 2 tokens."
    assert contents(fakes.streams[1]) == [(USER, "one"), (ASSISTANT, "Hello world"), (USER, "two")]


def test_an_interruption_while_reading_forgets_the_message(cli, fakes) -> None:
    plain = fakes.tokenizer.chat

    def interrupt(messages, **options):
        if len(fakes.streams) == 1 and messages[-1]["content"] == "one":
            os.kill(os.getpid(), signal.SIGINT)
        return plain(messages, **options)

    fakes.tokenizer.chat = interrupt
    result = cli("chat", input="one\ntwo\n")
    assert result.err.splitlines()[0] == "Stopped after 0 tokens."
    assert contents(fakes.streams[-1]) == [(USER, "two")]


def test_thoughts_are_kept_beside_the_answer(cli, fakes) -> None:
    fakes.say = lambda prompt: ["<think>", "Hm.", "</think>", "Paris."]
    cli("chat", "--think", input="one\ntwo\n")
    assert fakes.streams[1][0][1] == {"role": "assistant", "content": "Paris.", "reasoning_content": "Hm."}


def test_a_failed_reply_leaves_the_conversation_as_it_was(cli, fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(number: int) -> None:
        if number == 1:
            raise mlxlin.NumericsError("Not finite.", "Try --dtype float32.")

    fakes.before_piece = fail
    result = cli("chat", input="one\n")
    assert result.code == 1 and result.err.endswith("Error: Not finite.\nHint: Try --dtype float32.\n")


def test_the_history_is_private(tmp_path) -> None:
    path = tmp_path / "state" / "chat-history"
    history = lines.open_history(path)
    history.store_string("a secret")
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    assert list(lines.open_history(path).load_history_strings()) == ["a secret"]


def test_a_history_that_cannot_be_written_is_told_and_kept_in_memory(tmp_path, capsys) -> None:
    (tmp_path / "state").write_text("a file")
    history = lines.open_history(tmp_path / "state" / "chat-history")
    history.store_string("x")
    assert "history is not kept" in capsys.readouterr().err


def test_edit_goes_on_from_an_earlier_message(cli, fakes) -> None:
    cli("chat", input="one\ntwo\nthree\n/edit 2 zwei\n/edit drei\n")
    assert [content for _, content in contents(fakes.streams[3]) if content != "Hello world."] == ["one", "zwei"]
    assert [content for _, content in contents(fakes.streams[4]) if content != "Hello world."] == ["one", "drei"]


def test_a_fork_is_a_place_to_return_to(cli, fakes) -> None:
    cli("chat", input="one\n/fork here\ntwo\n/load here\nthree\n/load here\nfour\n")
    for call, last in ((2, "three"), (3, "four")):
        assert [content for _, content in contents(fakes.streams[call]) if content != "Hello world."] == ["one", last]


def test_a_session_goes_on_where_it_was(cli, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXLIN_HOME", str(tmp_path))
    first = cli(
        "chat", "-n", "3", "--session", "trip", "--system", "Be brief.", input="What is the capital of France?\n"
    )
    assert first.code == 0 and first.err.endswith("Saved as 'trip'.\n")
    again = cli("chat", "-n", "3", "--session", "trip", input="And of Italy?\n")
    assert "everything read so far" in again.err.splitlines()[0]
    assert "trip" in cli("sessions").out
    shown = cli("sessions", "show", "trip").out
    assert shown.startswith("system: Be brief.\nuser: What is the capital of France?\nassistant: ")
    assert "user: And of Italy?" in shown
    refused = cli("chat", "--session", "trip", "-q", "8", input="hi\n")
    assert refused.code == 1 and "another model or quantisation" in refused.err and len(refused.err.splitlines()) == 2
    assert cli("chat", "--session", "trip", "--from-text", "-q", "8", "-n", "3", input="hi\n").code == 0
    assert cli("sessions", "rm", "trip").code == 2
    assert cli("sessions", "rm", "trip", "--yes").code == 0 and "No conversation" in cli("sessions").err
    assert cli("sessions", "show", "trip").code == 1


def test_undo_and_retry_read_next_to_nothing_again(cli, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXLIN_HOME", str(tmp_path))
    result = cli(
        "chat", "-n", "3", "--temp", "0", input="What is a cat?\nWhat is a dog?\n/retry\n/undo\nWhat is a cow?\n"
    )
    lines = result.err.splitlines()
    assert re.match(r"reused (\d+) of \d+ \(checkpoint .*\) · read [1-3] ", lines[2])
    assert re.match(r"reused [1-9]\d* of \d+ \(checkpoint before turn 2; you changed turn 2\)", lines[4])
