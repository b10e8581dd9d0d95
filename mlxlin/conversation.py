"""A conversation in messages, on a timeline: every reply costs what is new, and says what was reused.

The chat template turns messages into one text each time, and may rewrite what came before (most templates drop the
thoughts of earlier turns). So nothing is assumed: the whole prompt is tokenised, and the timeline finds in tokens where
it departs from what was read.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mlxlin.backend import mx
from mlxlin.errors import InputError, SessionError, TokenizerError
from mlxlin.generate import Decoding, Piece, Stats, decode, pieces, room
from mlxlin.models import Model
from mlxlin.sampling import Sampler, Sampling
from mlxlin.timeline import Mark, Progress, Timeline, common_prefix
from mlxlin.tokenizer import Tokenizer

Message = dict[str, Any]
_OTHER_TEXT = "\N{SECTION SIGN}"  # stands in for a message, to see where its text begins


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
        self._changed = False  # the person changed what was said, rather than the template

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
    ) -> Iterator[Piece]:
        """Reply to `text`; options as in `generate.stream`.

        Message and reply become part of the conversation when the iteration ends or is given up, if there is any reply.
        An error or an interrupt while the prompt is read leaves the conversation as it was.

        Yields:
            A piece for each token, and a last one whose stats tell the cost, with what was reused and why not more.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        tokens = self.tokenizer.chat(messages, think=think)
        chosen = Sampling(**{**self.tokenizer.generation_defaults, **sampling})
        limit = room(self.model, len(tokens), max_tokens, context)
        mx.reset_peak_memory()
        start = time.perf_counter()
        reuse = self.timeline.resume(
            tokens,
            marks=self._marks(messages, tokens, think),
            cause="you changed" if self._changed else "the template rewrote",
            progress=progress,
        )
        self._changed = False
        seconds = time.perf_counter() - start
        stats = Stats(len(tokens), reuse.reused, prefill_seconds=seconds, reuse=reuse.why)
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
        yield from self._reply(messages, decoding, stop, think, stats)

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
        twin.turns, twin._changed = [dict(turn) for turn in self.turns], self._changed
        return twin

    def set_system(self, text: str | None) -> None:
        """Replace the system prompt; the conversation is read again behind it when the next reply is due."""
        self._changed = self._changed or text != self.system
        self.system = text

    def clear(self) -> None:
        """Forget all turns; the system prompt stays."""
        self.turns.clear()
        self._changed = True

    def snapshot(self) -> tuple[dict[str, mx.array], dict[str, Any]]:
        """Arrays and a record to save; `restore` reads them back."""
        arrays, line = self.timeline.snapshot()
        record = {
            "system": self.system,
            "turns": self.turns,
            "timeline": line,
            "model": self.model.fingerprint,
            "dtype": str(self.model.dtype),
            "tokenizer": self.tokenizer.fingerprint,
        }
        return arrays, record

    def restore(self, arrays: Mapping[str, mx.array], record: Mapping[str, Any], *, from_tokens: bool = False) -> None:
        """Become the saved conversation.

        Args:
            from_tokens: take over only its messages, and read them again: for another model or tokenizer.

        Raises:
            SessionError: it was saved with another model, dtype, tokenizer or template.
        """
        own = {"model": self.model.fingerprint, "dtype": str(self.model.dtype), "tokenizer": self.tokenizer.fingerprint}
        what = {"model": "model or quantisation", "dtype": "dtype", "tokenizer": "tokenizer or chat template"}
        if not from_tokens:
            for key, value in own.items():
                if record.get(key) != value:
                    raise SessionError(
                        f"The session was saved with another {what[key]}.",
                        "Load it with that model, or let its text be read again (--from-text, or /load NAME text).",
                    )
        timeline = Timeline(self.model, budget=self.timeline.budget, store=self.timeline.store)
        if not from_tokens:
            timeline.restore_snapshot(arrays, record["timeline"])
        self.timeline, self.system = timeline, record["system"]
        self.turns, self._changed = [dict(turn) for turn in record["turns"]], False

    def _cut(self, turns: int) -> str:
        text = str(self.turns[2 * turns]["content"])
        del self.turns[2 * turns :]
        self._changed = True
        return text

    def _reply(
        self,
        messages: Sequence[Message],
        decoding: Decoding,
        stop: str | Sequence[str],
        think: bool | None,
        stats: Stats,
    ) -> Iterator[Piece]:
        """Hand out the pieces; whatever ends them, what was generated is taken over."""
        said: list[str] = []
        try:
            for piece in pieces(self.tokenizer, decoding, stop=stop, stats=stats):
                said.append(piece.text)
                yield piece
        finally:
            self.timeline.adopt(decoding.tokens, decoding.state)
            if decoding.tokens:
                self.timeline.keep()
                self.turns += [messages[-1], self._message("".join(said), messages, think)]

    def _message(self, text: str, messages: Sequence[Message], think: bool | None) -> Message:
        """The reply as a message: thoughts apart from the answer, as templates want them."""
        splitter = self.tokenizer.thought_splitter(messages, think=think)
        parts = [(False, text)] if splitter is None else [*splitter.add(text), *splitter.finish()]
        thought = "".join(part for is_thought, part in parts if is_thought).strip()
        answer = "".join(part for is_thought, part in parts if not is_thought)
        message: Message = {"role": "assistant", "content": answer.lstrip("\n") if thought else answer}
        return message | ({"reasoning_content": thought} if thought else {})

    def _marks(self, messages: Sequence[Message], tokens: Sequence[int], think: bool | None) -> list[Mark]:
        """Where the last turn's message and its reply begin in the prompt."""
        turn = len(self.turns) // 2 + 1
        other = [*messages[:-1], {"role": "user", "content": _OTHER_TEXT}]
        begins = common_prefix(tokens, self.tokenizer.chat(other, think=think))
        marks = [Mark(begins, f"turn {turn}", shared=turn == 1)]
        try:
            message = self.tokenizer.chat(messages, think=think, add_generation_prompt=False)
        except TokenizerError:  # a template that insists on replying
            return marks
        ends = common_prefix(tokens, message)
        return [*marks, Mark(ends, f"the reply of turn {turn}")] if begins < ends < len(tokens) else marks
