"""Conversations: replies cost what is new, whatever a template does to the history, and say what was reused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlxlin import archive
from mlxlin.backend import mx
from mlxlin.conversation import Conversation
from mlxlin.errors import InputError, NumericsError, SessionError
from mlxlin.generate import Piece
from mlxlin.store import PrefixStore
from mlxlin.timeline import Timeline, common_prefix
from mlxlin.tokenizer import Tokenizer
from tests.scripted import FORGETFUL, PLAIN, Scripted, scripted
from tests.test_timeline import TOLERANCE
from tests.tiny import CONFIGS, HYBRID, RECURRENT, tiny_model
from tests.tokenizer_folders import world_file


def conversation(
    tmp_path: Path, template: str, replies: list[str], config: dict[str, Any] = HYBRID, **options: Any
) -> tuple[Conversation, Scripted]:
    model, tokenizer = scripted(tmp_path / "tokenizer", template, replies, config)
    return Conversation(model, tokenizer, **options), model  # type: ignore[arg-type]


def say(talk: Conversation, text: str, **options: Any) -> Piece:
    """One turn with the next scripted reply; returns the last piece."""
    return list(talk.ask(text, temperature=0.0, **options))[-1]


def assert_from_scratch(talk: Conversation, model: Scripted) -> None:
    logits, state = model.model([talk.timeline.tokens])
    one, other = talk.timeline.state.arrays(), state.arrays()
    for name in other:
        np.testing.assert_allclose(np.array(one[name]), np.array(other[name]), atol=TOLERANCE, err_msg=name)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_b17_stripped_thoughts_cost_one_assistant_turn(tmp_path: Path, config: dict[str, Any]) -> None:
    replies = [f"let me think about {n} for a while\n</think>\n\nThe answer is {n}." for n in range(4)]
    talk, model = conversation(tmp_path, FORGETFUL, list(replies), config)
    before: list[int] = []
    for turn in range(1, 5):
        prompt = talk.prompt(f"Question {turn}?")
        shared = common_prefix(before, prompt)
        old, model.read = talk.timeline.position, 0
        stats = say(talk, f"Question {turn}?").stats
        assert stats is not None
        assert talk.turns[-1]["reasoning_content"] == f"let me think about {turn - 1} for a while"
        assert talk.turns[-1]["content"] == f"The answer is {turn - 1}."
        if turn > 1:
            assert shared < old  # the thought is gone from the prompt
            assert stats.reused_tokens == shared and model.read == talk.timeline.position - shared
            assert f"the template rewrote the reply of turn {turn - 1}" in stats.reuse
        assert_from_scratch(talk, model)
        before = list(talk.timeline.tokens)


def test_a_template_that_keeps_the_history_rereads_nothing(tmp_path: Path) -> None:
    talk, model = conversation(tmp_path, PLAIN, ["one", "two", "three"])
    for turn in range(3):
        known, model.read = talk.timeline.position, 0
        stats = say(talk, f"and {turn}").stats
        assert stats is not None and stats.reused_tokens == known
        assert model.read == talk.timeline.position - known
        assert stats.reuse == ("everything read so far" if turn else "nothing was read before")


def test_undo_retry_and_edit_cost_a_turn(tmp_path: Path) -> None:
    talk, model = conversation(tmp_path, PLAIN, ["one", "two", "other", "three", "four"])
    say(talk, "first"), say(talk, "second")
    assert talk.undo() == "second" and len(talk.turns) == 2
    stats = say(talk, "second").stats  # the same message again: retry
    assert stats is not None and stats.reused_tokens == stats.prompt_tokens - 1
    assert talk.turns[-1]["content"] == "other" and "you changed the reply of turn 2" in stats.reuse
    assert talk.edit(1) == "first" and talk.turns == []
    stats = say(talk, "fresh start").stats
    assert stats is not None and "before turn 1" in stats.reuse
    assert [t["content"] for t in talk.turns] == ["fresh start", "three"]
    assert_from_scratch(talk, model)
    assert talk.undo() == "fresh start" and talk.undo() is None
    with pytest.raises(InputError, match="no turn 4"):
        talk.edit(4)


def test_forks_go_their_own_ways(tmp_path: Path) -> None:
    talk, model = conversation(tmp_path, PLAIN, ["one", "two", "three"])
    say(talk, "first")
    twin = talk.fork()
    say(talk, "left"), say(twin, "right")
    assert [t["content"] for t in talk.turns] == ["first", "one", "left", "two"]
    assert [t["content"] for t in twin.turns] == ["first", "one", "right", "three"]
    assert_from_scratch(talk, model), assert_from_scratch(twin, model)


def test_two_chats_interleaved_do_not_mix(tmp_path: Path) -> None:
    one, model = conversation(tmp_path, PLAIN, ["a1", "b1", "a2", "b2"])
    other = Conversation(one.model, one.tokenizer, system="another one")
    for turn in range(2):
        for talk in (one, other):
            say(talk, f"turn {turn}")
            assert_from_scratch(talk, model)
    assert [t["content"] for t in other.turns[1::2]] == ["b1", "b2"]


def test_a_reply_given_up_is_kept_as_far_as_it_came(tmp_path: Path) -> None:
    talk, model = conversation(tmp_path, PLAIN, ["a long reply that is stopped", "then"])
    reply = talk.ask("go", temperature=0.0)
    text = "".join(next(reply).text for _ in range(6))
    reply.close()
    assert talk.turns[-1] == {"role": "assistant", "content": text} and text == "a long"
    assert_from_scratch(talk, model)
    assert talk.timeline.position == len(talk.timeline.tokens)
    say(talk, "again")
    assert_from_scratch(talk, model)


def test_an_interrupt_while_reading_leaves_the_conversation(tmp_path: Path) -> None:
    talk, model = conversation(tmp_path, PLAIN, ["one", "two"])
    say(talk, "first")
    turns = list(talk.turns)

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        next(talk.ask("x" * 600, temperature=0.0, progress=stop))
    assert talk.turns == turns
    assert_from_scratch(talk, model)
    assert "".join(p.text for p in talk.ask("second", temperature=0.0)) == "two"
    assert_from_scratch(talk, model)


def test_b28_an_empty_reply_is_a_reply(tmp_path: Path) -> None:
    talk, model = conversation(tmp_path, PLAIN, ["", "more"])
    piece = say(talk, "say nothing")
    assert piece.finish_reason == "stop" and talk.turns[-1]["content"] == ""
    say(talk, "now?")
    assert_from_scratch(talk, model)


def test_b48_a_saved_conversation_goes_on_where_it_was(tmp_path: Path) -> None:
    talk, model = conversation(tmp_path, PLAIN, ["one", "two", "three", "again"], system="Be brief.")
    say(talk, "first"), say(talk, "second")
    archive.write(tmp_path / "chat.safetensors", *talk.snapshot())
    again = Conversation(talk.model, talk.tokenizer)
    again.restore(*archive.read(tmp_path / "chat.safetensors"))
    assert again.turns == talk.turns and again.system == "Be brief."
    known, model.read = again.timeline.position, 0
    stats = say(again, "third").stats
    assert stats is not None and stats.reused_tokens == known
    again.undo(), again.undo()
    stats = say(again, "second").stats
    assert stats is not None and stats.reused_tokens == stats.prompt_tokens - 1  # its checkpoints came along
    assert_from_scratch(again, model)


def test_a_saved_conversation_of_another_model_is_refused_with_the_reason(tmp_path: Path) -> None:
    talk, model = conversation(tmp_path, PLAIN, ["one", "two"])
    say(talk, "first")
    arrays, record = talk.snapshot()
    for key, words in (("model", "model or quantisation"), ("tokenizer", "chat template"), ("dtype", "dtype")):
        other = Conversation(talk.model, talk.tokenizer)
        with pytest.raises(SessionError, match=words):
            other.restore(arrays, {**record, key: "other"})
        assert other.turns == []
        other.restore(arrays, {**record, key: "other"}, from_text=True)
        assert other.turns == talk.turns and other.timeline.position == 0
    say(other, "next")
    assert_from_scratch(other, model)


def test_a_shared_system_prompt_is_read_once_per_machine(tmp_path: Path) -> None:
    system = "You answer in one word. " * 10
    talk, model = conversation(tmp_path, PLAIN, ["one", "two"], system=system)

    def chat() -> Conversation:
        store = PrefixStore(model.model.fingerprint, tmp_path / "store")
        return Conversation(talk.model, talk.tokenizer, system=system, timeline=Timeline(talk.model, store=store))

    say(chat(), "first question")
    second, model.read = chat(), 0
    stats = say(second, "another question").stats
    assert stats is not None and stats.reuse == "stored earlier on this machine"
    assert stats.reused_tokens > 200 and model.read < 60
    assert_from_scratch(second, model)


def test_what_the_person_changes_is_not_blamed_on_the_template(tmp_path: Path) -> None:
    talk, model = conversation(tmp_path, PLAIN, ["one", "two", "three"], system="Be brief.")
    say(talk, "first")
    talk.set_system("Be verbose.")
    stats = say(talk, "second").stats
    assert stats is not None and stats.reuse.endswith("you changed its beginning")
    talk.set_system("Be verbose.")  # the same again is no change
    stats = say(talk, "third").stats
    assert stats is not None and stats.reuse == "everything read so far"


def reason(talk: Conversation, text: str) -> str:
    stats = say(talk, text).stats
    assert stats is not None
    return stats.reuse


def test_a_reply_in_tokens_the_tokenizer_would_not_choose_is_told(tmp_path: Path) -> None:
    talk, model = conversation(tmp_path, PLAIN, [list(b"a user"), "two"])  # "user" has a token of its own
    say(talk, "first")
    assert reason(talk, "second").endswith("; other tokens now spell the reply of turn 1")
    assert_from_scratch(talk, model)


def test_a_stop_text_is_told(tmp_path: Path) -> None:
    talk, model = conversation(tmp_path, PLAIN, ["one. END and more", "two"])
    assert say(talk, "first", stop=" END").finish_reason == "stop" and talk.turns[-1]["content"] == "one."
    assert reason(talk, "second").endswith("; a stop text ended the reply of turn 1")
    assert_from_scratch(talk, model)


def test_a_reply_given_up_inside_a_character_is_told(tmp_path: Path) -> None:
    talk, model = conversation(tmp_path, PLAIN, ["n€", "two"])
    reply = talk.ask("first", temperature=0.0)
    assert [next(reply).text, next(reply).text] == ["n", ""]
    reply.close()
    assert talk.turns[-1]["content"] == "n"
    assert reason(talk, "second").endswith("; you stopped the reply of turn 1")
    assert_from_scratch(talk, model)


def test_vocabularies_whose_turns_end_in_text_stop_there(tmp_path: Path) -> None:
    world_file(tmp_path / "world", "\n\n", "User", "Assistant")
    tokenizer = Tokenizer.from_folder(tmp_path / "world")
    model = Scripted(tiny_model({**RECURRENT, "vocab_size": 300}), tokenizer, ["hello\n\nUser: more", "two"])
    talk = Conversation(model, tokenizer)  # type: ignore[arg-type]
    assert say(talk, "first").finish_reason == "stop" and talk.turns[-1]["content"] == "hello"


def test_numbers_that_are_not_finite_are_never_used_again(tmp_path: Path) -> None:
    talk, model = conversation(tmp_path, PLAIN, ["one", [*b"tw", -1], "two"])
    say(talk, "first")
    turns = list(talk.turns)
    with pytest.raises(NumericsError):
        say(talk, "second")
    assert talk.turns == turns and talk.timeline.position == 0 and not talk.timeline.points
    assert reason(talk, "second") == "nothing was read before"
    assert_from_scratch(talk, model)


def test_b43_a_snapshot_is_not_changed_by_what_follows(tmp_path: Path) -> None:
    talk, model = conversation(tmp_path, PLAIN, ["one", "two", "three"])
    say(talk, "first")
    arrays, record = talk.snapshot()
    before = {name: np.array(array) for name, array in arrays.items()}, json.dumps(record)
    say(talk, "second"), talk.undo(), say(talk, "third")
    assert json.dumps(record) == before[1]
    assert all((np.array(arrays[name]) == array).all() for name, array in before[0].items())


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_b45_a_saved_conversation_that_lacks_something_is_refused_whole(tmp_path: Path, config: dict[str, Any]) -> None:
    talk, model = conversation(tmp_path, PLAIN, ["one", "two", "three"], config)
    say(talk, "first"), say(talk, "second")
    arrays, record = talk.snapshot()
    other = Conversation(talk.model, talk.tokenizer)
    for name in arrays:
        if name != "logits":
            with pytest.raises(SessionError):
                other.restore({key: array for key, array in arrays.items() if key != name}, record)
            with pytest.raises(SessionError):
                other.restore({**arrays, name: mx.concatenate([arrays[name]] * 2)}, record)
    line = record["timeline"]
    for changed in (
        {"turns": None},
        {"timeline": {**line, "tokens": line["tokens"][:-1]}},
        {"timeline": {**line, "points": [[p + 1, n, k] for p, n, k in line["points"]]}},
        {"timeline": {key: value for key, value in line.items() if key != "marks"}},
    ):
        with pytest.raises(SessionError):
            other.restore(arrays, {**record, **changed})
    assert other.turns == [] and other.timeline.position == 0
    other.restore(arrays, record)
    say(other, "third")
    assert_from_scratch(other, model)


def test_everything_said_may_be_replaced_and_what_is_common_is_reused(tmp_path: Path) -> None:
    talk, model = conversation(tmp_path, PLAIN, ["one", "two", "three", "four"], system="Be brief.")
    say(talk, "first"), say(talk, "second")
    twin = talk.fork()
    twin.rewrite([*talk.turns[:2], {"role": "user", "content": "other"}, {"role": "assistant", "content": "way"}], None)
    assert "you changed its beginning" in reason(twin, "third")
    twin = talk.fork()
    twin.rewrite(talk.turns[:2], talk.system)
    assert "before turn 2; you changed turn 2" in reason(twin, "third")
    assert_from_scratch(twin, model), assert_from_scratch(talk, model)
