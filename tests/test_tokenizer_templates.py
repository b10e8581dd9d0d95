"""Chat templates: the texts transformers renders, stored beside the templates, and the faults people have reported."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from mlxlin.errors import InputError, TokenizerError
from mlxlin.tokenizer import ChatTemplate, ThoughtSplitter
from mlxlin.tokenizer import template as template_module
from mlxlin.tokenizer.template import normalize, plain
from tests.templates.cases import CASES, NAMES, SPECIAL, FrozenClock, golden, source

GOLDEN = golden()


@pytest.fixture(autouse=True)
def frozen_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_module, "datetime", FrozenClock)


@cache
def compiled(name: str) -> ChatTemplate:
    return ChatTemplate(source(name), name)


def render(name: str, case: str) -> str:
    messages, options = CASES[case]
    return compiled(name).render(messages, **({"add_generation_prompt": True} | SPECIAL | options))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", NAMES)
def test_b20_renders_as_transformers(name: str, case: str) -> None:
    expected = GOLDEN[name][case]
    if "think" in CASES[case][1] and compiled(name).thinking_switch is None:
        with pytest.raises(InputError, match="cannot switch thinking"):
            render(name, case)
    elif isinstance(expected, dict):
        with pytest.raises(TokenizerError) as error:
            render(name, case)
        if expected["error"] == "TemplateError":  # raise_exception: short, and no more than the template says
            assert error.value.message == f"The chat template refuses this conversation: {expected['message']}"
    else:
        assert render(name, case) == expected


def test_golden_covers_all_templates_and_both_outcomes() -> None:
    assert sorted(GOLDEN) == NAMES and all(set(texts) == set(CASES) for texts in GOLDEN.values())
    rendered = [text for texts in GOLDEN.values() for text in texts.values() if isinstance(text, str)]
    assert len(rendered) > 150


@pytest.mark.parametrize("name", ["escape", "append", "hidden"])
def test_b20_the_sandbox_holds(name: str) -> None:
    with pytest.raises(TokenizerError, match="may not"):
        render(name, "plain")


def test_b20_a_broken_template_names_the_line() -> None:
    with pytest.raises(TokenizerError, match="line 2"):
        ChatTemplate("{{ x }}\n{% if %}", "The template")


def call(arguments: Any) -> list[dict[str, Any]]:
    function = {"name": "get_weather", "arguments": arguments}
    return [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": function}]},
    ]


@pytest.mark.parametrize("name", ["qwen3", "qwen35", "llama3", "lfm2", "minimax", "nemotron"])
def test_b18_arguments_as_json_text_render_as_the_mapping(name: str) -> None:
    template = compiled(name)
    expected = template.render(call({"city": "Paris"}), bos_token="")
    assert "Paris" in expected
    assert template.render(call('{"city": "Paris"}'), bos_token="") == expected
    assert template.render(call(""), bos_token="") == template.render(call({}), bos_token="")


@pytest.mark.parametrize("arguments", ["not json", '{"city": ', "[1]", "7", '"text"', "null"])
def test_b18_bad_arguments_name_the_message_and_the_call(arguments: str) -> None:
    with pytest.raises(InputError, match="Message 2.*get_weather") as error:
        normalize(call(arguments))
    assert error.value.hint


@pytest.mark.parametrize("messages", [[], "hello", {"role": "user"}, ["hello"], [{"content": "x"}], [{"role": None}]])
def test_what_is_no_conversation_is_refused(messages: Any) -> None:
    with pytest.raises(InputError, match="conversation|Message 1"):
        normalize(messages)
    with pytest.raises(InputError, match="conversation|Message 1"):  # not called a failure of the template
        compiled("chatml").render(messages)


def test_a_tool_call_that_is_no_mapping_is_refused() -> None:
    with pytest.raises(InputError, match="Message 1"):
        normalize([{"role": "assistant", "tool_calls": ["get_weather"]}])


def test_the_callers_messages_stay_as_they_were() -> None:
    messages = call('{"a": 1}') + [{"role": "assistant", "content": None, "reasoning": "r"}]
    before = repr(messages)
    normal = normalize(messages)
    assert repr(messages) == before
    assert normal[2] == {"thinking": "r", "role": "assistant", "reasoning": "r", "reasoning_content": "r"}


def test_templates_see_plain_data_only() -> None:
    import numpy as np

    class Text(str):
        pass

    class Thing:
        pass

    found = plain(
        {"a": Text("x"), "b": np.float32(0.5), "c": [np.bool_(False)], "d": Thing(), "e": np.zeros(2), "f": (1,)}
    )
    assert found == {"a": "x", "b": 0.5, "c": [False], "d": "<Thing>", "e": "<ndarray>", "f": (1,)}
    assert type(found["a"]) is str and type(found["b"]) is float


def test_thinking_switches_are_found_in_the_source() -> None:
    switches = {name: compiled(name).thinking_switch for name in NAMES}
    assert {name: switch for name, switch in switches.items() if switch} == {
        "deepseek": "thinking",
        "granite": "thinking",
        "kimi": "thinking",
        "ling": "enable_thinking",
        "nemotron": "enable_thinking",
        "qwen3": "enable_thinking",
        "qwen35": "enable_thinking",
    }
    assert ChatTemplate(source("qwen3"), "").thinking_markers == ("<think>", "</think>")
    assert ChatTemplate(source("chatml"), "").thinking_markers is None


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_thoughts_are_split_from_the_answer(size: int) -> None:
    text = "a < b<think>Hm </thin k</think>Yes <th"
    splitter = ThoughtSplitter(("<think>", "</think>"))
    parts = [part for i in range(0, len(text), size) for part in splitter.add(text[i : i + size])] + splitter.finish()
    assert "".join(text for inside, text in parts if inside) == "Hm </thin k"
    assert "".join(text for inside, text in parts if not inside) == "a < bYes <th"


def test_a_thought_opened_by_the_prompt() -> None:
    splitter = ThoughtSplitter(("<think>", "</think>"), "<|im_start|>assistant\n<think>\n")
    assert splitter.add("Hm</think>Yes") == [(True, "Hm"), (False, "Yes")]
    closed = ThoughtSplitter(("<think>", "</think>"), "<think>\n\n</think>\n\n")
    assert closed.add("Yes") == [(False, "Yes")]
