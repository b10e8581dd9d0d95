"""Tokens to text while they arrive, and where the text stops."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from mlxlin.backend import mx
from mlxlin.errors import InputError
from mlxlin.generate.decoding import Decoding
from mlxlin.generate.records import Finish, Piece, Stats
from mlxlin.tokenizer.thoughts import held_back

if TYPE_CHECKING:
    from mlxlin.tokenizer import Tokenizer


def stop_texts(stop: str | Sequence[str]) -> tuple[str, ...]:
    """Stop texts as a tuple.

    Raises:
        InputError: one is empty or not a string.
    """
    texts = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(isinstance(text, str) and text for text in texts):
        raise InputError("A stop text is empty or not a string.", "Leave it out.")
    return texts


class Text:
    """The text of one row: whole characters; what may turn out to begin a stop text is held back, and no more.

    Attributes:
        stopped: a stop text was found; what follows is dropped.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = (), continues: bool = False) -> None:
        self._detokenizer = tokenizer.detokenizer(continues=continues)
        self._stop = stop
        self._held = ""
        self.stopped = False

    def add(self, token: int) -> str:
        """Text that is certain after this token."""
        return self._certain(self._detokenizer.add(token))

    def finish(self) -> str:
        """What was held back, when nothing more comes."""
        if self.stopped:
            return ""
        text = self._certain(self._detokenizer.finish())
        return text if self.stopped else text + self._held

    def _certain(self, new: str) -> str:
        text = self._held + new
        found = [(at + len(word), at) for word in self._stop if (at := text.find(word)) >= 0]
        if found:  # the one that is complete first, however the text arrived
            self.stopped = True
            return text[: min(found)[1]]
        keep = held_back(text, self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def pieces(
    tokenizer: Tokenizer,
    decoding: Decoding,
    *,
    stop: str | Sequence[str] = (),
    continues: bool = False,
    stats: Stats | None = None,
) -> Iterator[Piece]:
    """One piece for each token of a `Decoding`, and a last one with what was held back, finish_reason and stats.

    Args:
        stop: texts that end the reply and are no part of it; they may begin and end anywhere in a token.
        continues: the text goes on from a raw prompt (see `Tokenizer.detokenizer`).
        stats: what is known of the prompt; comes back completed.
    """
    text = Text(tokenizer, stop_texts(stop), continues)
    for step in decoding:
        yield Piece(text.add(step.token), step.token, step.logprob, step.top)
        if text.stopped:
            break
    rest = text.finish()
    finish: Finish = "stop" if text.stopped else decoding.finish_reason or "length"
    stats = replace(
        stats or Stats(prompt_tokens=0),
        generated_tokens=len(decoding.tokens),
        decode_seconds=decoding.seconds,
        finish_reason=finish,
        state_bytes=decoding.state_bytes,
        peak_memory_bytes=mx.get_peak_memory(),
    )
    yield Piece(rest, finish_reason=finish, stats=stats)
