"""A vocabulary of the `tokenizers` library, and the bytes its tokens stand for."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import TokenizerError
from .files import AGAIN, AddedToken

if TYPE_CHECKING:
    import tokenizers

# Written by models as part of a reply, and needed to tell a thought from the answer, whatever the file flags them.
_VISIBLE = frozenset({"<think>", "</think>", "◁think▷", "◁/think▷"})

Piece = Callable[[str, bool], bytes]  # (token text as stored, first token of the text) -> bytes


def byte_alphabet() -> dict[int, str]:
    """The printable character that stands for each byte in byte-level vocabularies (GPT-2, Radford et al. 2019)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}


class HubVocabulary:
    """A `tokenizers.Tokenizer` with every id, special flag and byte piece at hand.

    Args:
        backend: the loaded tokenizer.
        origin: the file it came from, for messages.
        added: tokens and flags from the files around it.
    """

    def __init__(self, backend: tokenizers.Tokenizer, origin: Path, added: Iterable[AddedToken] = ()) -> None:
        self._backend = backend
        backend.no_truncation()  # a limit stored in the file would cut prompts without a word
        backend.no_padding()
        _complete(backend, origin, added)
        decoder = backend.decoder
        self._to_bytes = piece_function(json.loads(decoder.__getstate__()) if decoder else None, origin)
        known = backend.get_added_tokens_decoder()
        self._special = frozenset(id for id, token in known.items() if token.special and token.content not in _VISIBLE)
        self._size = max([backend.get_vocab_size(with_added_tokens=True), *(id + 1 for id in known)])
        self._pieces: dict[int, bytes] = {}
        self.prefix = _prefix(backend)

    @property
    def size(self) -> int:
        return self._size

    def encode(self, text: str) -> list[int]:
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def token_id(self, text: str) -> int | None:
        return self._backend.token_to_id(text)

    def is_special(self, token: int) -> bool:
        return token in self._special

    def piece(self, token: int, first: bool) -> bytes:
        if first:
            return self._read(token, True)
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._read(token, False)
        return piece

    def _read(self, token: int, first: bool) -> bytes:
        text = None if token in self._special or token < 0 else self._backend.id_to_token(token)
        return b"" if text is None else self._to_bytes(text, first)


def _complete(backend: tokenizers.Tokenizer, origin: Path, added: Iterable[AddedToken]) -> None:
    """Give the backend the tokens and flags that only the files around it know."""
    from tokenizers import AddedToken as Added

    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    for token in added:
        present = backend.token_to_id(token.content)
        if present is None and token.id is None:
            continue  # named somewhere, but without an id the model cannot have learned it
        if present is not None and token.id not in (None, present):
            raise TokenizerError(
                f"{origin} gives {token.content!r} the id {present}, tokenizer_config.json the id {token.id}.", AGAIN
            )
        before = known.get(token.content)
        if before is not None and (before.special or not token.special):
            continue
        rules = before or token
        flags = {name: getattr(rules, name) for name in ("single_word", "lstrip", "rstrip", "normalized")}
        backend.add_tokens([Added(token.content, special=token.special, **flags)])
        if token.id is not None and backend.token_to_id(token.content) != token.id:
            raise TokenizerError(
                f"{origin} has no room for {token.content!r} at id {token.id}, where tokenizer_config.json puts it.",
                AGAIN,
            )


def _prefix(backend: tokenizers.Tokenizer) -> tuple[int, ...]:
    """What the post-processor puts before a text; what it may put after (an end of text) would only end a prompt."""
    bare = backend.encode("a", add_special_tokens=False).ids
    full = backend.encode("a", add_special_tokens=True).ids
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return tuple(full[:start])
    return ()


def piece_function(decoder: Mapping[str, Any] | None, origin: Path) -> Piece:
    """The bytes of a token under a `tokenizers` decoder description.

    Raises:
        TokenizerError: a decoder that no language model of ours uses.
    """
    if decoder is None:  # tokenizers joins with spaces then
        return lambda text, first: text.encode() if first else b" " + text.encode()
    kind = decoder.get("type")
    if kind == "ByteLevel":
        return _byte_level()
    if kind == "Metaspace":
        return _metaspace(decoder)
    if kind == "Sequence":
        steps = list(decoder["decoders"])
        return piece_function(steps[0], origin) if len(steps) == 1 else _sentencepiece(steps, origin)
    if kind in ("Replace", "ByteFallback", "Fuse", "Strip"):
        return _sentencepiece([decoder], origin)
    raise TokenizerError(f"{origin} uses the decoder {kind!r}, which mlxlin does not know.")


def _byte_level() -> Piece:
    to_byte = {character: byte for byte, character in byte_alphabet().items()}

    def piece(text: str, first: bool) -> bytes:
        try:
            return bytes([to_byte[character] for character in text])
        except KeyError:  # an added token, stored as it reads
            return text.encode()

    return piece


def _metaspace(decoder: Mapping[str, Any]) -> Piece:
    mark = str(decoder.get("replacement", "▁"))
    keeps = decoder.get("prepend_scheme", "always") == "never"

    def piece(text: str, first: bool) -> bytes:
        return text.replace(mark, "" if first and not keeps else " ").encode()

    return piece


def _sentencepiece(steps: list[Mapping[str, Any]], origin: Path) -> Piece:
    """Replace, ByteFallback, Fuse, Strip in a row: the shape of converted SentencePiece vocabularies."""
    replacements: list[tuple[str, str]] = []
    byte_fallback = fused = False
    strip_each = strip_first = ""
    for step in steps:
        kind = step.get("type")
        if kind == "Replace" and "String" in step["pattern"] and not fused:
            replacements.append((step["pattern"]["String"], step["content"]))
        elif kind == "ByteFallback":
            byte_fallback = True
        elif kind == "Fuse":
            fused = True
        elif kind == "Strip" and step["start"] <= 1 and step["stop"] == 0:
            content = step["content"] if step["start"] else ""
            strip_first, strip_each = (content, strip_each) if fused else (strip_first, content)
        else:
            raise TokenizerError(f"{origin} uses a decoder that mlxlin does not know: {json.dumps(step)}.")

    def piece(text: str, first: bool) -> bytes:
        for old, new in replacements:
            text = text.replace(old, new)
        if byte_fallback and len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            try:
                return bytes([int(text[3:5], 16)])
            except ValueError:
                pass
        if strip_each:
            text = text.removeprefix(strip_each)
        if first and strip_first:
            text = text.removeprefix(strip_first)
        return text.encode()

    return piece
