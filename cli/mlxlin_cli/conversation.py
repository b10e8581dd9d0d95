"""A conversation: its messages, and the reply to each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlxlin
from mlxlin_cli.loading import Loaded
from mlxlin_cli.options import SAMPLING, sampling_arguments
from mlxlin_cli.reply import Printer, Reply
from mlxlin_cli.terminal import Progress

Message = dict[str, str]


class Stopped(Exception):
    """The person stopped the reply before its first token."""


@dataclass
class Conversation:
    """The messages so far, and how replies are made.

    Attributes:
        loaded: who replies.
        options: sampling and limits under the command line's names; None or missing where not given.
        system: the system prompt.
        turns: the person's messages and the replies, in turn; always ends with a reply.
    """

    loaded: Loaded
    options: dict[str, Any]
    system: str | None = None
    turns: list[Message] = field(default_factory=list)
    replies: int = 0

    @property
    def messages(self) -> list[Message]:
        """System prompt and turns."""
        return ([{"role": "system", "content": self.system}] if self.system else []) + self.turns

    def ask(
        self, text: str, printer: Callable[[Any], Printer], stopped: Callable[[], bool], progress: Progress | None
    ) -> Reply:
        """Reply to `text`.

        Both become part of the conversation, also where the reply was stopped; neither does where there was no reply,
        be it for an error or for a stop before the first token.

        Args:
            text: the person's message.
            printer: makes the printer from what tells thoughts from the answer.
            stopped: asked again and again; true ends the reply.
            progress: called while the prompt is read.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        reply = self._reply(messages, printer, stopped, progress)
        self.replies += 1
        if reply.answer or reply.thought:
            said = {"role": "assistant", "content": reply.answer}
            said |= {"reasoning_content": reply.thought} if reply.thought else {}
            self.turns += [messages[-1], said]
        return reply

    def undo(self) -> str | None:
        """Take back the last message and its reply; returns the message, None when there is none."""
        if not self.turns:
            return None
        text = self.turns[-2]["content"]
        del self.turns[-2:]
        return text

    def settings(self) -> dict[str, Any]:
        """Sampling as it will be for the next reply, by the names `set` takes."""
        chosen = self._chosen()
        found = {option.flag[2:]: getattr(chosen, name) for name, option in SAMPLING.items()}
        return found | ({"seed": "random"} if chosen.seed is None else {})

    def set(self, name: str, value: str) -> None:
        """Change a sampling option.

        Raises:
            InputError: there is none of this name, or the value does not fit.
        """
        field = next((field for field, option in SAMPLING.items() if option.flag == f"--{name}"), None)
        if field is None:
            raise mlxlin.InputError(
                f"There is nothing called '{name}' to set.",
                f"There are: {', '.join(option.flag[2:] for option in SAMPLING.values())}.",
            )
        try:
            changed: dict[str, Any] = {field: SAMPLING[field].type(value)}
        except ValueError as error:
            raise mlxlin.InputError(f"'{value}' is no value for {name}.", f"Say for example: /set {name} 1") from error
        mlxlin.Sampling(**changed)  # refuses what is out of range
        self.options |= changed

    def clear(self) -> None:
        """Forget all turns; the system prompt stays."""
        self.turns.clear()

    def _reply(
        self,
        messages: list[Message],
        printer: Callable[[Any], Printer],
        stopped: Callable[[], bool],
        progress: Progress | None,
    ) -> Reply:
        tokenizer, think = self.loaded.tokenizer, self.options.get("think")

        def report(done: int, total: int) -> None:
            if progress is not None:
                progress(done, total)
            if stopped():
                raise Stopped

        self.loaded.check_memory(len(tokenizer.chat(messages, think=think)) + self.options["max_tokens"])
        pieces = mlxlin.stream(
            self.loaded.model,
            tokenizer,
            messages,
            max_tokens=self.options["max_tokens"],
            stop=self.options["stop"],
            think=think,
            context=self.options["context"],
            progress=report,
            **self._sampling(),
        )
        try:
            return printer(tokenizer.thought_splitter(messages, think=think)).show(pieces, stopped)
        except Stopped:
            return Reply()

    def _chosen(self) -> mlxlin.Sampling:
        values: dict[str, Any] = {**self.loaded.tokenizer.generation_defaults, **sampling_arguments(self.options)}
        return mlxlin.Sampling(**values)

    def _sampling(self) -> dict[str, Any]:
        chosen = sampling_arguments(self.options)
        if chosen.get("seed") is not None:
            chosen["seed"] += self.replies  # the same seed for every reply would repeat the same luck
        return chosen
