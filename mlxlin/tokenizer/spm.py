"""SentencePiece `.model` files, for checkpoints that come without a tokenizer.json. Needs the `spm` extra."""

from __future__ import annotations

import re
from pathlib import Path

from ..errors import TokenizerError
from .files import Files

_SPACE = "\u2581"


class SentencePieceVocabulary:
    """A SentencePiece processor, with the control tokens of the files around it cut out of the text first.

    Raises:
        TokenizerError: the sentencepiece package is missing, or the file is not a model.
    """

    def __init__(self, path: Path, files: Files) -> None:
        try:
            import sentencepiece  # type: ignore[import-not-found, unused-ignore]
        except ImportError as error:
            raise TokenizerError(
                f"{path} is a SentencePiece vocabulary, and the sentencepiece package is not installed.",
                "Install the extra with: pip install 'mlxlin[spm]'",
            ) from error
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except (OSError, RuntimeError) as error:
            raise TokenizerError(f"{path} is not a SentencePiece model: {error}") from error
        base = self._model.vocab_size()
        control = {i for i in range(base) if self._model.is_control(i) or self._model.is_unknown(i)}
        self._added = {token.id: token.content for token in files.added if token.id is not None and token.id >= base}
        named = [token for token in files.added if self.token_id(token.content) is not None]
        self._by_text = {token.content: id for token in named if (id := self.token_id(token.content)) is not None}
        self._special = frozenset(control | {self._by_text[token.content] for token in named if token.special})
        texts = sorted(self._by_text, key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, texts)) + ")") if texts else None
        self.size = max([base - 1, *self._added]) + 1
        wants_bos = files.tokenizer.get("add_bos_token", True) and self._model.bos_id() >= 0
        self.prefix: tuple[int, ...] = (self._model.bos_id(),) if wants_bos else ()

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for part in self._split.split(text) if self._split else [text]:
            if part:
                ids += [self._by_text[part]] if part in self._by_text else self._model.encode(part)
        return ids

    def token_id(self, text: str) -> int | None:
        for id, content in self._added.items():
            if content == text:
                return id
        id = int(self._model.piece_to_id(text))
        return id if self._model.id_to_piece(id) == text else None

    def is_special(self, token: int) -> bool:
        return token in self._special

    def piece(self, token: int, first: bool) -> bytes:
        if token in self._added:
            return b"" if token in self._special else self._added[token].encode()
        if token in self._special or not 0 <= token < self._model.vocab_size():
            return b""
        text = self._model.id_to_piece(token)
        if self._model.is_byte(token):
            return bytes([int(text[3:5], 16)])
        text = str(text).replace(_SPACE, " ")
        return (text.removeprefix(" ") if first else text).encode()
