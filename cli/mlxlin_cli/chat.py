"""`mlxlin chat`: a conversation on the terminal, or line by line through a pipe."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click

import mlxlin
from mlxlin_cli.conversation import Conversation
from mlxlin_cli.lines import messages
from mlxlin_cli.loading import open_model
from mlxlin_cli.options import SAMPLING, Settings, debug_option, loading_options, reply_options, sampling_options
from mlxlin_cli.reply import Printer, interruptible, stats_line
from mlxlin_cli.terminal import complain, number, progress, say, size, table

EPILOG = '''\b
In the conversation:
  /help lists the commands; /quit or Ctrl-D leaves; Ctrl-C stops a reply
  \\ at the end of a line, or Alt-Enter, begins a new one; """ encloses several
'''


@click.command("chat", epilog=EPILOG)
@click.option("-n", "--max-tokens", type=click.IntRange(1), default=2048, show_default=True, help="Tokens per reply.")
@reply_options
@sampling_options
@loading_options
@debug_option
@click.pass_obj
def command(settings: Settings, /, bits: int | None, revision: str | None, system: str | None, **options: Any) -> None:
    """Talk with a model. After every reply, one line on standard error says what it cost."""
    from mlxlin.store import home

    loaded = open_model(settings.model, bits=bits, revision=revision)
    chat = Chat(Conversation(loaded, options, system))
    if sys.stdin.isatty():
        parameters = number(loaded.model.parameter_count / 1e6)
        say(f"{loaded.name} · {parameters} M parameters · /help for commands, Ctrl-D to leave", dim=True)
    for text in messages(home() / "chat-history", [f"/{name}" for name in COMMANDS]):
        if not chat.take(text):
            break


class Chat:
    """What a person's lines do to a conversation."""

    def __init__(self, conversation: Conversation) -> None:
        self.conversation = conversation
        self.last = ""

    def take(self, text: str) -> bool:
        """Run a command or reply to a message; false when the person wants to leave."""
        try:
            if not (match := re.fullmatch(r"/([a-z]+)(?:\s+(.*))?", text, re.DOTALL)):
                self.reply(text)
            elif match[1] == "quit":
                return False
            elif match[1] in COMMANDS:
                COMMANDS[match[1]].run(self, match[2] or "")
            else:
                raise mlxlin.InputError(f"There is no command /{match[1]}.", "See /help.")
        except mlxlin.MlxlinError as error:
            if not sys.stdin.isatty():
                raise
            complain(error.message, error.hint)
        return True

    def reply(self, text: str) -> None:
        """Answer a message and say what it cost."""

        def printer(splitter: Any) -> Printer:
            return Printer(splitter, hide_thoughts=self.conversation.options["hide_thinking"])

        with interruptible() as stopped, progress("Reading") as report:
            reply = self.conversation.ask(text, printer, stopped, report)
        self.last = stats_line(reply.stats) if reply.stats else f"Stopped after {len(reply.pieces)} tokens."
        say(self.last, dim=True)

    def help(self, _: str) -> None:
        rows = [[f"/{name} {entry.argument}".rstrip(), entry.help] for name, entry in COMMANDS.items()]
        say(table(rows))

    def system(self, text: str) -> None:
        if text:
            self.conversation.system = text
        say(f"System prompt: {self.conversation.system or 'none'}")

    def set(self, text: str) -> None:
        name, _, value = text.partition(" ")
        if name:
            self.conversation.set(name, value.strip())
        say(table([[key, str(value)] for key, value in self.conversation.settings().items()]))

    def stats(self, _: str) -> None:
        talk, model = self.conversation, self.conversation.loaded.model
        rows = [
            ["model", f"{talk.loaded.name}, {size(model.nbytes)} of weights"],
            ["turns", str(len(talk.turns) // 2)],
            ["last reply", self.last or "none yet"],
        ]
        say(table(rows))

    def undo(self, _: str) -> None:
        text = self.conversation.undo()
        say("There is nothing to take back." if text is None else f"Taken back: {text}")

    def retry(self, _: str) -> None:
        text = self.conversation.undo()
        if text is None:
            raise mlxlin.InputError("There is nothing to try again.", "Say something first.")
        self.reply(text)

    def clear(self, _: str) -> None:
        self.conversation.clear()
        say("The conversation is empty.")


@dataclass(frozen=True)
class ChatCommand:
    """A slash command: what it does to the chat, its argument, one line of help."""

    run: Callable[[Chat, str], None]
    argument: str
    help: str


COMMANDS = {
    "help": ChatCommand(Chat.help, "", "this list"),
    "undo": ChatCommand(Chat.undo, "", "take back the last message and its reply"),
    "retry": ChatCommand(Chat.retry, "", "reply to the last message again"),
    "system": ChatCommand(Chat.system, "[TEXT]", "show or replace the system prompt"),
    "set": ChatCommand(Chat.set, "[NAME VALUE]", f"show or change {', '.join(o.flag[2:] for o in SAMPLING.values())}"),
    "stats": ChatCommand(Chat.stats, "", "model, turns, and the cost of the last reply"),
    "clear": ChatCommand(Chat.clear, "", "forget the conversation, keep the system prompt"),
    "quit": ChatCommand(Chat.clear, "", "leave; so does Ctrl-D"),
}
