"""`mlxlin sessions`: saved conversations."""

from __future__ import annotations

import sys
import time

import click

from mlxlin_cli.options import debug_option
from mlxlin_cli.terminal import say, size, table, write

EPILOG = """\b
Examples:
  mlxlin sessions show holiday
  mlxlin chat --session holiday
"""


@click.group("sessions", epilog=EPILOG, invoke_without_command=True, short_help="Saved conversations.")
@debug_option
@click.pass_context
def command(ctx: click.Context) -> None:
    """List saved conversations (list), read one (show), delete one (rm)."""
    if ctx.invoked_subcommand is None:
        ctx.invoke(list_command)


@command.command("list")
@debug_option
def list_command() -> None:
    """Names, dates and sizes, the latest first."""
    from mlxlin.store import SessionStore

    found = SessionStore().list()
    if not found:
        say("No conversation is saved. 'mlxlin chat --session NAME' begins one.")
        return
    rows = [[s.name, time.strftime("%Y-%m-%d %H:%M", time.localtime(s.saved)), size(s.nbytes)] for s in found]
    write(table([["session", "saved", "size"], *rows], right=(2,)) + "\n")


@command.command("show")
@click.argument("name")
@debug_option
def show_command(name: str) -> None:
    """Print what was said in NAME."""
    from mlxlin.store import SessionStore

    _, record = SessionStore().load(name)
    said = [{"role": "system", "content": record["system"]}] if record["system"] else []
    write("\n".join(f"{turn['role']}: {turn['content']}" for turn in [*said, *record["turns"]]) + "\n")


@command.command("rm")
@click.argument("name")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@debug_option
def remove_command(name: str, yes: bool) -> None:
    """Delete NAME."""
    from mlxlin.store import SessionStore

    if not yes:
        if not sys.stdin.isatty():
            raise click.UsageError("Deleting without a terminal to ask on needs --yes.")
        click.confirm(f"Delete the session '{name}'?", abort=True, err=True)
    SessionStore().remove(name)
    say(f"Deleted '{name}'.")
