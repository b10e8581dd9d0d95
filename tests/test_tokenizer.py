"""Ids, text and stops of every vocabulary format, and what happens when files are missing or wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders
from tokenizers import Tokenizer as Backend

from mlxlin.errors import TokenizerError
from mlxlin.tokenizer import Tokenizer
from mlxlin.tokenizer.files import Files, read_files
from mlxlin.tokenizer.pieces import HubVocabulary
from mlxlin.tokenizer.world import WorldVocabulary
from tests.tokenizer_folders import byte_level, llama_like, metaspace, tiktoken_file, world_file, write

DEMO = Path(__file__).parents[1] / "mlxlin" / "demo"
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def joined(tokenizer: Tokenizer, ids: list[int], *, continues: bool = False) -> str:
    """The stream, put together again."""
    detokenizer = tokenizer.detokenizer(continues=continues)
    return "".join([detokenizer.add(id) for id in ids]) + detokenizer.finish()


def test_demo_round_trip() -> None:
    tokenizer = Tokenizer.from_folder(DEMO)
    text = "Hello, what is 2+2?\n\n  naïve 你好 😀"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.vocab_size == 4096
    assert tokenizer.has_chat_template
    assert tokenizer.stop_ids >= {0, 2}


def test_b23_characters_split_over_tokens_arrive_whole(tmp_path: Path) -> None:
    backend = byte_level(b"\xf0\x9f", "你".encode()[:2])
    tokenizer = Tokenizer.from_folder(write(tmp_path, backend))
    text = "aď你😀!"
    ids = tokenizer.encode(text)
    assert len(ids) == 1 + 2 + 2 + 3 + 1
    detokenizer = tokenizer.detokenizer()
    parts = [detokenizer.add(id) for id in ids]
    assert parts == ["a", "", "ď", "", "你", "", "", "😀", "!"]
    assert detokenizer.finish() == ""


def test_b23_a_character_cut_at_the_end_is_not_lost_silently(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write(tmp_path, byte_level()))
    ids = tokenizer.encode("x😀")[:-1]
    assert joined(tokenizer, ids) == tokenizer.decode(ids) == "x\ufffd"


@given(st.lists(st.integers(0, 270), max_size=40))
def test_b23_streamed_equals_decoded_for_any_bytes(ids: list[int]) -> None:
    """Byte-level, valid UTF-8 or not: what the `tokenizers` library decodes at once."""
    backend = byte_level(b"\xf0\x9f", "你".encode()[:2], "the", "é")
    tokenizer = Tokenizer(HubVocabulary(backend, Path("tokenizer.json")), _no_files(), "")
    assert joined(tokenizer, ids) == tokenizer.decode(ids) == backend.decode(ids, skip_special_tokens=True)


@given(st.text(st.sampled_from("the in.,éaz 你😀\n"), max_size=30))
@pytest.mark.parametrize(
    "make", [llama_like, lambda: llama_like(strip=False), metaspace], ids=["llama", "gemma", "metaspace"]
)
def test_b23_streamed_equals_decoded_with_leading_spaces(make: type, text: str) -> None:
    backend: Backend = make()
    tokenizer = Tokenizer(HubVocabulary(backend, Path("tokenizer.json")), _no_files(), "")
    ids = tokenizer.encode(text)
    assert joined(tokenizer, ids) == tokenizer.decode(ids) == backend.decode(ids, skip_special_tokens=True)


def test_continuing_a_raw_prompt_keeps_the_space() -> None:
    tokenizer = Tokenizer(HubVocabulary(llama_like(), Path("tokenizer.json")), _no_files(), "")
    ids = tokenizer.encode("the the")
    assert joined(tokenizer, ids[-1:], continues=True) == " the"
    assert joined(tokenizer, ids[-1:]) == "the"


def _no_files() -> Files:
    return read_files(Path("nowhere"))


def test_special_tokens_are_not_printed_but_thoughts_are(tmp_path: Path) -> None:
    backend = byte_level(special=("<s>", "<|im_end|>", "<think>"))
    tokenizer = Tokenizer.from_folder(write(tmp_path, backend))
    ids = tokenizer.encode("a<|im_end|>b<think>c")
    assert len(ids) == 5
    assert tokenizer.decode(ids) == "ab<think>c"
    assert tokenizer.decode([5000, -1]) == ""  # ids of padding rows in the embedding


def test_b22_exactly_one_bos(tmp_path: Path) -> None:
    config = {"bos_token": "<s>", "chat_template": "{{ bos_token }}" + CHATML}
    for name, bos, extra in [("post", True, {}), ("flag", False, {"add_bos_token": True})]:
        folder = write(tmp_path / name, byte_level(bos=bos), tokenizer_config=config | extra)
        tokenizer = Tokenizer.from_folder(folder)
        bos_id = tokenizer.vocabulary.token_id("<s>")
        assert tokenizer.encode("hi").count(bos_id) == 1
        assert tokenizer.encode("<s>hi").count(bos_id) == 1
        assert tokenizer.encode("").count(bos_id) == 1
        chat = tokenizer.chat([{"role": "user", "content": "hi"}])
        assert chat[0] == bos_id and chat.count(bos_id) == 1
    without = Tokenizer.from_folder(write(tmp_path / "none", byte_level(), tokenizer_config={"bos_token": "<s>"}))
    assert without.encode("hi") == list(b"hi")


def test_b21_stop_tokens_are_united(tmp_path: Path) -> None:
    backend = byte_level(special=tuple(f"<{n}>" for n in range(6)))  # ids 256 to 261
    folder = write(
        tmp_path,
        backend,
        generation_config={"eos_token_id": 5},
        config={"eos_token_id": [6, 7], "text_config": {"eos_token_id": 9}},
        tokenizer_config={
            "eos_token": {"content": "<2>", "__type": "AddedToken"},
            "chat_template": "{% for m in messages %}{{ m.content }}<4>\n{% endfor %}",
        },
    )
    assert Tokenizer.from_folder(folder).stop_ids == {5, 6, 7, 9, 258, 260}
    write(folder, tokenizer_config={}, special_tokens_map={"eos_token": "<3>"}, config={}, generation_config={})
    assert Tokenizer.from_folder(folder).stop_ids == {259}


def test_the_end_of_a_turn_is_the_last_special_token_of_the_template(tmp_path: Path) -> None:
    template = "{% for m in messages %}<0>{{ m.role }}<1>{{ m.content }}<2>message<1><3>{% endfor %}"
    backend = byte_level(special=("<0>", "<1>", "<2>", "<3>"))
    tokenizer = Tokenizer.from_folder(write(tmp_path, backend, tokenizer_config={"chat_template": template}))
    assert tokenizer.stop_ids == {tokenizer.vocabulary.token_id("<3>")}
    write(tmp_path, tokenizer_config={"chat_template": "{{ raise_exception('never') }}"})
    assert Tokenizer.from_folder(tmp_path).stop_ids == frozenset()


def test_added_tokens_of_the_config_reach_the_vocabulary(tmp_path: Path) -> None:
    added = {"258": {"content": "<tool>", "special": False}, "259": {"content": "<|end|>", "special": True}}
    folder = write(tmp_path, byte_level(), tokenizer_config={"added_tokens_decoder": added, "eos_token": "<|end|>"})
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.encode("a<tool><|end|>") == [97, 258, 259]
    assert tokenizer.decode([97, 258, 259]) == "a<tool>"
    assert tokenizer.stop_ids == {259}
    added["900"] = {"content": "<far>", "special": True}
    write(folder, tokenizer_config={"added_tokens_decoder": added})
    with pytest.raises(TokenizerError, match="<far>.*900"):
        Tokenizer.from_folder(folder)


def test_stored_truncation_and_padding_are_ignored(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(3)
    backend.enable_padding(length=10)
    assert len(Tokenizer.from_folder(write(tmp_path, backend)).encode("abcdefgh")) == 8


def test_lone_surrogates_become_replacement_characters() -> None:
    tokenizer = Tokenizer.from_folder(DEMO)
    assert tokenizer.decode(tokenizer.encode("a\udce9b")) == "a\ufffdb"
    assert tokenizer.decode(tokenizer.encode("\ud83d\ude00")) == "😀"


def test_generation_defaults_take_our_names(tmp_path: Path) -> None:
    stored = {"do_sample": True, "temperature": 0.7, "top_k": 20, "repetition_penalty": 1.1, "top_p": None}
    folder = write(tmp_path, byte_level(), generation_config=stored)
    assert Tokenizer.from_folder(folder).generation_defaults == {"temperature": 0.7, "top_k": 20, "repeat_penalty": 1.1}
    write(folder, generation_config={"do_sample": False, "temperature": 0.7})
    assert Tokenizer.from_folder(folder).generation_defaults == {"temperature": 0.0}


def test_fingerprint_follows_vocabulary_template_and_special_tokens(tmp_path: Path) -> None:
    one = write(tmp_path / "one", byte_level(), tokenizer_config={"chat_template": CHATML})
    same = write(tmp_path / "same", byte_level(), tokenizer_config={"chat_template": CHATML})
    print_of = lambda folder: Tokenizer.from_folder(folder).fingerprint  # noqa: E731
    assert print_of(one) == print_of(same)
    others = [
        write(tmp_path / "words", byte_level("the"), tokenizer_config={"chat_template": CHATML}),
        write(tmp_path / "template", byte_level(), tokenizer_config={"chat_template": CHATML + " "}),
        write(tmp_path / "eos", byte_level(), tokenizer_config={"chat_template": CHATML, "eos_token": "<s>"}),
    ]
    assert len({print_of(one), *map(print_of, others)}) == 4


# ---- tiktoken ----------------------------------------------------------------------------------------------------


def _reference_bpe(piece: bytes, ranks: dict[bytes, int]) -> list[int]:
    """tiktoken's definition: merge the neighbours whose bytes together have the lowest rank, until none have one."""
    if piece in ranks:
        return [ranks[piece]]
    parts = [bytes([byte]) for byte in piece]
    while len(parts) > 1:
        found = [(ranks[parts[i] + parts[i + 1]], i) for i in range(len(parts) - 1) if parts[i] + parts[i + 1] in ranks]
        if not found:
            break
        _, i = min(found)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return [ranks[part] for part in parts]


