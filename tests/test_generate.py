"""Prefill, decode, streaming and batches: with small stand-in models whose every answer is known, and with the shipped
model."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mlxlin
from mlxlin.backend import mx
from mlxlin.errors import InputError, NumericsError, ResourceError
from mlxlin.generate import Decoding, Piece, Stats, decode, pieces, prefill, reading
from mlxlin.sampling import Sampler, Sampling
from mlxlin.state import State
from mlxlin.tokenizer import Tokenizer
from mlxlin.tokenizer.files import read_files
from mlxlin.tokenizer.pieces import HubVocabulary
from tests.tokenizer_folders import byte_level, llama_like, world_file, write

VOCAB = 300


class Recurrent:
    """A model whose logits depend on every token read, in order, through one number per row.

    Attributes:
        calls: (batch, length, what was asked of the head) of each call.
    """

    vocab_size = VOCAB
    context = 10_000

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, str]] = []

    def fresh(self, batch: int = 1) -> State:
        return State(({"S": mx.zeros((batch, 1))},), mx.zeros((batch,), dtype=mx.int32))

    def __call__(self, tokens: Any, state: Any = None, *, lengths: Any = None, logits: str = "all") -> Any:
        tokens = tokens if isinstance(tokens, mx.array) else mx.array(tokens)
        batch, length = tokens.shape
        self.calls.append((batch, length, logits))
        state = self.fresh(batch) if state is None else state
        real = mx.full((batch,), length) if lengths is None else mx.array(lengths)
        memory = state.layers[0]["S"]
        for t in range(length):
            read = (memory * 31 + tokens[:, t : t + 1] + 1) % 997
            memory = mx.where((t < real)[:, None], read, memory)
        found = None if logits == "none" else self.predict(memory, state.positions + real)[:, None]
        return found, State(({"S": memory},), state.positions + real.astype(mx.int32))

    def predict(self, memory: mx.array, positions: mx.array) -> mx.array:
        return 3 * mx.sin(memory * (mx.arange(VOCAB) + 1)[None])


class Scripted(Recurrent):
    """Says given tokens, whatever it reads; `None` stands for logits that are not finite."""

    def __init__(self, prompt: int, *script: int | None) -> None:
        super().__init__()
        self.prompt, self.script = prompt, script

    def predict(self, memory: mx.array, positions: mx.array) -> mx.array:
        rows = []
        for position in np.array(positions).tolist():
            said = self.script[min(position - self.prompt, len(self.script) - 1)]
            rows.append(mx.full((VOCAB,), math.nan) if said is None else 9.0 * (mx.arange(VOCAB) == said))
        return mx.stack(rows)


PROMPT = [5, 6, 7]


def started(model: Any, prompt: Sequence[int] = PROMPT, sampling: Sampling | None = None, **options: Any) -> Decoding:
    logits, state = prefill(model, prompt)
    return decode(model, logits, state, Sampler(sampling or Sampling(), [prompt]), **options)


def memory(state: State) -> float:
    return float(state.layers[0]["S"].item())  # type: ignore[index, union-attr, arg-type]


def expected_memory(tokens: Sequence[int]) -> float:
    value = 0.0
    for token in tokens:
        value = (value * 31 + token + 1) % 997
    return value


@pytest.fixture
def chunk_of_four(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "chunk_length", lambda: 4)


@pytest.fixture(scope="module")
def bytes_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Ids 0 to 255 are bytes, 256 <s>, 257 <|im_end|>, which stops."""
    config = {"eos_token": "<|im_end|>", "chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"}
    return Tokenizer.from_folder(write(tmp_path_factory.mktemp("bytes"), byte_level(), tokenizer_config=config))


@pytest.fixture(scope="module")
def demo() -> tuple[Any, Tokenizer]:
    return mlxlin.load("demo")


# ---- prefill -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 11])
def test_prefill_in_chunks_runs_the_head_once(length: int, chunk_of_four: None) -> None:
    model, prompt, told = Recurrent(), list(range(length)), []
    logits, state = prefill(model, prompt, progress=lambda done, total: told.append((done, total)))
    assert memory(state) == expected_memory(prompt)
    assert logits.shape == (1, 1, VOCAB)
    asked = [call[2] for call in model.calls]
    assert asked == ["none"] * (len(asked) - 1) + ["last"] and len(asked) == math.ceil(length / 4)
    assert told == [(min(4 * (n + 1), length), length) for n in range(len(asked))]


