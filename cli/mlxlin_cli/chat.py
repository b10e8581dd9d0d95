"""`mlxlin chat`: a conversation on the terminal, or line by line through a pipe."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

import click

import mlxlin
from mlxlin_cli import commands
from mlxlin_cli.lines import reader, unwrap
from mlxlin_cli.loading import Loaded, open_model
from mlxlin_cli.options import (
    Settings,
    debug_option,
    loading_options,
    reply_options,
    sampling_arguments,
    sampling_options,
)
from mlxlin_cli.reply import Printer, interruptible, stats_line
from mlxlin_cli.terminal import complain, number, progress, say

if TYPE_CHECKING:
    from mlxlin.conversation import Conversation
    from mlxlin.generate import Piece

EPILOG = '''\b
In the conversation:
  /help lists the commands; /quit or Ctrl-D leaves; Ctrl-C stops a reply
  \\ at the end of a line, or Alt-Enter, begins a new one; """ encloses several

\b
Examples:
  mlxlin chat -m Qwen/Qwen3.5-0.8B --system "Answer in one sentence."
  mlxlin chat --session holiday          go on where you left, without reading it again
'''


@click.command("chat", epilog=EPILOG, short_help="A conversation, never read twice.")
@click.option("--session", metavar="NAME", help="Go on with a saved conversation, or begin one; saved on leaving.")
@click.option("--from-text", is_flag=True, help="Read the session's text again: it was saved with another model.")
@click.option("-n", "--max-tokens", type=click.IntRange(1), default=2048, show_default=True, help="Tokens per reply.")
@reply_options
@sampling_options
@loading_options
@debug_option
@click.pass_obj
def command(settings: Settings, /, session: str | None, from_text: bool, **options: Any) -> None:
    """Talk with a model. After every reply one line says what it cost, and what did not have to be read again."""
    from mlxlin.store import home

    if from_text and not session:
        raise click.UsageError("--from-text needs --session.")
    chat = Chat(open_model(settings.model, bits=options["bits"], revision=options["revision"]), options)
    if session:
        chat.open_session(session, from_text)
    if options["system"] is not None:
        chat.conversation.set_system(options["system"])
    if sys.stdin.isatty():
        say(greeting(chat), dim=True)
    read = reader(home() / "chat-history", [f"/{name}" for name in commands.COMMANDS])
    with saved_on_leaving(chat):
        while not chat.left:
            try:
                if text := unwrap(read(chat.take_draft())):
                    chat.take(text)
            except EOFError:
                break
            except KeyboardInterrupt:  # a second one while a reply was being stopped, or one between two lines
                if not sys.stdin.isatty():
                    raise
                say("Stopped.", dim=True)


def greeting(chat: Chat) -> str:
    """What is talked with."""
    turns = len(chat.conversation.turns) // 2
    session = f" · session '{chat.session}', {turns} turns" if chat.session else ""
    size = number(chat.loaded.model.parameter_count / 1e6)
    return f"{chat.loaded.name} · {size} M parameters{session} · /help for commands, Ctrl-D to leave"


class Stopped(Exception):
    """The person stopped the reply before its first token."""


@dataclass
class Chat:
    """A conversation and what a person has set around it.

    Attributes:
        loaded: who replies.
        options: sampling and limits under the command line's names; None where not given.
        session: the name it is saved under on leaving; empty for not at all.
        forks: places kept by /fork.
        draft: text to edit in the next input.
        last: what the last reply cost, in words.
        replies: how many were given; each has luck of its own under a given seed.
        left: the person wants to leave.
    """

    loaded: Loaded
    options: dict[str, Any]
    session: str = ""
    forks: dict[str, Conversation] = field(default_factory=dict)
    draft: str = ""
    last: str = ""
    replies: int = 0
    left: bool = False

    def __post_init__(self) -> None:
        from mlxlin.conversation import Conversation
        from mlxlin.store import PrefixStore, SessionStore
        from mlxlin.timeline import Timeline

        model = self.loaded.model
        self.store = SessionStore()
        timeline = Timeline(model, store=PrefixStore(model.fingerprint))
        self.conversation = Conversation(model, self.loaded.tokenizer, timeline=timeline)

    def open_session(self, name: str, from_text: bool) -> None:
        """Go on with the session of that name where there is one; it is saved on leaving."""
        if self.store.exists(name):
            self.conversation.restore(*self.store.load(name), from_text=from_text)
        self.session = name

    def save(self, name: str) -> None:
        """Write the conversation to disk."""
        self.store.save(name, *self.conversation.snapshot())

    def take_draft(self) -> str:
        """The draft for the next input, which is then used up."""
        draft, self.draft = self.draft, ""
        return draft

    def take(self, text: str) -> None:
        """Run a command or reply to a message; an error on a terminal is told and the chat goes on."""
        try:
            if not commands.run(self, text):
                self.reply(text)
        except mlxlin.MlxlinError as error:
            if not sys.stdin.isatty():
                raise
            complain(error.message, error.hint)

    def reply(self, text: str) -> None:
        """Answer a message and say what it cost."""
        talk, think = self.conversation, self.options["think"]
        with interruptible() as stopped, progress("Reading") as report:
            self.loaded.check_memory(len(talk.prompt(text, think=think)) + self.options["max_tokens"])
            messages = [*talk.messages, {"role": "user", "content": text}]
            splitter = talk.tokenizer.thought_splitter(messages, think=think)
            printer = Printer(splitter, hide_thoughts=self.options["hide_thinking"])

            def watch(done: int, total: int) -> None:
                if report is not None:
                    report(done, total)
                if stopped():
                    raise Stopped

            pieces = talk.ask(
                text,
                max_tokens=self.options["max_tokens"],
                stop=self.options["stop"],
                think=think,
                context=self.options["context"],
                progress=watch,
                **self.sampling(),
            )
            # closed at once: what was said so far belongs to the conversation before anything else happens
            with contextlib.suppress(Stopped), contextlib.closing(cast("Generator[Piece]", pieces)):
                printer.show(pieces, stopped)
        self.replies += 1
        reply = printer.reply
        self.last = stats_line(reply.stats) if reply.stats else f"Stopped after {len(reply.pieces)} tokens."
        say(self.last, dim=True)

    def sampling(self) -> dict[str, Any]:
        """What was given of the sampling options, for the next reply."""
        chosen = sampling_arguments(self.options)
        if "seed" in chosen:
            chosen["seed"] += self.replies
        return chosen


@contextlib.contextmanager
def saved_on_leaving(chat: Chat) -> Iterator[None]:
    """Save the session however the chat ends, also when the terminal is closed."""

    def leave(signum: int, frame: FrameType | None) -> None:
        sys.exit(128 + signum)

    before = {number: signal.signal(number, leave) for number in (signal.SIGHUP, signal.SIGTERM)}
    try:
        yield
    finally:
        if chat.session and chat.conversation.turns:
            chat.save(chat.session)
            say(f"Saved as '{chat.session}'.", dim=True)
        for number, handler in before.items():
            signal.signal(number, handler)