WORDS = (b"ab", b"bc", b"abc", b"cab", b"aa", b"aaaa", b"abab", "你".encode()[1:], "你".encode())


@given(st.text(st.sampled_from("abc你"), min_size=1, max_size=12))
def test_tiktoken_gives_the_ids_of_its_definition(text: str) -> None:
    tokens = [bytes([byte]) for byte in range(256)] + list(WORDS)
    ranks = {token: rank for rank, token in enumerate(tokens)}
    from mlxlin.tokenizer.tiktoken import _backend

    backend = _backend(ranks, r"[\s\S]+")
    assert backend.encode(text).ids == _reference_bpe(text.encode(), ranks)


def test_tiktoken_file_with_kimis_split_and_special_tokens(tmp_path: Path) -> None:
    tokens = tiktoken_file(tmp_path, b"he", b"llo", b"hello", "你好".encode(), b"DEF", b"ABC", b"bcD")
    first = len(tokens)
    added = {
        str(first): {"content": "[BOS]", "special": True},
        str(first + 2): {"content": "<|im_end|>", "special": True},
        str(first + 9): {"content": "<think>", "special": False},
    }
    config = {"auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}}
    write(tmp_path, tokenizer_config=config | {"added_tokens_decoder": added, "eos_token": "<|im_end|>"})
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode("hello") == [tokens.index(b"hello")]
    assert tokenizer.encode("hello你好") == [tokens.index(b"hello"), tokens.index("你好".encode())]
    assert tokenizer.encode("abcDEF")[-1] == tokens.index(b"DEF")  # a new word where lower case ends
    assert tokenizer.encode("12345") == [*b"12345"]
    assert tokenizer.encode("hi<|im_end|>[BOS]<think>") == [*b"hi", first + 2, first, first + 9]
    assert tokenizer.encode(f"<|reserved_token_{first + 1}|>") == [first + 1]
    assert tokenizer.vocab_size == first + 256
    assert tokenizer.stop_ids == {first + 2}
    assert tokenizer.decode([*b"hi", first + 2, first + 9]) == "hi<think>"


def test_a_broken_tiktoken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "tiktoken.model").write_bytes(b"YQ== 0\nYg== 2\n")
    with pytest.raises(TokenizerError, match="tiktoken.model"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tiktoken.model").write_bytes(b"YQ== 0\nnot base64\n")
    with pytest.raises(TokenizerError, match="tiktoken.model"):
        Tokenizer.from_folder(tmp_path)


# ---- RWKV World --------------------------------------------------------------------------------------------------


def test_b26_world_tokens_are_byte_strings(tmp_path: Path) -> None:
    text = "안녕하세요"
    words = world_file(tmp_path, "안", b"\xeb\x85", "hello", "hell", "\n\n", 'it\'s "q"\u2028', " ")
    tokenizer = Tokenizer.from_folder(tmp_path)
    ids = tokenizer.encode(text)
    assert b"".join(words[id] for id in ids) == text.encode()
    assert words[ids[0]] == "안".encode() and words[ids[1]] == b"\xeb\x85"
    assert [words[id] for id in tokenizer.encode("hellohelp")] == [b"hello", b"h", b"e", b"l", b"p"]
    detokenizer = tokenizer.detokenizer()
    parts = [detokenizer.add(id) for id in ids]
    assert "".join(parts) == text and "\ufffd" not in "".join(parts)
    assert tokenizer.decode(tokenizer.encode('it\'s "q"\u2028\n\n')) == 'it\'s "q"\u2028\n\n'


@given(st.binary(max_size=40))
def test_b26_round_trip_of_all_byte_strings(data: bytes) -> None:
    tokens = {i + 1: bytes([i]) for i in range(256)} | {257: b"ab", 258: b"abcd", 259: b"\xff\xfe\xfd"}
    vocabulary = WorldVocabulary(tokens)
    ids = vocabulary.encode_bytes(data)
    assert vocabulary.decode_bytes(ids) == data
    at = 0
    for id in ids:  # greedy: no longer token fits where a shorter one was taken
        assert not any(data.startswith(t, at) and len(t) > len(tokens[id]) for t in tokens.values())
        at += len(tokens[id])


def test_world_end_of_text_template_and_turn_end(tmp_path: Path) -> None:
    world_file(tmp_path, "\n\n")
    config = {"eos_token": "\n\n", "added_tokens_decoder": {"65530": {"content": "\n\n", "special": True}}}
    write(tmp_path, tokenizer_config=config)
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.stop_ids == {0}  # "\n\n" ends paragraphs as well
    assert tokenizer.encode("\n\n") == [257]
    assert tokenizer.encode("<|rwkv_tokenizer_end_of_text|>a") == [0, 98]
    assert tokenizer.decode([0, 98]) == "a"
    messages = [
        {"role": "user", "content": "Hi\n\nyou"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "2?"},
    ]
    assert tokenizer.render(messages) == "User: Hi\nyou\n\nAssistant: Hello\n\nUser: 2?\n\nAssistant:"
    assert tokenizer.render(messages[:1], think=True).endswith("Assistant: <think")
    assert tokenizer.render(messages[:1], think=False).endswith("Assistant: <think>\n</think>")
    assert tokenizer.stop_texts == ("\n\nUser:",)
    splitter = tokenizer.thought_splitter(messages[:1], think=True)
    assert splitter is not None
    assert splitter.add(">\nHm.</th") + splitter.add("ink>\nYes") == [(True, "\nHm."), (False, "\nYes")]


@pytest.mark.parametrize(
    "line", ["257 'ab' 3", "257 __import__('os') 2", "x 'ab' 2", "257 'a', 'b' 2", "1 'ab' 2", "257 ab"]
)
def test_a_broken_world_line_is_named(tmp_path: Path, line: str) -> None:
    world_file(tmp_path)
    path = tmp_path / "rwkv_vocab_v20230424.txt"
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(TokenizerError, match="rwkv_vocab_v20230424.txt line 257"):
        Tokenizer.from_folder(tmp_path)


# ---- files -------------------------------------------------------------------------------------------------------


def test_no_tokenizer_names_the_folder(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=str(tmp_path)) as error:
        Tokenizer.from_folder(tmp_path)
    assert "tokenizer.json" in error.value.hint


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "special_tokens_map.json"]
)
@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff\xfe\x00", b""], ids=["cut", "list", "binary", "empty"])
def test_damaged_files_are_named(tmp_path: Path, name: str, content: bytes) -> None:
    write(tmp_path, byte_level(), tokenizer_config={}, generation_config={})
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TokenizerError, match=name):
        Tokenizer.from_folder(tmp_path)


