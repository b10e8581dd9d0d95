"""Tiny tokenizer folders, written from scratch, for the tests of tokens, sampling and generation."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from mlxlin.tokenizer.pieces import byte_alphabet

ALPHABET = byte_alphabet()


def write(folder: Path, backend: Tokenizer | None = None, **files: Any) -> Path:
    """A folder with tokenizer.json and JSON files by name (`tokenizer_config={...}`)."""
    folder.mkdir(parents=True, exist_ok=True)
    if backend is not None:
        backend.save(str(folder / "tokenizer.json"))
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
    return folder


def byte_level(*words: str, special: tuple[str, ...] = ("<s>", "<|im_end|>"), bos: bool = False) -> Tokenizer:
    """Byte-level BPE: ids 0..255 are the bytes, then each word byte by byte merged from the left, then special ones."""
    vocab = {ALPHABET[byte]: byte for byte in range(256)}
    merges = []
    for word in words:
        data = [ALPHABET[byte] for byte in word.encode()] if isinstance(word, str) else [ALPHABET[b] for b in word]
        text = data[0]
        for character in data[1:]:
            if text + character not in vocab:
                merges.append((text, character))
                vocab[text + character] = len(vocab)
            text += character
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    if bos:
        pieces = [(special[0], backend.token_to_id(special[0]))]
        backend.post_processor = processors.TemplateProcessing(single=f"{special[0]} $A", special_tokens=pieces)
    return backend


def llama_like(*, strip: bool = True) -> Tokenizer:
    """Converted SentencePiece with byte fallback, as the Llama family's tokenizer.json."""
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghijklmnopqrstuvwxyz.,é"]
    vocab = {text: id for id, text in enumerate(texts)}
    merges = []
    for left, right in [("▁", "t"), ("h", "e"), ("▁t", "he"), ("i", "n"), ("▁", "▁")]:
        merges.append((left, right))
        vocab[left + right] = len(vocab)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in texts[:3]])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


def metaspace() -> Tokenizer:
    """The newer form of the same: a Metaspace pre-tokenizer and decoder."""
    vocab = {text: id for id, text in enumerate(["<unk>", "▁", *"abcdefghijklmnopqrstuvwxyz", "▁a", "▁▁"])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[("▁", "a"), ("▁", "▁")], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return backend


def tiktoken_file(folder: Path, *words: bytes) -> list[bytes]:
    """Write `tiktoken.model`: the bytes, then the words in order. Returns all tokens by rank."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = [bytes([byte]) for byte in range(256)] + list(words)
    lines = [base64.b64encode(token) + b" " + str(rank).encode() for rank, token in enumerate(tokens)]
    (folder / "tiktoken.model").write_bytes(b"\n".join(lines) + b"\n")
    return tokens


def world_file(folder: Path, *words: str | bytes) -> dict[int, bytes]:
    """Write `rwkv_vocab_v20230424.txt` as its authors do: ids from 1, Python literals, byte lengths."""
    folder.mkdir(parents=True, exist_ok=True)
    singles: list[str | bytes] = [chr(byte) if byte < 128 else bytes([byte]) for byte in range(256)]
    entries = dict(enumerate([*singles, *words], 1))
    lengths = {id: len(word.encode() if isinstance(word, str) else word) for id, word in entries.items()}
    lines = [f"{id} {word!r} {lengths[id]}" for id, word in entries.items()]
    (folder / "rwkv_vocab_v20230424.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return {id: word.encode() if isinstance(word, str) else word for id, word in entries.items()}
