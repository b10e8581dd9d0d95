"""The slash commands of a chat."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import mlxlin
from mlxlin_cli.branches import count
from mlxlin_cli.options import SAMPLING
from mlxlin_cli.terminal import interactive, say, size, table

if TYPE_CHECKING:
    from mlxlin_cli.conversation import Chat


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
    turns = chat.conversation.turns
    if not turns:
        raise mlxlin.InputError("There is nothing to try again.", "Say something first.")
    chat.replace(len(turns) // 2, str(turns[-2]["content"]))


def edit(chat: Chat, text: str) -> None:
    turns = len(chat.conversation.turns) // 2
    if not turns:
        raise mlxlin.InputError("There is nothing to edit.", "Say something first.")
    match = re.fullmatch(r"(\d+)?\s*(.*)", text, re.DOTALL)
    assert match is not None
    turn, new = int(match[1] or turns), match[2]
    if not 1 <= turn <= turns:
        raise mlxlin.InputError(f"There is no turn {turn}.", f"The conversation has {count(turns)}.")
    if new:
        chat.replace(turn, new)
    elif sys.stdin.isatty() and interactive(sys.stderr):
        chat.editing = turn
    else:
        raise mlxlin.InputError("There is nothing to put in the message's place.", "Say /edit TURN TEXT.")


def fork(chat: Chat, text: str) -> None:
    if text.isdecimal():
        chat.branches.go(int(text))
    elif not text:
        chat.branches.fork()
    elif text != "list":
        raise mlxlin.InputError(f"'{text}' is no branch.", "Say /fork, /fork N, or /fork list.")
    say(table(chat.branches.rows()))


def save(chat: Chat, name: str) -> None:
    keeper = chat.keeper
    if not (name := name or keeper.name or ""):
        raise mlxlin.InputError("A session needs a name.", "Say /save NAME.")
    if name != keeper.name:
        keeper.rename(name)
    if chat.save():
        say(f"Saved as '{name}', and again after every reply.")


def load(chat: Chat, name: str) -> None:
    store = chat.keeper.store
    if not name:
        raise mlxlin.InputError("What is to be loaded?", "Say /load NAME; 'mlxlin sessions' lists them.")
    if chat.keeper.name is None and not chat.branches.empty:
        raise mlxlin.InputError("This chat is not saved and would be lost.", "Say /save NAME first.")
    from_text = name.endswith(" text") and not store.exists(name)
    name = name.removesuffix(" text").strip() if from_text else name
    store.record(name)  # refuses an unknown name, which would begin a session
    if chat.save():
        chat.open(name, from_text=from_text)
        say(f"Session '{name}': {count(len(chat.conversation.turns) // 2)}.")


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
    line, model = chat.conversation.timeline, chat.loaded.model
    state, branches = line.state, chat.branches
    rows = [
        ["model", f"{chat.loaded.name}, {size(model.nbytes)} of weights"],
        ["session", chat.keeper.name or "not saved"],
        ["branch", f"{branches.here} of {len(branches)}"],
        ["turns", str(len(chat.conversation.turns) // 2)],
        ["read", f"{line.position:,} of {chat.options['context'] or model.context:,} tokens"],
        ["state", size(state.recurrent_nbytes)],
        ["keys, values", f"{size(state.kv_nbytes)}, room for {size(state.kv_capacity_nbytes)}"],
        ["checkpoints", f"{len(line.points)}, {size(line.checkpoint_nbytes)} of at most {size(line.budget)}"],
        ["held in all", size(branches.held_nbytes)],
        ["last reply", chat.last or "none yet"],
    ]
    say(table(rows))


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
    "fork": SlashCommand(fork, "[N|list]", "begin a branch here, go to branch N, or list them"),
    "save": SlashCommand(save, "[NAME]", "save as a session, now and after every reply"),
    "load": SlashCommand(load, "NAME [text]", "go on with a session; with 'text' also one of another model"),
    "system": SlashCommand(system, "[TEXT]", "show or replace the system prompt"),
    "set": SlashCommand(change, "[NAME VALUE]", f"show or change {', '.join(o.flag[2:] for o in SAMPLING.values())}"),
    "stats": SlashCommand(stats, "", "turns, tokens, what is held in memory, and the cost of the last reply"),
    "clear": SlashCommand(clear, "", "forget the conversation, keep the system prompt"),
    "quit": SlashCommand(leave, "", "leave; so does Ctrl-D"),
}