def test_prefill_of_rows_that_end_in_different_chunks(chunk_of_four: None) -> None:
    rows = [[1], [2, 3, 4, 5], [6, 7, 8, 9, 10], list(range(11))]
    lengths = [len(row) for row in rows]
    logits, state = prefill(Recurrent(), [row + [299] * (11 - len(row)) for row in rows], lengths=lengths)
    for index, row in enumerate(rows):
        alone, after = prefill(Recurrent(), row)
        assert logits[index].tolist() == alone[0].tolist()
        assert state.layers[0]["S"][index].item() == memory(after)  # type: ignore[index]
    assert state.positions.tolist() == lengths


def test_prefill_goes_on_from_a_state_and_leaves_it_as_it_was() -> None:
    model = Recurrent()
    _, before = prefill(model, [1, 2])
    _, after = prefill(model, mx.array([3, 4]), before)
    assert (memory(before), memory(after)) == (expected_memory([1, 2]), expected_memory([1, 2, 3, 4]))


@pytest.mark.parametrize("tokens", [[], [[]], mx.zeros((1, 0), dtype=mx.int32)])
def test_an_empty_prompt_is_refused(tokens: Any) -> None:
    with pytest.raises(InputError, match="empty"):
        prefill(Recurrent(), tokens)
    with pytest.raises(InputError, match="empty"):
        prefill(Recurrent(), [[1, 2], [3, 3]], lengths=[2, 0])


# ---- decode ------------------------------------------------------------------------------------------------------


def test_the_next_step_is_under_way_when_a_token_is_handed_out() -> None:
    model = Recurrent()
    decoding = started(model, max_tokens=3)
    assert len(model.calls) == 1
    seen = []
    for step in decoding:
        seen.append(len(model.calls))
        assert decoding.tokens[-1] == step.token
    assert seen == [2, 3, 3]  # nothing is computed behind the last token


@pytest.mark.parametrize("stop_after", [0, 1, 2, 5])
def test_tokens_and_state_belong_together_at_any_time(stop_after: int) -> None:
    model = Recurrent()
    decoding = started(model, max_tokens=5)
    list(itertools.islice(decoding, stop_after))
    assert len(decoding.tokens) == stop_after
    assert memory(decoding.state) == expected_memory(PROMPT + decoding.tokens)
    assert decoding.state.positions.tolist() == [3 + stop_after]
    assert decoding.finish_reason == ("length" if stop_after == 5 else None)
    greedy = [step.token for step in started(Recurrent(), max_tokens=5)]
    assert decoding.tokens == greedy[:stop_after]
    assert [step.token for step in decoding] == greedy[stop_after:]  # reading the state disturbs nothing


def test_an_interrupt_leaves_tokens_and_state_together() -> None:
    class Interrupted(Recurrent):
        def __call__(self, *args: Any, **options: Any) -> Any:
            if len(self.calls) == 4:
                self.calls.append((0, 0, "interrupt"))
                raise KeyboardInterrupt
            return super().__call__(*args, **options)

    decoding = started(Interrupted(), max_tokens=9)
    with pytest.raises(KeyboardInterrupt):
        list(decoding)
    assert len(decoding.tokens) == 3
    assert memory(decoding.state) == expected_memory(PROMPT + decoding.tokens)


def test_the_stop_token_is_kept_but_not_handed_out() -> None:
    model = Scripted(3, 10, 11, 257, 12)
    decoding = started(model, max_tokens=9, stop_ids=frozenset({257}))
    assert [step.token for step in decoding] == [10, 11]
    assert (decoding.tokens, decoding.finish_reason) == ([10, 11, 257], "stop")
    assert memory(decoding.state) == expected_memory([*PROMPT, 10, 11, 257])
    assert next(decoding, None) is None


def test_b28_stop_as_the_first_token_is_an_empty_reply(bytes_tokenizer: Tokenizer) -> None:
    got = list(mlxlin.stream(Scripted(2, 257), bytes_tokenizer, "hi"))
    assert [piece.text for piece in got] == [""]
    assert got[-1].finish_reason == "stop" and got[-1].token is None
    stats = got[-1].stats
    assert stats is not None and (stats.generated_tokens, stats.decode_tps) == (1, 0.0)