def test_an_unknown_decoder_is_an_error_not_a_guess(tmp_path: Path) -> None:
    backend = byte_level()
    backend.decoder = decoders.CTC()
    with pytest.raises(TokenizerError, match="CTC"):
        Tokenizer.from_folder(write(tmp_path, backend))


def test_sentencepiece_without_the_extra_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "sentencepiece", None)
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02")
    with pytest.raises(TokenizerError, match="tokenizer.model") as error:
        Tokenizer.from_folder(tmp_path)
    assert "mlxlin[spm]" in error.value.hint


def test_template_files_and_lists(tmp_path: Path) -> None:
    entries = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "T"}]
    folder = write(tmp_path, byte_level(), tokenizer_config={"chat_template": entries})
    ask = [{"role": "user", "content": "x"}]
    tokenizer = Tokenizer.from_folder(folder)
    assert (tokenizer.render(ask), tokenizer.render(ask, tools=[])) == ("A", "T")
    (folder / "chat_template.jinja").write_text("J")
    assert Tokenizer.from_folder(folder).render(ask, tools=[]) == "J"
    (folder / "chat_template.jinja").unlink()
    write(folder, tokenizer_config={}, chat_template={"chat_template": "V"})
    assert Tokenizer.from_folder(folder).render(ask) == "V"
    write(folder, chat_template={})
    plain = Tokenizer.from_folder(folder)
    assert not plain.has_chat_template and not plain.can_think
    with pytest.raises(TokenizerError, match="no chat template"):
        plain.chat(ask)


def test_special_tokens_map_fills_what_the_config_leaves_out(tmp_path: Path) -> None:
    backend = byte_level(special=("<s>", "</s>", "<pad>"))
    folder = write(tmp_path, backend, special_tokens_map={"bos_token": "<s>", "eos_token": {"content": "</s>"}})
    assert Tokenizer.from_folder(folder).special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    write(folder, tokenizer_config={"eos_token": "<pad>", "added_tokens_decoder": {}})
    assert Tokenizer.from_folder(folder).special_tokens["eos_token"] == "<pad>"


def test_a_token_flagged_special_only_in_the_config_is_not_printed(tmp_path: Path) -> None:
    backend = byte_level()
    backend.add_tokens([AddedToken("<x>", special=False, normalized=False)])
    folder = write(tmp_path, backend, tokenizer_config={"additional_special_tokens": ["<x>", "<unknown>"]})
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.decode(tokenizer.encode("a<x>b")) == "ab"
    assert json.loads(backend.to_str())["added_tokens"][-1]["content"] == "<x>"
