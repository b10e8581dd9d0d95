"""A conversation in messages, on a timeline: every reply costs what is new, and says what was reused.

The chat template turns messages into one text each time, and may rewrite what came before (most templates drop the
thoughts of earlier turns). So nothing is assumed: the whole prompt is tokenised, and the timeline finds in tokens where
it departs from what was read.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

from mlxlin.backend import mx
from mlxlin.checkpoints import Mark
from mlxlin.errors import InputError, NumericsError, SessionError, TokenizerError
from mlxlin.generate import Decoding, Piece, Stats, decode, pieces, room
from mlxlin.generate.text import stop_texts
from mlxlin.models import Model
from mlxlin.sampling import Sampler, Sampling
from mlxlin.timeline import Progress, Timeline, common_prefix
from mlxlin.tokenizer import Tokenizer

Message = dict[str, Any]
_OTHER_TEXT = "\N{SECTION SIGN}"  # stands in for a message, to see where its text begins
# why the next prompt may depart from what was read; completed by what it departs in
_TEMPLATE, _PERSON, _TOKENS = "the template rewrote", "you changed", "other tokens now spell"
_STOP_TEXT, _GIVEN_UP = "a stop text ended", "you stopped"


class Conversation:
    """Messages, and the timeline that has read them.

    Args:
        model, tokenizer: who replies.
        system: the system prompt.
        timeline: where it is read; a new one by default.

    Attributes:
        turns: the person's messages and the replies, in turn; ends with a reply.
        timeline: may be read, and advanced by nobody else.
    """

    def __init__(
        self, model: Model, tokenizer: Tokenizer, *, system: str | None = None, timeline: Timeline | None = None
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.system = system
        self.turns: list[Message] = []
        self.timeline = timeline or Timeline(model)
        self._cause = _TEMPLATE  # of the next departure from what was read

    @property
    def messages(self) -> list[Message]:
        """System prompt and turns."""
        return ([{"role": "system", "content": self.system}] if self.system else []) + self.turns

    def prompt(self, text: str, *, think: bool | None = None) -> list[int]:
        """The tokens that `ask(text)` will be behind."""
        return self.tokenizer.chat([*self.messages, {"role": "user", "content": text}], think=think)

    def ask(
        self,
        text: str,
        *,
        max_tokens: int = 2048,
        stop: str | Sequence[str] = (),
        think: bool | None = None,
        context: int | None = None,
        logprobs: int | None = None,
        progress: Progress | None = None,
        **sampling: Any,
    ) -> Generator[Piece, None, None]:
        """Reply to `text`; options as in `generate.stream`.

        Message and reply become part of the conversation when the iteration ends or is given up, if there is any reply.
        An error, or an interrupt while the prompt is read, leaves the conversation as it was.

        Yields:
            A piece for each token, and a last one whose stats tell the cost, with what was reused and why not more.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        tokens = self.tokenizer.chat(messages, think=think)
        stops = stop_texts(stop) + self.tokenizer.stop_texts
        chosen = Sampling(**{**self.tokenizer.generation_defaults, **sampling})
        limit = room(self.model, len(tokens), max_tokens, context)
        mx.reset_peak_memory()
        stats = self._read(tokens, self._marks(messages, tokens, think), progress)
        assert self.timeline.logits is not None
        decoding = decode(
            self.model,
            self.timeline.logits,
            self.timeline.state,
            Sampler(chosen, [tokens]),
            stop_ids=self.tokenizer.stop_ids,
            max_tokens=limit,
            logprobs=logprobs,
        )
        yield from self._reply(messages, decoding, stops, think, stats)

    def undo(self) -> str | None:
        """Take back the last message and its reply; returns the message, None when there is none."""
        return self._cut(len(self.turns) // 2 - 1) if self.turns else None

    def edit(self, turn: int) -> str:
        """Take back message number `turn` (from 1), its reply and everything after; returns the message.

        Raises:
            InputError: there is no such turn.
        """
        if not 1 <= turn <= len(self.turns) // 2:
            raise InputError(f"There is no turn {turn}.", f"The conversation has {len(self.turns) // 2} turns.")
        return self._cut(turn - 1)

    def fork(self) -> Conversation:
        """A second conversation at the same place, which shares everything until one of them goes on."""
        twin = Conversation(self.model, self.tokenizer, system=self.system, timeline=self.timeline.fork())
        twin.turns, twin._cause = [dict(turn) for turn in self.turns], self._cause
        return twin

    def rewrite(self, turns: Sequence[Message], system: str | None) -> None:
        """Replace everything said; what the new text has in common with what was read is reused."""
        if (self.turns, self.system) != (list(turns), system):
            self._cause = _PERSON
        self.turns, self.system = [dict(turn) for turn in turns], system

    def set_system(self, text: str | None) -> None:
        """Replace the system prompt; the conversation is read again behind it when the next reply is due."""
        self.rewrite(self.turns, text)

    def clear(self) -> None:
        """Forget all turns; the system prompt stays."""
        self.rewrite([], self.system)

    def snapshot(self) -> tuple[dict[str, mx.array], dict[str, Any]]:
        """Arrays and a record (plain JSON values) to save; `restore` reads them back."""
        arrays, line = self.timeline.snapshot()
        said = {"system": self.system, "turns": [dict(turn) for turn in self.turns], "cause": self._cause}
        return arrays, {**said, "timeline": line, **self._identity()}

    def restore(self, arrays: Mapping[str, mx.array], record: Mapping[str, Any], *, from_text: bool = False) -> None:
        """Become the saved conversation.

        Args:
            from_text: take over only what was said, to be read again: for another model or tokenizer, or without the
                arrays.

        Raises:
            SessionError: it was saved with another model, dtype, tokenizer or template, or does not fit together;
                nothing has changed then.
        """
        what = {"model": "model or quantisation", "dtype": "dtype", "tokenizer": "tokenizer or chat template"}
        if not from_text:
            for key, value in self._identity().items():
                if record.get(key) != value:
                    raise SessionError(
                        f"The session was saved with another {what[key]}.",
                        "Load it with that model, or let its text be read again (--from-text, or /load NAME text).",
                    )
        timeline = Timeline(self.model, budget=self.timeline.budget, store=self.timeline.store)
        try:
            turns = [dict(turn) for turn in record["turns"]]
            system, cause = record["system"], _TEMPLATE if from_text else record["cause"]
            if not from_text:
                timeline.restore_snapshot(arrays, record["timeline"])
        except (KeyError, TypeError, ValueError) as error:
            raise SessionError(f"The session is not whole: {error!r}.", "It was not saved by this mlxlin.") from error
        self.timeline, self.system, self.turns, self._cause = timeline, system, turns, cause

    def _identity(self) -> dict[str, str]:
        """What saved numbers depend on."""
        model, tokenizer = self.model, self.tokenizer
        return {"model": model.fingerprint, "dtype": str(model.dtype), "tokenizer": tokenizer.fingerprint}

    def _cut(self, turns: int) -> str:
        text = str(self.turns[2 * turns]["content"])
        self.rewrite(self.turns[: 2 * turns], self.system)
        return text

    def _read(self, tokens: list[int], marks: Sequence[Mark], progress: Progress | None) -> Stats:
        """Read the prompt, and tell what that cost."""
        start = time.perf_counter()
        cause = _TOKENS if self._cause == _TEMPLATE and self._spells_the_same(tokens) else self._cause
        reuse = self.timeline.resume(tokens, marks=marks, cause=cause, progress=progress)
        self._cause = _TEMPLATE
        seconds = time.perf_counter() - start
        return Stats(len(tokens), reuse.reused, prefill_seconds=seconds, reuse=reuse.why)

    def _spells_the_same(self, tokens: list[int]) -> bool:
        """Whether the prompt goes on from the text that was read, in other tokens than were generated."""
        read = self.timeline.tokens
        if tokens[: len(read)] == read:
            return False
        text = self.tokenizer.decode(read)
        return bool(text) and self.tokenizer.decode(tokens).startswith(text)

    def _reply(
        self,
        messages: Sequence[Message],
        decoding: Decoding,
        stops: tuple[str, ...],
        think: bool | None,
        stats: Stats,
    ) -> Iterator[Piece]:
        """Hand out the pieces; whatever ends them, what was generated is taken over, unless it is not finite."""
        said, finite = [Piece("")], True
        try:
            for piece in pieces(self.tokenizer, decoding, stop=stops, stats=stats):
                said.append(piece)
                yield piece
        except NumericsError:
            finite = False
            self.timeline.rewind(0)  # nobody knows where it began to go wrong: nothing of it may be used again
            raise
        finally:
            if finite and decoding.tokens:
                self.timeline.adopt(decoding.tokens, decoding.state)
                self.timeline.keep()
                message = self._message("".join(piece.text for piece in said), messages, think)
                if decoding.finish_reason is None and "reasoning_content" not in message:
                    self._cause = _STOP_TEXT if said[-1].finish_reason else _GIVEN_UP
                self.turns += [messages[-1], message]

    def _message(self, text: str, messages: Sequence[Message], think: bool | None) -> Message:
        """The reply as a message: thoughts apart from the answer, as templates want them."""
        splitter = self.tokenizer.thought_splitter(messages, think=think)
        parts = [(False, text)] if splitter is None else [*splitter.add(text), *splitter.finish()]
        thought = "".join(part for is_thought, part in parts if is_thought).strip()
        answer = "".join(part for is_thought, part in parts if not is_thought)
        message: Message = {"role": "assistant", "content": answer.lstrip("\n") if thought else answer}
        return message | ({"reasoning_content": thought} if thought else {})

    def _marks(self, messages: Sequence[Message], tokens: Sequence[int], think: bool | None) -> list[Mark]:
        """Where the last turn's message and its reply begin: where prompts of other, and of later turns depart."""
        turn = len(self.turns) // 2 + 1
        other, reply = [{"role": role, "content": _OTHER_TEXT} for role in ("user", "assistant")]
        message = common_prefix(tokens, self.tokenizer.chat([*messages[:-1], other], think=think))
        marks = [Mark(message, f"turn {turn}", shared=turn == 1)]
        try:
            later = common_prefix(tokens, self.tokenizer.chat([*messages, reply, other], think=think))
        except TokenizerError:  # a template that looks into replies
            return marks
        begins = min(later, len(tokens) - 1)  # the last token is needed again, for the logits behind it
        return [*marks, Mark(begins, f"the reply of turn {turn}")] if begins > message else marks