def test_b21_every_stop_token_stops_and_none_is_printed(tmp_path: Path) -> None:
    backend = byte_level(special=("<a>", "<b>", "<c>", "<|im_end|>"))  # 256 to 259
    files: dict[str, Any] = {
        "generation_config": {"eos_token_id": 256},
        "config": {"eos_token_id": [257, 258]},
        "tokenizer_config": {"eos_token": "<|im_end|>", "chat_template": "{{ messages[0].content }}"},
    }
    tokenizer = Tokenizer.from_folder(write(tmp_path, backend, **files))
    for stop in (256, 257, 258, 259):
        got = list(mlxlin.stream(Scripted(2, ord("o"), ord("k"), stop, ord("x")), tokenizer, "hi"))
        assert "".join(piece.text for piece in got) == "ok" and got[-1].finish_reason == "stop"


def test_b67_no_tokens_wanted_none_given(bytes_tokenizer: Tokenizer) -> None:
    model = Recurrent()
    got = list(mlxlin.stream(model, bytes_tokenizer, "hi", max_tokens=0))
    assert [(piece.text, piece.finish_reason) for piece in got] == [("", "length")]
    assert got[0].stats is not None and got[0].stats.generated_tokens == 0
    (alone,) = mlxlin.batch(model, bytes_tokenizer, ["hi"], max_tokens=0)
    assert (alone.text, alone.tokens, alone.finish_reason) == ("", [], "length")
    with pytest.raises(InputError, match="-1"):
        mlxlin.stream(model, bytes_tokenizer, "hi", max_tokens=-1)


@pytest.mark.parametrize("prompts", ["hi", {"role": "user", "content": "hi"}])
def test_one_prompt_is_no_batch_of_its_parts(bytes_tokenizer: Tokenizer, prompts: Any) -> None:
    with pytest.raises(InputError, match="a list of prompts"):
        mlxlin.batch(Recurrent(), bytes_tokenizer, prompts)


def test_b67_seed_zero_repeats(bytes_tokenizer: Tokenizer) -> None:
    def say(**options: Any) -> list[int | None]:
        return [piece.token for piece in mlxlin.stream(Recurrent(), bytes_tokenizer, "hi", max_tokens=20, **options)]

    assert say(temperature=1.0, seed=0) == say(temperature=1.0, seed=0) != say(temperature=1.0, seed=1)
    assert say(temperature=1.0) != say(temperature=1.0)


def test_logits_that_are_not_finite_stop_with_a_named_token(bytes_tokenizer: Tokenizer) -> None:
    decoding = started(Scripted(3, 10, 11, None, 12), max_tokens=9)
    with pytest.raises(NumericsError, match="token 3 "):
        list(decoding)
    assert decoding.tokens == [10, 11]
    assert memory(decoding.state) == expected_memory([*PROMPT, 10, 11])
    with pytest.raises(NumericsError, match="token 1 "):
        list(mlxlin.stream(Scripted(2, None), bytes_tokenizer, "hi"))
    with pytest.raises(NumericsError, match="token 2 of prompt 1 "):
        mlxlin.batch(Scripted(2, 10, None), bytes_tokenizer, ["hi", "yo"])


def test_log_probabilities_come_with_the_tokens() -> None:
    steps = list(started(Recurrent(), sampling=Sampling(1.5, seed=1), max_tokens=4, logprobs=3))
    read = list(PROMPT)
    for step in steps:
        logits = np.array(prefill(Recurrent(), read)[0])[0, 0].astype(np.float64)
        reference = logits - np.log(np.exp(logits).sum())
        assert step.logprob == pytest.approx(reference[step.token], rel=1e-4)
        assert [token for token, _ in step.top] == np.argsort(-reference)[:3].tolist()
        assert [value for _, value in step.top] == pytest.approx(np.sort(reference)[::-1][:3].tolist(), rel=1e-4)
        read.append(step.token)
    assert next(started(Recurrent(), max_tokens=1)).logprob is None


# ---- text --------------------------------------------------------------------------------------------------------


def run(tokenizer: Tokenizer, tokens: Sequence[int], stop: Sequence[str] = (), **options: Any) -> list[Piece]:
    decoding = started(Scripted(3, *tokens), max_tokens=len(tokens), stop_ids=tokenizer.stop_ids)
    return list(pieces(tokenizer, decoding, stop=stop, **options))


