"""A chat: a conversation with its branches, its settings and its session."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from typing import Any

import mlxlin
from mlxlin_cli import commands
from mlxlin_cli.branches import Branches
from mlxlin_cli.keeping import Keeper, Saved
from mlxlin_cli.loading import Loaded
from mlxlin_cli.options import sampling_arguments
from mlxlin_cli.reply import Printer, Reply, interruptible, stats_line
from mlxlin_cli.terminal import complain, progress, say

SAVED_OPTIONS = ("temperature", "top_p", "top_k", "min_p", "repeat_penalty", "presence_penalty", "seed", "think")


class Stopped(Exception):
    """The person stopped the reply before its first token."""


class Chat:
    """A conversation with its branches, and what a person has set around it.

    Attributes:
        loaded: who replies.
        options: sampling and limits under the command line's names; None where not given.
        branches: what was said.
        keeper: the session it is saved in.
        editing: number of the message that the next input replaces; 0 for none.
        last: what the last reply cost, in words.
        replies: how many were given; each has luck of its own under a given seed.
        left: the person wants to leave.
    """

    def __init__(self, loaded: Loaded, options: dict[str, Any]) -> None:
        model = loaded.model
        timeline = mlxlin.Timeline(model, store=mlxlin.PrefixStore(model.fingerprint))
        self.loaded, self.options = loaded, dict(options)
        self.branches = Branches(mlxlin.Conversation(model, loaded.tokenizer, timeline=timeline))
        self.keeper = Keeper()
        self.editing, self.last, self.replies, self.left = 0, "", 0, False

    @property
    def conversation(self) -> mlxlin.Conversation:
        """The branch talked in."""
        return self.branches.current

    @property
    def draft(self) -> str:
        """The message that is being edited; empty for none."""
        return str(self.conversation.turns[2 * (self.editing - 1)]["content"]) if self.editing else ""

    def take(self, text: str) -> None:
        """Run a command or reply to a message; an error on a terminal is told and the chat goes on."""
        turn, self.editing = self.editing, 0
        try:
            if not commands.run(self, text):
                self.replace(turn, text) if turn else self.reply(text)
        except mlxlin.MlxlinError as error:
            if not sys.stdin.isatty():
                raise
            complain(error.message, error.hint)

    def reply(self, text: str) -> None:
        """Answer a message, say what it cost, and save the session."""
        conversation, think = self.conversation, self.options["think"]
        messages = [*conversation.messages, {"role": "user", "content": text}]
        self._check_memory(len(conversation.prompt(text, think=think)))
        splitter = conversation.tokenizer.thought_splitter(messages, think=think)
        reply = self._stream(text, Printer(splitter, hide_thoughts=self.options["hide_thinking"]))
        self.replies += 1
        self.last = stats_line(reply.stats) if reply.stats else f"Stopped after {len(reply.pieces)} tokens."
        say(self.last, dim=True)
        self.save()

    def replace(self, turn: int, text: str) -> None:
        """Put `text` in the place of message number `turn` and go on from there; without a reply all stays."""
        conversation = self.conversation
        turns = list(conversation.turns)
        conversation.edit(turn)
        try:
            self.reply(text)
        finally:
            if len(conversation.turns) < 2 * turn:
                conversation.rewrite(turns, conversation.system)

    def open(self, name: str, *, from_text: bool, given: Mapping[str, Any] | None = None) -> bool:
        """Go on with the session of that name, or begin it; false where it is new. Options `given` win over saved ones.

        Raises:
            SessionError: it does not fit this model, is damaged, or is open in another chat.
        """

        def restore(arrays: Mapping[str, Any], record: Mapping[str, Any]) -> None:
            self.branches.restore(arrays, record, from_text=from_text)
            chosen = {key: value for key, value in record.get("options", {}).items() if key in SAVED_OPTIONS}
            chosen["logit_bias"] = [tuple(pair) for pair in record.get("logit_bias", ())]
            self.options |= {key: value for key, value in chosen.items() if (given or {}).get(key) in (None, ())}
            self.replies = record.get("replies", 0)

        existed = self.keeper.open(name, restore, from_text)
        self.keeper.saved = self.said()
        return existed

    def said(self) -> dict[str, Any]:
        """Everything a session consists of but the states, as plain JSON values."""
        return {
            **self.branches.record(),
            "options": {name: self.options[name] for name in SAVED_OPTIONS},
            "logit_bias": [list(pair) for pair in self.options["logit_bias"]],
            "replies": self.replies,
            "about": {"name": self.loaded.name, "bits": self.loaded.bits},
        }

    def save(self) -> bool:
        """Save the session if there is one; whether it is safe. A failure is told, and the chat goes on."""

        def snapshot() -> Saved:
            arrays, record = self.conversation.snapshot()
            return arrays, {**record, **self.said()}

        try:
            self.keeper.save(self.said(), snapshot)
        except (mlxlin.NumericsError, mlxlin.ResourceError) as error:
            complain(error.message, error.hint)
            return False
        return True

    def sampling(self) -> dict[str, Any]:
        """What was given of the sampling options, for the next reply."""
        chosen = sampling_arguments(self.options)
        if "seed" in chosen:
            chosen["seed"] += self.replies
        return chosen

    def _check_memory(self, prompt: int) -> None:
        context = self.options["context"] or self.loaded.model.context
        tokens = min(prompt + self.options["max_tokens"], context)
        self.loaded.check_memory(tokens, self.conversation.timeline.state.nbytes)

    def _stream(self, text: str, printer: Printer) -> Reply:
        with interruptible() as stopped, progress("Reading") as report:

            def watch(done: int, total: int) -> None:
                if report is not None:
                    report(done, total)
                if stopped():
                    raise Stopped

            pieces = self.conversation.ask(
                text,
                max_tokens=self.options["max_tokens"],
                stop=self.options["stop"],
                think=self.options["think"],
                context=self.options["context"],
                progress=watch,
                **self.sampling(),
            )
            # closed at once: what was said so far belongs to the conversation before anything else happens
            with contextlib.suppress(Stopped), contextlib.closing(pieces):
                printer.show(pieces, stopped)
        return printer.reply
