"""Chat templates and token ids against transformers itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlxlin.errors import MlxlinError
from mlxlin.tokenizer import Tokenizer
from mlxlin.tokenizer import template as template_module
from tests.templates.cases import CASES, NAMES, SPECIAL, FrozenClock, golden, render_with_transformers, source
from tests.tokenizer_folders import byte_level, llama_like, write

pytestmark = pytest.mark.parity
GOLDEN = golden()


@pytest.mark.parametrize("name", NAMES)
def test_stored_texts_are_what_transformers_renders(name: str) -> None:
    assert {case: render_with_transformers(name, case) for case in CASES} == GOLDEN[name]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(name) -> (transformers tokenizer, ours) of one folder with that template."""
    transformers = pytest.importorskip("transformers")

    def make(name: str) -> tuple[Any, Tokenizer]:
        texts = ("<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **SPECIAL}
        backend = byte_level("the", "assistant", special=texts)
        folder = write(tmp_path_factory.mktemp(name), backend, tokenizer_config=config)
        (folder / "chat_template.jinja").write_text(source(name), encoding="utf-8")
        return transformers.AutoTokenizer.from_pretrained(folder), Tokenizer.from_folder(folder)

    return make


@pytest.mark.parametrize("name", NAMES)
def test_chat_ids_equal_apply_chat_template(name: str, pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.utils import chat_template_utils

    monkeypatch.setattr(chat_template_utils, "datetime", FrozenClock)
    monkeypatch.setattr(template_module, "datetime", FrozenClock)
    theirs, ours = pair(name)
    compared = 0
    for messages, options in CASES.values():
        options = {"add_generation_prompt": True} | options
        switch = ours.template().thinking_switch
        if "think" in options and switch is None:
            continue
        their_options = {switch if key == "think" else key: value for key, value in options.items()}
        try:
            expected = list(theirs.apply_chat_template(messages, return_dict=False, **their_options))
        except Exception:
            with pytest.raises(MlxlinError):
                ours.chat(messages, **options)
            continue
        assert ours.chat(messages, **options) == expected
        compared += 1
    assert compared >= 8 or name in ("escape", "append", "hidden")


@pytest.mark.parametrize("make", [lambda: byte_level("the", bos=True), llama_like], ids=["byte_level", "llama"])
def test_raw_ids_and_text_equal(make: Any, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = write(
        tmp_path, make(), tokenizer_config={"bos_token": "<s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    )
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), Tokenizer.from_folder(folder)
    for text in ["the inn", " the", "é 你好 😀", "a\n\n  b", "<s> x"]:
        expected = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text, bos=False) == expected
        assert ours.decode(expected) == theirs.decode(expected, skip_special_tokens=True)
    assert ours.encode("the") == theirs("the")["input_ids"]


def test_tiktoken_conversion_equals_transformers(tmp_path: Path) -> None:
    """Same vocabulary, special ids and merges as transformers' own converter, which needs the tiktoken package."""
    pytest.importorskip("tiktoken")
    from transformers.convert_slow_tokenizer import TikTokenConverter

    from tests.tokenizer_folders import tiktoken_file

    tiktoken_file(tmp_path, b"he", b"ll", b"hell", b"hello", b" w", b" wo", "你".encode())
    theirs = TikTokenConverter(str(tmp_path / "tiktoken.model")).converted()
    ours = Tokenizer.from_folder(tmp_path)
    for text in ["hello world", "你好 12345 it's", "a  b\n\nc"]:
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False).ids


def test_sentencepiece_model_equals_its_own_library(tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("the cat sat on the mat\nit was the inn of the sea\nnever again\n" * 50, encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus), model_prefix=str(tmp_path / "tokenizer"), vocab_size=280, byte_fallback=True, minloglevel=2
    )
    added = {"280": {"content": "<|im_end|>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added, "eos_token": "</s>"}))
    reference = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    tokenizer = Tokenizer.from_folder(tmp_path)
    for text in ["the cat", "  two  spaces", "你好 😀", "new\nline"]:
        ids = reference.encode(text)
        assert tokenizer.encode(text) == [reference.bos_id(), *ids]
        assert tokenizer.decode(ids) == reference.decode(ids)
    assert tokenizer.encode("the<|im_end|>", bos=False) == [*reference.encode("the"), 280]
    assert tokenizer.decode([280]) == ""
    assert tokenizer.stop_ids == {reference.eos_id()}
    assert tokenizer.vocab_size == 281