@settings(max_examples=60)
@given(st.text("ab", max_size=14), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_stop_texts_cut_at_the_first_and_hold_back_no_more_than_they_must(text: str, stop: list[str]) -> None:
    tokenizer = _bytes_tokenizer()
    ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(word) for word in stop)]
    before = text[: ends[0]] if ends else text
    expected = min((before.removesuffix(word) for word in stop), key=len) if ends else text
    got = run(tokenizer, [*text.encode(), 257], stop)
    assert "".join(piece.text for piece in got) == expected
    assert got[-1].finish_reason == ("stop" if ends else "length")
    shown = ""
    for count, piece in enumerate(got[:-1], 1):
        shown += piece.text
        held = text[len(shown) : count]
        if not any(word in text[:count] for word in stop):
            assert held == "" or any(word.startswith(held) for word in stop)


@cache
def _bytes_tokenizer() -> Tokenizer:
    """As the fixture of this name, for tests that run many times; nothing stops it."""
    nothing = Path("nowhere")
    return Tokenizer(HubVocabulary(byte_level(), nothing), read_files(nothing), "")


def test_a_stop_text_inside_one_token_and_across_several(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write(tmp_path, byte_level("Hello END")))
    whole = tokenizer.vocabulary.token_id("Hello")
    assert whole is not None
    got = run(tokenizer, [whole, *b" E", *b"NDx"], ["END"])
    assert [piece.text for piece in got] == ["Hello", " ", "", "", "", ""]
    assert got[-1].stats is not None and got[-1].stats.generated_tokens == 5
    assert "".join(piece.text for piece in run(tokenizer, [whole, *b" Ex"], ["llo E"])) == "He"


def test_text_held_back_comes_at_the_end(bytes_tokenizer: Tokenizer) -> None:
    got = run(bytes_tokenizer, [*b"so <|", 257], ["<|end"])
    assert ("".join(piece.text for piece in got[:-1]), got[-1].text) == ("so ", "<|")
    cut = run(bytes_tokenizer, "x😀".encode()[:-1])
    assert ("".join(piece.text for piece in cut[:-1]), cut[-1].text, cut[-1].finish_reason) == ("x", "\ufffd", "length")


@pytest.mark.parametrize("stop", ["", ["a", ""], [3]])
def test_empty_stop_texts_are_refused(stop: Any, bytes_tokenizer: Tokenizer) -> None:
    with pytest.raises(InputError, match="stop text"):
        mlxlin.stream(Recurrent(), bytes_tokenizer, "hi", stop=stop)


def test_replies_in_world_vocabularies_end_where_the_person_speaks(tmp_path: Path) -> None:
    words = world_file(tmp_path, "\n\n", "User", "Hello")
    tokenizer = Tokenizer.from_folder(tmp_path)
    id_of = {word: id for id, word in words.items()}
    script = [id_of[b"Hello"], id_of[b"\n\n"], id_of[b"Hello"], id_of[b"\n\n"], id_of[b"User"], id_of[b":"], 5]
    prompt = len(tokenizer.chat([{"role": "user", "content": "Hi"}]))
    got = list(mlxlin.stream(Scripted(prompt, *script), tokenizer, "Hi", max_tokens=20))
    assert "".join(piece.text for piece in got) == "Hello\n\nHello" and got[-1].finish_reason == "stop"


def test_raw_text_keeps_the_space_of_its_first_word(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write(tmp_path, llama_like()))
    the = tokenizer.vocabulary.token_id("▁the")
    for raw, expected in [(True, " the the"), (False, "the the")]:
        prompt = tokenizer.encode("in")
        got = mlxlin.stream(Scripted(len(prompt), the), tokenizer, "in" if raw else prompt, raw=raw, max_tokens=2)
        assert "".join(piece.text for piece in got) == expected


