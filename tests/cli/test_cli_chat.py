"""`mlxlin chat` through a pipe: turns, commands, interruptions, what is told, no escape codes."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

import mlxlin
from mlxlin_cli import lines

USER, ASSISTANT, HELLO = "user", "assistant", "Hello world."


def said(script, number: int) -> list[str]:
    """What the person had said at reply `number`, from 0."""
    return [text for role, text in script.messages(number) if role == USER]


def figures(line: str) -> tuple[int, int, int]:
    """Reused tokens, tokens of the prompt, tokens read, from the line behind a reply."""
    match = re.match(r"reused ([\d,]+) of ([\d,]+) tokens \(.*\) · read ([\d,]+) ", line)
    assert match is not None, line
    reused, total, read = (int(figure.replace(",", "")) for figure in match.groups())
    return reused, total, read


def test_b63_a_piped_conversation_has_no_escape_codes_and_ends_cleanly(cli, script) -> None:
    result = cli("chat", input="hi\nand now?\n")
    assert result.code == 0 and "\x1b" not in result.out + result.err
    assert result.out == f"{HELLO}\n{HELLO}\n"
    assert len(result.err.splitlines()) == 2


def test_every_turn_reads_what_was_said_before(cli, script) -> None:
    cli("chat", "--system", "Be brief.", input="hi\nand now?")
    assert script.messages(1) == [("system", "Be brief."), (USER, "hi"), (ASSISTANT, HELLO), (USER, "and now?")]


def test_the_cost_of_every_reply_is_told(cli, script) -> None:
    first, second = cli("chat", input="hi\nand now?\n").err.splitlines()
    form = r"reused {} of \d+ tokens \({}\) · read \d+ at [\d.,]+/s · wrote 13 at [\d.,]+/s · state [\d.]+ kB"
    assert re.fullmatch(form.format(0, "nothing was read before"), first)
    assert re.fullmatch(form.format(r"\d+", "everything read so far"), second)
    reused, total, read = figures(second)
    assert reused == figures(first)[1] + len(HELLO) + 1 and read == total - reused


def test_b17_a_template_that_drops_thoughts_costs_the_last_reply_and_says_so(cli, script) -> None:
    script.think()
    script.replies = [f"let me see {n}\n</think>\n\nIt is {n}." for n in range(3)]
    result = cli("chat", input="one\ntwo\nthree\n")
    assert result.out == "It is 0.\nIt is 1.\nIt is 2.\n"
    costs = [line for line in result.err.splitlines() if line.startswith("reused")]
    for turn in (1, 2):
        why = f"(checkpoint before the reply of turn {turn}; the template rewrote the reply of turn {turn})"
        assert why in costs[turn] and figures(costs[turn])[2] < 40
    assert script.asked[2][0][1] == {"role": ASSISTANT, "content": "It is 0.", "reasoning_content": "let me see 0"}


def test_empty_input_is_no_message(cli, script) -> None:
    assert cli("chat", input="").code == 0
    assert cli("chat", input="\n  \n\n").code == 0
    assert not script.asked


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
def test_messages_of_several_lines(cli, script, input: str | bytes, message: str) -> None:
    cli("chat", input=input)
    assert script.messages(0) == [(USER, message)]


def test_quit_leaves_and_the_rest_is_not_read(cli, script) -> None:
    assert cli("chat", input="hi\n/quit\nmore\n").code == 0
    assert len(script.asked) == 1


def test_help_lists_what_exists(cli, script) -> None:
    listed = [line.split()[0] for line in cli("chat", input="/help\n").err.splitlines()]
    from mlxlin_cli.commands import COMMANDS

    assert listed == [f"/{name}" for name in COMMANDS]


def test_undo_and_retry(cli, script) -> None:
    result = cli("chat", input="one\ntwo\n/undo\nthree\n/retry\n/undo\n/undo\n/undo\n")
    assert [said(script, number) for number in range(4)] == [
        ["one"],
        ["one", "two"],
        ["one", "three"],
        ["one", "three"],
    ]
    assert "Taken back: two" in result.err and "nothing to take back" in result.err
    costs = [line for line in result.err.splitlines() if line.startswith("reused")]
    assert "you changed turn 2" in costs[2] and figures(costs[2])[2] < 20
    assert "you changed the reply of turn 2" in costs[3] and figures(costs[3])[2] == 1


def test_edit_goes_on_from_an_earlier_message(cli, script) -> None:
    cli("chat", input="one\ntwo\nthree\n/edit 2 zwei\n/edit drei\n")
    assert said(script, 3) == ["one", "zwei"] and said(script, 4) == ["one", "drei"]


def test_clear_keeps_the_system_prompt(cli, script) -> None:
    cli("chat", input="/system Be kind.\nhi\n/clear\nhello\n")
    assert script.messages(1) == [("system", "Be kind."), (USER, "hello")]


def test_branches_go_their_own_ways_from_what_they_share(cli, script) -> None:
    result = cli("chat", input="one\n/fork\ntwo\n/fork 1\nthree\n/fork 2\nfour\n/fork list\n")
    assert [said(script, number) for number in (1, 2, 3)] == [["one", "two"], ["one", "three"], ["one", "two", "four"]]
    assert result.err.splitlines()[-2:] == ["  1  2 turns  three", "* 2  3 turns  four"]
    costs = [line for line in result.err.splitlines() if line.startswith("reused")]
    assert all("(everything read so far)" in cost for cost in costs[1:])


def test_a_shared_system_prompt_is_read_once_per_machine(cli, script, tmp_path: Path) -> None:
    (tmp_path / "system").write_text("You answer in one word. " * 10)
    first, second = (cli("chat", "--system-file", str(tmp_path / "system"), input=text).err for text in ("hi", "yes"))
    assert "(nothing was read before)" in first and "(stored earlier on this machine)" in second
    assert figures(second)[0] > 200 and figures(second)[2] < 20


def test_set_changes_the_next_replies(cli, script) -> None:
    result = cli("chat", "--temp", "0.3", input="/set\n/set temp 0\n/set top-k 5\nhi\n")
    options = script.asked[0][1]
    assert (options["temperature"], options["top_k"]) == (0.0, 5)
    assert "temp              0.3" in result.err and "top-p             0.9" in result.err


def test_stats_tell_what_is_held(cli, script) -> None:
    result = cli("chat", input="one\n/stats\n/fork\n/stats\n")
    rows = [re.split(r"  +", line, maxsplit=1) for line in result.err.splitlines() if not line.startswith("reused")]
    before, after = dict(rows[:10]), dict(rows[-10:])
    assert after["session"] == "not saved" and after["branch"] == "2 of 2" and after["turns"] == "1"
    assert re.fullmatch(r"\d+ of 4,096 tokens", after["read"]) and re.fullmatch(r"[\d.]+ kB", after["state"])
    assert after["last reply"].startswith("reused 0 of ")
    assert before["held in all"] == after["held in all"], "a branch costs nothing until it goes on"
    limits = [re.fullmatch(r"3, [\d.]+ kB of at most ([\d.]+) ([MG]B)", r["checkpoints"]) for r in (before, after)]
    whole, half = (float(m[1]) * {"MB": 1, "GB": 1000}[m[2]] for m in limits if m)
    assert half == pytest.approx(whole / 2, rel=0.02), "and all branches keep to one budget"


@pytest.mark.parametrize(
    "line",
    [
        *["/set temp warm", "/set colour 1", "/set top-p 7", "/nothing", "/retry", "/edit 1 x", "/edit", "/fork 2"],
        *["/fork x", "/save", "/save a/b", "/load", "/load x"],
    ],
)
def test_a_wrong_command_in_a_pipe_ends_it_with_two_lines(cli, script, line: str) -> None:
    result = cli("chat", input=f"{line}\nhi\n")
    assert result.code == 1 and len(result.err.splitlines()) in (1, 2) and result.err.startswith("Error: ")
    assert not script.asked


def test_before_the_first_message_there_is_nothing_to_edit(cli, script) -> None:
    assert "There is nothing to edit." in cli("chat", input="/edit 9 x\n").err


def test_an_edit_without_text_needs_a_terminal(cli, script) -> None:
    result = cli("chat", input="one\n/edit 1\n")
    assert result.code == 1 and result.err.endswith("Hint: Say /edit TURN TEXT.\n")


def test_each_reply_has_its_own_seed_under_a_given_one(cli, script) -> None:
    cli("chat", "--seed", "0", input="one\ntwo\n/retry\n")
    assert [options["seed"] for _, options in script.asked] == [0, 1, 2]


def test_an_interrupted_reply_stays_as_far_as_it_came(cli, script) -> None:
    def interrupt(token: int) -> None:
        if token == 3 and len(script.asked) == 1:
            os.kill(os.getpid(), signal.SIGINT)

    script.model.before = interrupt
    result = cli("chat", input="one\ntwo\n")
    assert result.code == 0
    assert result.err.splitlines()[0] == "Stopped after 3 tokens."
    assert script.messages(1) == [(USER, "one"), (ASSISTANT, "Hel"), (USER, "two")]
    assert "(everything read so far)" in result.err.splitlines()[1]


def test_an_interruption_while_reading_forgets_the_message(cli, script, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = mlxlin.Timeline.resume

    def interrupt(*args, **options):
        if len(script.asked) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return plain(*args, **options)

    monkeypatch.setattr(mlxlin.Timeline, "resume", interrupt)
    result = cli("chat", input="one\ntwo\nthree\n")
    assert result.err.splitlines()[1] == "Stopped after 0 tokens."
    assert said(script, 2) == ["one", "three"]


@pytest.mark.parametrize("command", ["/retry", "/edit 1 changed"])
def test_what_is_taken_back_returns_where_there_is_no_reply(
    cli, script, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    plain = mlxlin.Timeline.resume

    def interrupt(*args, **options):
        if len(script.asked) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return plain(*args, **options)

    monkeypatch.setattr(mlxlin.Timeline, "resume", interrupt)
    cli("chat", input=f"one\ntwo\n{command}\nthree\n")
    assert said(script, 3) == ["one", "two", "three"]


def test_a_second_interruption_ends_a_pipe(cli, script) -> None:
    def interrupt(token: int) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    script.model.before = interrupt
    result = cli("chat", input="one\ntwo\n")
    assert (result.code, result.err) == (130, "Interrupted.\n")


def test_a_failed_reply_leaves_the_conversation_as_it_was(cli, script) -> None:
    script.replies = ["one", [72, -1]]
    result = cli("chat", input="hi\nthere\n")
    assert result.code == 1 and result.err.splitlines()[1].startswith("Error: The logits for token 2 are not finite")


def test_what_does_not_fit_is_refused_before_it_is_read(cli, script, monkeypatch: pytest.MonkeyPatch) -> None:
    result = cli("chat", "--context", "60", input=f"hi\n{'x' * 100}\n")
    assert result.code == 1 and "the context ends at 60." in result.err.splitlines()[1]
    read = script.model.read
    monkeypatch.setattr("mlxlin.memory.available_bytes", lambda: 10_000)
    result = cli("chat", input="hi\n")
    assert result.code == 1 and "needs" in result.err and len(result.err.splitlines()) == 2
    assert script.model.read == read < 60


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
