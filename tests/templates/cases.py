"""Conversations every template in this folder is rendered with, and the expected texts.

`python -m tests.templates.cases` writes golden.json with transformers (needs the parity group).
"""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
NOW = datetime(2026, 3, 5, 7, 8, 9)
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather <now> & later, 'quoted'",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "unit": {"type": "string", "enum": ["°C", "°F"]}},
            "required": ["city"],
        },
    },
}


def _call(id: str, **arguments: Any) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": "get_weather", "arguments": arguments}}


SYSTEM = {"role": "system", "content": "Be brief. /no_think"}
ASK = {"role": "user", "content": "Weather in Paris?"}
CALLED = {"role": "assistant", "content": "", "tool_calls": [_call("call00001", city="Paris", days=2, wind=True)]}
RESULT = {"role": "tool", "tool_call_id": "call00001", "name": "get_weather", "content": '{"t": 20}'}
TWO = {
    "role": "assistant",
    "content": "Both:",
    "tool_calls": [_call("call00001", city="Köln"), _call("call00002", c=[1])],
}

# name -> (messages, options of the render)
CASES: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "plain": ([{"role": "user", "content": "Hello, é 你好 😀 <b>&"}], {}),
    "turns": (
        [SYSTEM, {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!\n"}, ASK],
        {},
    ),
    "closed": ([ASK, {"role": "assistant", "content": "Sunny."}], {"add_generation_prompt": False}),
    "tools": ([SYSTEM, ASK, CALLED, RESULT], {"tools": [WEATHER]}),
    "two_calls": ([ASK, TWO, RESULT, {**RESULT, "tool_call_id": "call00002", "content": "2"}], {"tools": [WEATHER]}),
    "reasoning": (
        [
            ASK,
            {"role": "assistant", "reasoning_content": "Hm.\nParis.", "content": "Sunny."},
            {"role": "user", "content": "Why?"},
        ],
        {},
    ),
    "thinking_alias": ([ASK, {"role": "assistant", "thinking": "Hm.", "content": "Sunny."}], {}),
    "inline_thought": (
        [
            ASK,
            {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nSunny."},
            {"role": "user", "content": "Why?"},
        ],
        {},
    ),
    "think_on": ([ASK], {"think": True}),
    "think_off": ([SYSTEM, ASK], {"think": False}),
    "parts": ([{"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]}], {}),
    "documents": ([ASK], {"documents": [{"title": "T", "text": "It rains."}]}),
    "out_of_order": ([{"role": "assistant", "content": "I begin."}, ASK, ASK], {}),
    "none_values": ([ASK, {"role": "assistant", "content": None, "tool_calls": None, "name": None}], {}),
}

NAMES = sorted(path.stem for path in FOLDER.glob("*.jinja"))


class FrozenClock(datetime):
    """Stands in for `datetime` where templates ask for the time."""

    @classmethod
    def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
        return NOW


def source(name: str) -> str:
    return (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")


def golden() -> dict[str, dict[str, Any]]:
    """Expected texts by template and case; an error is {"error": class name, "message": text}."""
    loaded: dict[str, dict[str, Any]] = json.loads((FOLDER / "golden.json").read_text(encoding="utf-8"))
    return loaded


def render_with_transformers(name: str, case: str) -> Any:
    """What transformers renders, or the error it raises, in the form of golden.json."""
    from transformers.tokenization_utils_base import _normalize_chat_messages
    from transformers.utils import chat_template_utils

    messages, options = CASES[case]
    options = {"add_generation_prompt": True} | options
    if "think" in options:  # the switches our templates have; a template reads at most one of them
        think = options.pop("think")
        options |= {"enable_thinking": think, "thinking": think}
    chat_template_utils.datetime = FrozenClock
    try:
        rendered, _ = chat_template_utils.render_jinja_template(
            [_normalize_chat_messages(messages)], chat_template=source(name), **(SPECIAL | options)
        )
    except Exception as error:
        return {"error": type(error).__name__, "message": str(error)}
    return rendered[0]


if __name__ == "__main__":
    texts = {name: {case: render_with_transformers(name, case) for case in CASES} for name in NAMES}
    (FOLDER / "golden.json").write_text(json.dumps(texts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
