"""`mlxlin chat`: a conversation on the terminal, or line by line through a pipe."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import click

from mlxlin_cli import commands
from mlxlin_cli.branches import count
from mlxlin_cli.conversation import Chat
from mlxlin_cli.lines import Read, reader, unwrap
from mlxlin_cli.loading import open_model
from mlxlin_cli.options import (
    Settings,
    debug_option,
    loading_options,
    reply_options,
    sampling_options,
    system_prompt,
)
from mlxlin_cli.terminal import closing, number, say

EPILOG = '''\b
In the conversation:
  /help lists the commands; /quit or Ctrl-D leaves; Ctrl-C stops a reply
  \\ at the end of a line, or Alt-Enter, begins a new one; """ encloses several

\b
Examples:
  mlxlin chat -m Qwen/Qwen3.5-0.8B --system "Answer in one sentence."
  mlxlin chat --session holiday          go on where you left, without reading it again
'''


@click.command("chat", epilog=EPILOG)
@click.option("--session", metavar="NAME", help="Go on with a saved conversation, or begin one; saved at every reply.")
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

    if session == "":
        raise click.UsageError("--session needs a name.")
    if from_text and not session:
        raise click.UsageError("--from-text needs --session.")
    system = system_prompt(options)
    chat = Chat(open_model(settings.model, options), options)
    with kept(chat):
        if session:
            chat.open(session, from_text=from_text, given=options)
        if system is not None:
            chat.conversation.set_system(system)
        if sys.stdin.isatty():
            say(greeting(chat), dim=True)
        talk(chat, reader(home() / "chat-history", [f"/{name}" for name in commands.COMMANDS]))


def greeting(chat: Chat) -> str:
    """What is talked with."""
    turns = count(len(chat.conversation.turns) // 2)
    session = f" · session '{chat.keeper.name}', {turns}" if chat.keeper.name else ""
    millions = number(chat.loaded.model.parameter_count / 1e6)
    return f"{chat.loaded.name} · {millions} M parameters{session} · /help for commands, Ctrl-D to leave"


@contextlib.contextmanager
def kept(chat: Chat) -> Iterator[None]:
    """Save the session however the chat ends, also when the terminal is closed; exit code 1 where that fails."""
    with closing():
        try:
            yield
        finally:
            try:
                safe = chat.save()
            finally:
                chat.keeper.release()
    if not safe:
        raise click.exceptions.Exit(1)


def talk(chat: Chat, read: Read) -> None:
    """Take inputs until the person leaves."""
    while not chat.left:
        try:
            if text := unwrap(read(chat.draft)):
                chat.take(text)
            else:
                chat.editing = 0
        except EOFError:
            return
        except KeyboardInterrupt:  # a second one while a reply was being stopped, or one between two lines
            if not sys.stdin.isatty():
                raise
            say("Stopped.", dim=True)