def test_giving_up_early_breaks_nothing(bytes_tokenizer: Tokenizer) -> None:
    model = Recurrent()
    _, state = prefill(model, PROMPT)
    first = mlxlin.stream(model, bytes_tokenizer, [8, 9], state=state, max_tokens=9)
    begun = [next(first).token for _ in range(3)]
    first.close()  # type: ignore[attr-defined]
    again = [piece.token for piece in mlxlin.stream(model, bytes_tokenizer, [8, 9], state=state, max_tokens=3)]
    whole = [piece.token for piece in mlxlin.stream(model, bytes_tokenizer, [*PROMPT, 8, 9], max_tokens=3)]
    assert again == whole == [*begun, None]
    assert memory(state) == expected_memory(PROMPT)


def test_stats_count_what_happened(bytes_tokenizer: Tokenizer) -> None:
    model = Recurrent()
    _, state = prefill(model, PROMPT)
    *_, last = mlxlin.stream(model, bytes_tokenizer, "hello", raw=True, state=state, max_tokens=4)
    stats = last.stats
    assert stats is not None
    assert (stats.prompt_tokens, stats.reused_tokens, stats.generated_tokens, stats.finish_reason) == (
        8,
        3,
        4,
        "length",
    )
    assert stats.state_bytes == 4 and stats.peak_memory_bytes > 0
    assert stats.prefill_tps == pytest.approx(5 / stats.prefill_seconds)
    assert stats.decode_tps == pytest.approx(3 / stats.decode_seconds)


def test_rates_need_something_to_divide() -> None:
    stats = Stats(10, 4, 5, prefill_seconds=2.0, decode_seconds=8.0)
    assert (stats.prefill_tps, stats.decode_tps) == (3.0, 0.5)
    assert Stats(4, 4, 1).prefill_tps == Stats(4, 4, 1).decode_tps == 0.0


# ---- prompts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt, raw", [("", True), ("", False), ([], False), ([], True)])
def test_prompts_with_nothing_in_them_are_refused(prompt: Any, raw: bool, bytes_tokenizer: Tokenizer) -> None:
    with pytest.raises(InputError, match="empty"):
        mlxlin.stream(Recurrent(), bytes_tokenizer, prompt, raw=raw)


def test_raw_and_empty_is_fine_where_a_text_begins_with_a_token(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write(tmp_path, byte_level(bos=True)))
    *_, last = mlxlin.stream(Recurrent(), tokenizer, "", raw=True, max_tokens=2)
    assert last.stats is not None and last.stats.prompt_tokens == 1


def test_options_that_cannot_be_honoured_are_errors(bytes_tokenizer: Tokenizer) -> None:
    model = Recurrent()
    _, state = prefill(model, PROMPT)
    for options, word in [
        ({"prompt": "hi", "state": state}, "state"),
        ({"prompt": "hi", "raw": True, "think": True}, "think"),
        ({"prompt": [1], "think": False}, "think"),
        ({"prompt": "hi", "think": True}, "thinking"),
        ({"prompt": [{"role": "user", "content": "hi"}], "raw": True}, "raw"),
        ({"prompt": "hi", "top_p": 2.0}, "top_p"),
    ]:
        with pytest.raises(InputError, match=word):
            mlxlin.stream(model, bytes_tokenizer, **options)  # type: ignore[arg-type]


def test_the_context_bounds_prompt_and_reply(bytes_tokenizer: Tokenizer) -> None:
    with pytest.raises(ResourceError, match="8 tokens.*ends at 7") as error:
        mlxlin.stream(Recurrent(), bytes_tokenizer, "a" * 8, context=7)
    assert error.value.hint
    with pytest.raises(ResourceError):
        mlxlin.stream(Recurrent(), bytes_tokenizer, "a" * 7, context=7)
    *_, last = mlxlin.stream(Recurrent(), bytes_tokenizer, "a" * 5, context=7)
    assert last.stats is not None and (last.stats.generated_tokens, last.finish_reason) == (2, "length")
    with pytest.raises(ResourceError):
        mlxlin.batch(Recurrent(), bytes_tokenizer, ["a", "a" * 10_001])


def test_sampling_comes_from_the_checkpoint_unless_given(tmp_path: Path) -> None:
    stored = {"do_sample": True, "temperature": 1.0}
    tokenizer = Tokenizer.from_folder(write(tmp_path, byte_level(), generation_config=stored))

    def say(**options: Any) -> list[int | None]:
        return [piece.token for piece in mlxlin.stream(Recurrent(), tokenizer, [1, 2], max_tokens=12, **options)]

    assert say(seed=1) != say(seed=2)
    assert say(seed=1, temperature=0) == say(seed=2, temperature=0)


