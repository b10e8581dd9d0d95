"""Conversations: replies cost what is new, whatever a template does to the history, and say what was reused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlxlin import archive
from mlxlin.backend import mx
from mlxlin.conversation import Conversation
from mlxlin.errors import InputError, SessionError
from mlxlin.generate import Piece
from mlxlin.models import Model
from mlxlin.state import State
from mlxlin.store import PrefixStore
from mlxlin.timeline import Timeline, common_prefix
from mlxlin.tokenizer import Tokenizer
from tests.tiny import HYBRID, RECURRENT, tiny_model
from tests.tokenizer_folders import byte_level, write

# Thoughts stay in the turn that is being answered and are dropped from all earlier ones.
FORGETFUL = """\
{%- set ns = namespace(last_query_index=0) -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}{%- set ns.last_query_index = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for m in messages -%}
<s>{{ m.role }}
{% if m.role == 'assistant' and m.reasoning_content and loop.index0 > ns.last_query_index -%}
<think>
{{ m.reasoning_content }}
</think>

{% endif -%}
{{ m.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<s>assistant
<think>
{% endif -%}"""
PLAIN = """\
{%- for m in messages %}<s>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{%- if add_generation_prompt %}<s>assistant
{% endif %}"""


class Scripted:
    """A real model that reads everything but says what it is told: `replies`, one after the other, as text."""

    def __init__(self, model: Model, tokenizer: Tokenizer, replies: list[str]) -> None:
        self.model, self.read, self.end = model, 0, next(iter(tokenizer.stop_ids))
        self.replies = [[*tokenizer.encode(reply, bos=False), self.end] for reply in replies]
        self.prompt, self.reply = 0, [self.end]

    def begin(self, prompt: int) -> None:
        """The next reply comes behind this many tokens."""
        self.prompt, self.reply = prompt, self.replies.pop(0)

    def __call__(self, ids: Any, state: State | None = None, **options: Any) -> tuple[mx.array | None, State]:
        self.read += ids.shape[1] if isinstance(ids, mx.array) else len(ids[0])
        logits, after = self.model(ids, state, **options)
        if logits is not None:
            said = int(after.positions[0].item()) - self.prompt
            forced = self.reply[said] if 0 <= said < len(self.reply) else self.end
            logits = mx.where(mx.arange(logits.shape[-1]) == forced, 1e4, logits)
        return logits, after

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def conversation(
    tmp_path: Path, template: str, replies: list[str], config: dict[str, Any] = HYBRID, **options: Any
) -> tuple[Conversation, Scripted]:
    folder = write(
        tmp_path / "tokenizer",
        byte_level("user", "assistant", "<think>", "</think>"),
        tokenizer_config={"chat_template": template, "eos_token": "<|im_end|>", "bos_token": "<s>"},
    )
    tokenizer = Tokenizer.from_folder(folder)
    model = Scripted(tiny_model({**config, "vocab_size": tokenizer.vocab_size}), tokenizer, replies)
    return Conversation(model, tokenizer, **options), model  # type: ignore[arg-type]


def say(talk: Conversation, model: Scripted, text: str, **options: Any) -> Piece:
    """One turn with the next scripted reply; returns the last piece."""
    model.begin(len(talk.prompt(text)))
    return list(talk.ask(text, temperature=0.0, **options))[-1]


def assert_from_scratch(talk: Conversation, model: Scripted) -> None:
    logits, state = model.model([talk.timeline.tokens])
    one, other = talk.timeline.state.arrays(), state.arrays()
    for name in other:
        np.testing.assert_allclose(np.array(one[name]), np.array(other[name]), atol=2e-4, err_msg=name)


@pytest.mark.parametrize("config", [HYBRID, RECURRENT], ids=["hybrid", "recurrent"])
def test_b17_stripped_thoughts_cost_one_assistant_turn(tmp_path: Path, config: dict[str, Any]) -> None:
    replies = [f"let me think about {n} for a while\n</think>\n\nThe answer is {n}." for n in range(4)]
    talk, model = conversation(tmp_path, FORGETFUL, list(replies), config)
    before: list[int] = []
    for turn in range(1, 5):
        prompt = talk.prompt(f"Question {turn}?")
        shared = common_prefix(before, prompt)
        old, model.read = talk.timeline.position, 0
        stats = say(talk, model, f"Question {turn}?").stats
        assert stats is not None
        assert talk.turns[-1]["reasoning_content"] == f"let me think about {turn - 1} for a while"
        assert talk.turns[-1]["content"] == f"The answer is {turn - 1}."
        if turn > 1:
            assert shared < old  # the thought is gone from the prompt
            last_assistant_turn = max(
                m.position for m in talk.timeline.marks if m.name == f"the reply of turn {turn - 1}"
            )
            assert stats.reused_tokens >= last_assistant_turn
            assert shared - stats.reused_tokens < 12
            assert f"the template rewrote the reply of turn {turn - 1}" in stats.reuse
        assert_from_scratch(talk, model)
        before = list(talk.timeline.tokens)


def test_a_template_that_keeps_the_history_rereads_nothing(tmp_path: Path) -> None:
    talk, model = conversation(tmp_path, PLAIN, ["one", "two", "three"])
    for turn in range(3):
        known, model.read = talk.timeline.position, 0
        stats = say(talk, model, f"and {turn}").stats
        assert stats is not None and stats.reused_tokens == known
        assert model.read == talk.timeline.position - known
        assert stats.reuse == ("everything read so far" if turn else "nothing was read before")


def test_undo_retry_and_edit_cost_a_turn(tmp_path: Path) -> None:
    talk, model = conversation(tmp_path, PLAIN, ["one", "two", "other", "three", "four"])
    say(talk, model, "first"), say(talk, model, "second")
    assert talk.undo() == "second" and len(talk.turns) == 2
    stats = say(talk, model, "second").stats  # the same message again: retry
    assert stats is not None and stats.reused_tokens == stats.prompt_tokens - 1
    assert talk.turns[-1]["content"] == "other" and "you changed the reply of turn 2" in stats.reuse
    assert talk.edit(1) == "first" and talk.turns == []
    stats = say(talk, model, "fresh start").stats
    assert stats is not None and "before turn 1" in stats.reuse
    assert [t["content"] for t in talk.turns] == ["fresh start", "three"]
    assert_from_scratch(talk, model)
    assert talk.undo() == "fresh start" and talk.undo() is None
    with pytest.raises(InputError, match="no turn 4"):
        talk.edit(4)


def test_forks_go_their_own_ways(tmp_path: Path) -> None:
    talk, model = conversation(tmp_path, PLAIN, ["one", "two", "three"])
    say(talk, model, "first")
    twin = talk.fork()
    say(talk, model, "left"), say(twin, model, "right")
    assert [t["content"] for t in talk.turns] == ["first", "one", "left", "two"]
    assert [t["content"] for t in twin.turns] == ["first", "one", "right", "three"]
    assert_from_scratch(talk, model), assert_from_scratch(twin, model)


def test_two_chats_interleaved_do_not_mix(tmp_path: Path) -> None:
    one, model = conversation(tmp_path, PLAIN, ["a1", "b1", "a2", "b2"])
    other = Conversation(one.model, one.tokenizer, system="another one")
    for turn in range(2):
        for talk in (one, other):
            say(talk, model, f"turn {turn}")
            assert_from_scratch(talk, model)
    assert [t["content"] for t in other.turns[1::2]] == ["b1", "b2"]


def test_a_reply_given_up_is_kept_as_far_as_it_came(tmp_path: Path) -> None:
    talk, model = conversation(tmp_path, PLAIN, ["a long reply that is stopped", "then"])
    model.begin(len(talk.prompt("go")))
    reply = talk.ask("go", temperature=0.0)
    text = "".join(next(reply).text for _ in range(6))
    reply.close()
    assert talk.turns[-1] == {"role": "assistant", "content": text} and text == "a long"
    assert_from_scratch(talk, model)
    assert talk.timeline.position == len(talk.timeline.tokens)
    say(talk, model, "again")
    assert_from_scratch(talk, model)


def test_an_interrupt_while_reading_leaves_the_conversation(tmp_path: Path) -> None:
    talk, model = conversation(tmp_path, PLAIN, ["one", "two"])
    say(talk, model, "first")
    turns = list(talk.turns)

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        next(talk.ask("x" * 600, temperature=0.0, progress=stop))
    assert talk.turns == turns
    assert_from_scratch(talk, model)
    model.begin(len(talk.prompt("second")))
    assert "".join(p.text for p in talk.ask("second", temperature=0.0)) == "two"
    assert_from_scratch(talk, model)


def test_b28_an_empty_reply_is_a_reply(tmp_path: Path) -> None:
    talk, model = conversation(tmp_path, PLAIN, ["", "more"])
    piece = say(talk, model, "say nothing")
    assert piece.finish_reason == "stop" and talk.turns[-1]["content"] == ""
    say(talk, model, "now?")
    assert_from_scratch(talk, model)


def test_b48_a_saved_conversation_goes_on_where_it_was(tmp_path: Path) -> None:
    talk, model = conversation(tmp_path, PLAIN, ["one", "two", "three", "again"], system="Be brief.")
    say(talk, model, "first"), say(talk, model, "second")
    archive.write(tmp_path / "chat.safetensors", *talk.snapshot())
    again = Conversation(talk.model, talk.tokenizer)
    again.restore(*archive.read(tmp_path / "chat.safetensors"))
    assert again.turns == talk.turns and again.system == "Be brief."
    known, model.read = again.timeline.position, 0
    stats = say(again, model, "third").stats
    assert stats is not None and stats.reused_tokens == known
    again.undo(), again.undo()
    stats = say(again, model, "second").stats
    assert stats is not None and stats.reused_tokens == stats.prompt_tokens - 1  # its checkpoints came along
    assert_from_scratch(again, model)


def test_a_saved_conversation_of_another_model_is_refused_with_the_reason(tmp_path: Path) -> None:
    talk, model = conversation(tmp_path, PLAIN, ["one", "two"])
    say(talk, model, "first")
    arrays, record = talk.snapshot()
    for key, words in (("model", "model or quantisation"), ("tokenizer", "chat template"), ("dtype", "dtype")):
        other = Conversation(talk.model, talk.tokenizer)
        with pytest.raises(SessionError, match=words):
            other.restore(arrays, {**record, key: "other"})
        assert other.turns == []
        other.restore(arrays, {**record, key: "other"}, from_tokens=True)
        assert other.turns == talk.turns and other.timeline.position == 0
    say(other, model, "next")
    assert_from_scratch(other, model)


def test_a_shared_system_prompt_is_read_once_per_machine(tmp_path: Path) -> None:
    system = "You answer in one word. " * 10
    talk, model = conversation(tmp_path, PLAIN, ["one", "two"], system=system)

    def chat() -> Conversation:
        store = PrefixStore(model.model.fingerprint, tmp_path / "store")
        return Conversation(talk.model, talk.tokenizer, system=system, timeline=Timeline(talk.model, store=store))

    say(chat(), model, "first question")
    second, model.read = chat(), 0
    stats = say(second, model, "another question").stats
    assert stats is not None and stats.reuse == "stored earlier on this machine"
    assert stats.reused_tokens > 200 and model.read < 60
    assert_from_scratch(second, model)


def test_what_the_person_changes_is_not_blamed_on_the_template(tmp_path: Path) -> None:
    talk, model = conversation(tmp_path, PLAIN, ["one", "two"], system="Be brief.")
    say(talk, model, "first")
    talk.set_system("Be verbose.")
    stats = say(talk, model, "second").stats
    assert stats is not None and stats.reuse.endswith("you changed its beginning")
