"""`mlxlin sessions`: saved conversations."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import click

import mlxlin
from mlxlin_cli.options import debug_option
from mlxlin_cli.terminal import say, size, table, write

if TYPE_CHECKING:
    from mlxlin.store import SessionInfo

EPILOG = """\b
Examples:
  mlxlin sessions show holiday
  mlxlin chat --session holiday
"""
LIST_EPILOG, SHOW_EPILOG, REMOVE_EPILOG = (
    f"\b\nExample:\n  mlxlin sessions {example}" for example in ("list", "show holiday > holiday.txt", "rm holiday")
)


@click.group("sessions", epilog=EPILOG, invoke_without_command=True)
@debug_option
@click.pass_context
def command(ctx: click.Context) -> None:
    """List saved conversations (list), read one (show), delete one (rm)."""
    if ctx.invoked_subcommand is None:
        ctx.invoke(list_command)


@command.command("list", epilog=LIST_EPILOG)
@debug_option
def list_command() -> None:
    """Names, dates, turns, models and sizes, the latest first."""
    store = mlxlin.SessionStore()
    found = store.list()
    if not found:
        say("No conversation is saved. 'mlxlin chat --session NAME' begins one.")
        return
    rows = [["session", "saved", "turns", "model", "size"]]
    for info in found:
        try:
            record = store.record(info.name)
            rows.append([info.name, date(info), str(len(record["turns"]) // 2), model(record), size(info.nbytes)])
        except mlxlin.SessionError:
            rows.append([info.name, date(info), "", "damaged", size(info.nbytes)])
    write(table(rows, right=(2, 4)) + "\n")


@command.command("show", epilog=SHOW_EPILOG)
@click.argument("name")
@debug_option
def show_command(name: str) -> None:
    """Print what was said in NAME."""
    record = mlxlin.SessionStore().record(name)
    said = [{"role": "system", "content": record["system"]}] if record["system"] else []
    write("\n".join(f"{turn['role']}: {turn['content']}" for turn in [*said, *record["turns"]]) + "\n")


@command.command("rm", epilog=REMOVE_EPILOG)
@click.argument("name")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@debug_option
def remove_command(name: str, yes: bool) -> None:
    """Delete NAME."""
    store = mlxlin.SessionStore()
    if not yes and store.exists(name):
        if not sys.stdin.isatty():
            raise click.UsageError("Deleting without a terminal to ask on needs --yes.")
        click.confirm(f"Delete the session '{name}'?", abort=True, err=True)
    store.remove(name)
    say(f"Deleted '{name}'.")


def date(info: SessionInfo) -> str:
    """When it was saved, in the local time."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(info.saved))


def model(record: dict[str, Any]) -> str:
    """The model it was saved with, as it was asked for."""
    about = record.get("about", {})
    bits = f" -q {about['bits']}" if about.get("bits") else ""
    return f"{about['name']}{bits}" if "name" in about else "?"