# ---- batch -------------------------------------------------------------------------------------------------------

TEXTS = ["hello there", "a", "what?", "longer than the others, by far"]


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 1.0, "seed": 0}, {"repeat_penalty": 1.2, "temperature": 0.7, "seed": 4}]
)
def test_batched_rows_are_what_they_would_be_alone(
    options: Any, bytes_tokenizer: Tokenizer, chunk_of_four: None
) -> None:
    together = mlxlin.batch(Recurrent(), bytes_tokenizer, TEXTS, max_tokens=30, stop=["\x07"], **options)
    for text, row in zip(TEXTS, together, strict=True):
        got = list(mlxlin.stream(Recurrent(), bytes_tokenizer, text, max_tokens=30, stop=["\x07"], **options))
        assert row.text == "".join(piece.text for piece in got)
        assert [t for t in row.tokens if t != 257] == [piece.token for piece in got[:-1]]
        assert row.finish_reason == got[-1].finish_reason
        assert row.stats.prompt_tokens == len(text)


def test_rows_that_have_stopped_leave_the_batch(bytes_tokenizer: Tokenizer) -> None:
    class Countdown(Recurrent):
        """Says 65 until the position that the first token of the prompt names, then stops."""

        def predict(self, memory: mx.array, positions: mx.array) -> mx.array:
            said = mx.where(positions < 8, 65, 257)
            return 9.0 * (mx.arange(VOCAB)[None] == said[:, None])

    model = Countdown()
    rows = mlxlin.batch(model, bytes_tokenizer, ["a" * 6, "a" * 2, "a" * 4], max_tokens=20)
    assert [row.text for row in rows] == ["AA", "AAAAAA", "AAAA"]
    assert [row.finish_reason for row in rows] == ["stop"] * 3
    assert [row.stats.generated_tokens for row in rows] == [3, 7, 5]
    sizes = [call[0] for call in model.calls]
    assert sizes == [3, 3, 3, 3, 2, 2, 1, 1]


def test_an_empty_batch_is_empty(bytes_tokenizer: Tokenizer) -> None:
    assert mlxlin.batch(Recurrent(), bytes_tokenizer, []) == []


# ---- the shipped model -------------------------------------------------------------------------------------------

QUESTIONS = ["Hello!", "What is the capital of Japan?", "Who are you?", "Tell me about Italy, please."]


def test_the_shipped_model_says_the_same_in_chunks_in_batches_and_from_a_state(
    demo: tuple[Any, Tokenizer], chunk_of_four: None
) -> None:
    model, tokenizer = demo
    options: dict[str, Any] = {"max_tokens": 12, "temperature": 0.8, "seed": 0}
    rows = mlxlin.batch(model, tokenizer, QUESTIONS, **options)
    for question, row in zip(QUESTIONS, rows, strict=True):
        tokens = tokenizer.chat([{"role": "user", "content": question}])
        alone = list(mlxlin.stream(model, tokenizer, tokens, **options))
        assert row.text == "".join(piece.text for piece in alone)
        _, state = prefill(model, tokens[:5])
        resumed = list(mlxlin.stream(model, tokenizer, tokens[5:], state=state, **options))
        assert [piece.token for piece in resumed] == [piece.token for piece in alone]


def test_the_shipped_models_state_after_decoding_is_the_state_of_reading(demo: tuple[Any, Tokenizer]) -> None:
    """Taken in the middle, where the step behind it has been launched and has written to the keys and values."""
    model, tokenizer = demo
    prompt = tokenizer.chat([{"role": "user", "content": QUESTIONS[1]}])
    logits, state = prefill(model, prompt)
    decoding = decode(model, logits, state, Sampler(Sampling(), [prompt]), max_tokens=9)
    list(itertools.islice(decoding, 5))
    expected, _ = prefill(model, prompt + decoding.tokens + [7])
    again, _ = prefill(model, [7], decoding.state)
    np.testing.assert_allclose(np.array(again), np.array(expected), atol=1e-3)
    rest = [step.token for step in decoding]
    whole = [step.token for step in decode(model, logits, state, Sampler(Sampling(), [prompt]), max_tokens=9)]
    assert decoding.tokens == whole and rest == whole[5:]
