"""Tokens in, whole characters out.

Every vocabulary can say which bytes one token adds to a text. Text is those bytes put one after the other and decoded
as UTF-8, so a character split over tokens is handed out once, whole, when its last byte arrives; the cost of a token
does not depend on how many came before.
"""

from __future__ import annotations

import codecs
from typing import Protocol


class Vocabulary(Protocol):
    """What the tokenizer needs of a vocabulary file, whatever its format."""

    @property
    def size(self) -> int:
        """Number of token ids: the highest one plus one."""

    @property
    def prefix(self) -> tuple[int, ...]:
        """The tokens that the vocabulary's own rules put before raw text, a beginning-of-text token as a rule."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, nothing added; special tokens written in the text are recognised."""

    def token_id(self, text: str) -> int | None:
        """The id of the token with exactly this text."""

    def is_special(self, token: int) -> bool:
        """Whether the token is a control token, which is never printed."""

    def piece(self, token: int, first: bool) -> bytes:
        """The bytes a token adds to a text; `first` when it opens the text. Empty for special and unknown tokens."""


class Detokenizer:
    """Turns a stream of tokens into text.

    Args:
        vocabulary: what the tokens mean.
        continues: the text goes on from an earlier one, so that a leading space belongs to it.
    """

    def __init__(self, vocabulary: Vocabulary, continues: bool = False) -> None:
        self._vocabulary = vocabulary
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._first = not continues

    def add(self, token: int) -> str:
        """The characters that this token completes; "" while a character is still open."""
        if self._vocabulary.is_special(token):
            return ""
        piece = self._vocabulary.piece(token, self._first)
        self._first = False
        return self._utf8.decode(piece)

    def finish(self) -> str:
        """What is left at the end: U+FFFD for a character that was cut, "" otherwise."""
        return self._utf8.decode(b"", final=True)
