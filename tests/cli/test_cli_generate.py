"""`mlxlin generate`: where the prompt comes from, which options reach the library, what is printed where."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import mlxlin

OBJECT = {
    "text",
    "prompt_tokens",
    "reused_tokens",
    "reuse",
    "generated_tokens",
    "finish_reason",
    "prefill_tps",
    "decode_tps",
    "state_bytes",
    "peak_memory_bytes",
    "model",
    "device",
    "path",
}


def asked(script) -> tuple[Any, dict[str, Any]]:
    (call,) = script.asked
    return call


def test_text_to_standard_output_and_nothing_else(cli, script) -> None:
    result = cli("generate", "hi")
    assert (result.code, result.out, result.err) == (0, "Hello world.\n", "")


@pytest.mark.parametrize(
    ("arguments", "input"), [(["hi"], None), (["-"], "hi\n"), ([], "hi\n"), ([], "hi"), (["-"], "hi\r\n")]
)
def test_the_prompt_comes_from_the_argument_or_a_pipe(cli, script, arguments: list[str], input: str | None) -> None:
    assert cli("generate", *arguments, input=input).code == 0
    assert asked(script)[0] == [{"role": "user", "content": "hi"}]


def test_only_the_last_line_end_is_cut(cli, script) -> None:
    cli("generate", "--raw", input="a\n\n")
    assert asked(script)[0] == "a\n"


@pytest.mark.parametrize("input", ["", "\n", "  \n"])
@pytest.mark.parametrize("arguments", [["-"], []])
def test_an_empty_prompt_is_two_lines(cli, script, arguments: list[str], input: str) -> None:
    result = cli("generate", *arguments, input=input)
    assert result.code == 1 and result.out == "" and not script.loads
    assert [line.split(":")[0] for line in result.err.splitlines()] == ["Error", "Hint"]


def test_bytes_that_are_no_text_are_two_lines(cli, script) -> None:
    result = cli("generate", input=b"\xff\xfe\x00")
    assert result.code == 1 and "not UTF-8" in result.err and len(result.err.splitlines()) == 2


def test_options_reach_the_library_and_only_those_given(cli, script) -> None:
    script.think()
    cli("generate", "hi")
    assert set(asked(script)[1]) == {"max_tokens", "stop", "think", "logprobs", "context", "progress"}
    script.asked.clear()
    cli(
        *["generate", "hi", "-n", "7", "--temp", "0.5", "--top-p", "0.8", "--top-k", "40", "--min-p", "0.1"],
        *["--repeat-penalty", "1.1", "--presence-penalty", "0.2", "--logit-bias", "5:-100", "--logit-bias", "6:2.5"],
        *["--seed", "3", "--stop", "END", "--stop", "\n\n", "--think", "--context", "500", "--system", "Be brief."],
    )
    prompt, options = asked(script)
    assert prompt == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    options.pop("progress")
    assert options == {
        "max_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.8,
        "top_k": 40,
        "min_p": 0.1,
        "repeat_penalty": 1.1,
        "presence_penalty": 0.2,
        "logit_bias": {5: -100.0, 6: 2.5},
        "seed": 3,
        "stop": ("END", "\n\n"),
        "think": True,
        "context": 500,
        "logprobs": None,
    }


def test_b67_seed_zero_is_a_seed(cli, script) -> None:
    cli("generate", "hi", "--seed", "0", "--temp", "0", "--top-k", "0")
    options = asked(script)[1]
    assert (options["seed"], options["temperature"], options["top_k"]) == (0, 0.0, 0)


def test_b67_no_tokens_print_nothing(cli, script) -> None:
    result = cli("generate", "hi", "-n", "0")
    assert (result.code, result.out, result.err) == (0, "", "")


def test_json_is_one_object(cli, script) -> None:
    result = cli("generate", "hi", "--json")
    found = json.loads(result.out)
    assert set(found) == OBJECT and result.out.count("\n") == 1 and result.err == ""
    assert found["text"] == "Hello world." and found["finish_reason"] == "stop"
    assert found["generated_tokens"] == len("Hello world.") + 1 and found["model"] == "demo"
    assert found["device"] == mlxlin.describe_backend()["device"]
    assert (found["reused_tokens"], found["reuse"]) == (0, "nothing was read before")


def test_json_with_log_probabilities(cli, script) -> None:
    found = json.loads(cli("generate", "hi", "--json", "--logprobs", "1").out)
    assert set(found) == OBJECT | {"logprobs"}
    assert [token["text"] for token in found["logprobs"]] == list("Hello world.")
    token = found["logprobs"][1]
    assert token["top"] == [{key: token[key] for key in ("token", "text", "logprob")}]
    assert asked(script)[1]["logprobs"] == 1


def test_thoughts_go_to_standard_error(cli, script) -> None:
    script.think()
    script.replies = ["\nHm.\n</think>\n\nParis."] * 3
    shown = cli("generate", "hi", "--think")
    assert shown.out == "Paris.\n" and shown.err == "Hm.\n\n"
    hidden = cli("generate", "hi", "--think", "--hide-thinking")
    assert hidden.out == "Paris.\n" and hidden.err == ""
    found = json.loads(cli("generate", "hi", "--think", "--json").out)
    assert found["text"] == "Paris." and found["thinking"] == "Hm.\n"


def test_a_system_prompt_is_read_once_on_a_machine(cli, script, tmp_path: Path) -> None:
    path = tmp_path / "system.txt"
    path.write_text("You answer in one word. " * 10 + "\n")
    first, second = (
        json.loads(cli("generate", question, "--json", *arguments).out)
        for question, arguments in (
            ("first question", ["--system-file", str(path)]),
            ("another", ["--system", path.read_text().strip()]),
        )
    )
    assert first["reused_tokens"] == 0 and first["reuse"] == "nothing was read before"
    assert second["reused_tokens"] > 200 and second["reuse"] == "stored earlier on this machine"
    assert first["text"] == second["text"] == "Hello world."


def test_a_system_prompt_is_said_once(cli, script, tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"\xff\xfe")
    assert cli("generate", "hi", "--system", "x", "--system-file", "y").code == 2
    for path, words in ((tmp_path / "none", "No such file"), (tmp_path / "latin", "cannot be read")):
        result = cli("generate", "hi", "--system-file", str(path))
        assert result.code == 1 and words in result.err and not script.asked


@pytest.mark.parametrize(
    "arguments",
    [["--raw", "--system", "x"], ["--raw", "--think"], ["--logprobs", "2"], ["--logit-bias", "5"], ["--context", "0"]],
)
def test_what_cannot_be_honoured_is_wrong_usage(cli, script, arguments: list[str]) -> None:
    assert cli("generate", "hi", *arguments).code == 2


def test_memory_is_checked_before_it_runs_out(cli, script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxlin.memory.available_bytes", lambda: 10_000)
    for arguments, tokens in (([], "266"), (["-n", "1000000000"], "4,096"), (["--context", "99"], "99")):
        result = cli("generate", "hi", *arguments)
        assert result.code == 1 and not script.asked
        assert f"A context of {tokens} tokens needs" in result.err


def test_notices_of_the_library_are_told(cli, script, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(source: str, *, notice: Any, **options: Any) -> Any:
        notice("The model stays quantised.")
        return script.load(source, **options)

    monkeypatch.setitem(mlxlin.__dict__, "load", load)
    assert cli("generate", "hi").err == "Note: The model stays quantised.\n"
