"""The slash commands of a chat."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import mlxlin
from mlxlin_cli.options import SAMPLING
from mlxlin_cli.terminal import say, size, table

if TYPE_CHECKING:
    from mlxlin_cli.chat import Chat


@dataclass(frozen=True)
class SlashCommand:
    """What a command does to the chat, given what stands behind its name; its argument and help for the list."""

    run: Callable[[Chat, str], None]
    argument: str
    help: str


def run(chat: Chat, text: str) -> bool:
    """Run `text` if it is a command; false if it is a message. "/usr/bin is what?" is a message.

    Raises:
        InputError: it looks like a command, but there is none of that name.
    """
    if not (match := re.fullmatch(r"/([a-z]+)(?:\s+(.*))?", text, re.DOTALL)):
        return False
    if match[1] not in COMMANDS:
        near = get_close_matches(match[1], COMMANDS, n=1)
        hint = f"Did you mean /{near[0]}? " if near else ""
        raise mlxlin.InputError(f"There is no command /{match[1]}.", f"{hint}See /help.")
    COMMANDS[match[1]].run(chat, (match[2] or "").strip())
    return True


def show_help(chat: Chat, _: str) -> None:
    say(table([[f"/{name} {entry.argument}".rstrip(), entry.help] for name, entry in COMMANDS.items()]))


def undo(chat: Chat, _: str) -> None:
    text = chat.conversation.undo()
    say("There is nothing to take back." if text is None else f"Taken back: {text}")


def retry(chat: Chat, _: str) -> None:
    text = chat.conversation.undo()
    if text is None:
        raise mlxlin.InputError("There is nothing to try again.", "Say something first.")
    chat.reply(text)


def edit(chat: Chat, text: str) -> None:
    turns = len(chat.conversation.turns) // 2
    match = re.fullmatch(r"(\d+)?\s*(.*)", text, re.DOTALL)
    assert match is not None
    turn, new = int(match[1] or turns), match[2]
    if not new and not sys.stdin.isatty():
        raise mlxlin.InputError("There is nothing to put in the message's place.", "Say /edit TURN TEXT.")
    old = chat.conversation.edit(turn)
    if new:
        chat.reply(new)
    else:
        chat.draft = old


def fork(chat: Chat, name: str) -> None:
    if not name:
        raise mlxlin.InputError("A fork needs a name.", "Say /fork NAME; /load NAME returns to this place.")
    chat.forks[name] = chat.conversation.fork()
    say(f"Kept this place as '{name}'; /load {name} returns to it.")


def save(chat: Chat, name: str) -> None:
    name = name or chat.session
    if not name:
        raise mlxlin.InputError("A session needs a name.", "Say /save NAME.")
    chat.save(name)
    chat.session = name
    say(f"Saved as '{name}'; it will be saved again on leaving.")


def load(chat: Chat, text: str) -> None:
    match = re.fullmatch(r"(.+?)(\s+text)?", text)
    if not match:
        raise mlxlin.InputError("What is to be loaded?", "Say /load NAME, with a fork's or a session's name.")
    name = match[1]
    if name in chat.forks:
        chat.conversation = chat.forks[name].fork()
    else:
        chat.conversation.restore(*chat.store.load(name), from_text=bool(match[2]))
        chat.session = name
    say(f"Went to '{name}': {len(chat.conversation.turns) // 2} turns.")


def system(chat: Chat, text: str) -> None:
    if text:
        chat.conversation.set_system(text)
    say(f"System prompt: {chat.conversation.system or 'none'}")


def change(chat: Chat, text: str) -> None:
    name, _, value = text.partition(" ")
    if name:
        _change(chat, name, value.strip())
    given: dict[str, Any] = {**chat.loaded.tokenizer.generation_defaults, **chat.sampling()}
    now = mlxlin.Sampling(**given)
    rows = [[option.flag[2:], str(getattr(now, field))] for field, option in SAMPLING.items()]
    say(table([[name, "random" if value == "None" else value] for name, value in rows]))


def _change(chat: Chat, name: str, value: str) -> None:
    field = next((field for field, option in SAMPLING.items() if option.flag == f"--{name}"), None)
    if field is None:
        names = ", ".join(option.flag[2:] for option in SAMPLING.values())
        raise mlxlin.InputError(f"There is nothing called '{name}' to set.", f"There are: {names}.")
    try:
        changed: dict[str, Any] = {field: SAMPLING[field].type(value)}
    except ValueError as error:
        raise mlxlin.InputError(f"'{value}' is no value for {name}.", f"Say for example: /set {name} 1") from error
    mlxlin.Sampling(**changed)  # refuses what is out of range
    chat.options |= changed


def stats(chat: Chat, _: str) -> None:
    talk = chat.conversation
    line, model = talk.timeline, chat.loaded.model
    checkpoints = f"{len(line.points)}, {size(line.checkpoint_nbytes)} of at most {size(line.budget)}"
    say(
        table(
            [
                ["model", f"{chat.loaded.name}, {size(model.nbytes)} of weights"],
                ["turns", str(len(talk.turns) // 2)],
                ["read", f"{line.position:,} of {model.context:,} tokens"],
                ["state", f"{size(line.state.recurrent_nbytes)}, and {size(line.state.kv_nbytes)} of keys and values"],
                ["checkpoints", checkpoints],
                ["session", chat.session or "not saved"],
                ["forks", ", ".join(chat.forks) or "none"],
                ["last reply", chat.last or "none yet"],
            ]
        )
    )


def clear(chat: Chat, _: str) -> None:
    chat.conversation.clear()
    say("The conversation is empty.")


def leave(chat: Chat, _: str) -> None:
    chat.left = True


COMMANDS = {
    "help": SlashCommand(show_help, "", "this list"),
    "undo": SlashCommand(undo, "", "take back the last message and its reply"),
    "retry": SlashCommand(retry, "", "reply to the last message again"),
    "edit": SlashCommand(edit, "[TURN] [TEXT]", "change a message, the last one by default, and go on from there"),
    "fork": SlashCommand(fork, "NAME", "keep this place under a name, until you leave"),
    "save": SlashCommand(save, "[NAME]", "save the conversation as a session, now and on leaving"),
    "load": SlashCommand(load, "NAME [text]", "go to a fork or a session; with 'text' also one of another model"),
    "system": SlashCommand(system, "[TEXT]", "show or replace the system prompt"),
    "set": SlashCommand(change, "[NAME VALUE]", f"show or change {', '.join(o.flag[2:] for o in SAMPLING.values())}"),
    "stats": SlashCommand(stats, "", "turns, memory, checkpoints, and the cost of the last reply"),
    "clear": SlashCommand(clear, "", "forget the conversation, keep the system prompt"),
    "quit": SlashCommand(leave, "", "leave; so does Ctrl-D"),
}
