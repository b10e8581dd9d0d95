"""`mlxlin models`: what is on disk, what fits this machine, and removing what is not needed."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import click

import mlxlin
from mlxlin_cli import folders
from mlxlin_cli.options import debug_option
from mlxlin_cli.terminal import say, size, table, write

EPILOG = """\b
Examples:
  mlxlin models suggest
  mlxlin models rm Qwen/Qwen3.5-4B
"""
LIST_EPILOG, SUGGEST_EPILOG, REMOVE_EPILOG = (
    f"\b\nExample:\n  mlxlin models {example}" for example in ("list", "suggest", "rm Qwen/Qwen3.5-4B")
)


@dataclass(frozen=True)
class OnDisk:
    """A model on this machine: its name for -m, bytes on disk, and how to remove it."""

    name: str
    kind: str
    nbytes: int
    remove: Callable[[], None]


@click.group("models", epilog=EPILOG, invoke_without_command=True)
@debug_option
@click.pass_context
def command(ctx: click.Context) -> None:
    """List the models on this machine (list), or those that would fit (suggest); remove one (rm)."""
    if ctx.invoked_subcommand is None:
        ctx.invoke(list_command)


@command.command("list", short_help="What is on disk.", epilog=LIST_EPILOG)
@debug_option
def list_command() -> None:
    """What is on disk: the shipped model, the hub's cache, converted folders."""
    rows = [["demo", "shipped", size(_folder_size(Path(mlxlin.__file__).parent / "demo")), "yes"]]
    rows += [[model.name, model.kind, size(model.nbytes), runs(model)] for model in on_disk()]
    write(table([["model", "kind", "size", "runs"], *rows], right=(2,)) + "\n")


@command.command("suggest", short_help="What fits into this machine's memory.", epilog=SUGGEST_EPILOG)
@debug_option
def suggest_command() -> None:
    """What fits into this machine's memory, with short names to use after -m."""
    from mlxlin.aliases import suggest

    memory = mlxlin.describe_backend()["memory_bytes"]
    rows = [["-m", "hub id", "weights", "with", "takes", "what it is"]]
    for found in suggest(memory):
        quantise = f"-q {found.bits}" if found.bits < 16 else "16 bits"
        known = found.known
        rows.append([found.alias, known.repo, f"{known.billions:g} B", quantise, size(found.nbytes), known.about])
    if len(rows) == 1:
        say(f"None of the models with a short name fits into {size(memory)}; demo does.")
        return
    write(table(rows, right=(2, 4)) + "\n")


@command.command("rm", short_help="Remove one from the disk.", epilog=REMOVE_EPILOG)
@click.argument("name")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@debug_option
def remove_command(name: str, yes: bool) -> None:
    """Remove NAME, a hub id in the cache or a converted folder, from the disk."""
    from mlxlin.aliases import ALIASES

    name = ALIASES[name].repo if name in ALIASES else name
    wanted = {name, str(Path(name).expanduser().resolve())}
    found = next((model for model in on_disk() if model.name in wanted), None)
    if name == "demo":
        raise mlxlin.InputError("The demo model is part of mlxlin.", "It goes with it: pip uninstall mlxlin")
    if found is None:
        raise mlxlin.InputError(f"There is no model '{name}' on this machine.", "See them with: mlxlin models")
    if not yes:
        if not sys.stdin.isatty():
            raise click.UsageError("Removing without a terminal to ask on needs --yes.")
        click.confirm(f"Remove {found.name}, {size(found.nbytes)}?", abort=True, err=True)
    found.remove()
    say(f"Removed {found.name}; {size(found.nbytes)} are free again.")


def on_disk() -> Iterator[OnDisk]:
    """Models in the hub's cache, then converted folders."""
    from mlxlin.convert.hub import downloaded

    for model in downloaded():
        yield OnDisk(model.repo, "hub cache", model.nbytes, model.remove)
    for folder in folders.known():
        yield OnDisk(str(folder), "converted", _folder_size(folder), partial(shutil.rmtree, folder))


def runs(model: OnDisk) -> str:
    """Whether mlxlin runs it, else why not."""
    try:
        found = mlxlin.describe(model.name)
    except mlxlin.MlxlinError as error:
        return error.message
    return "yes" if found.fits else "not in this machine's memory"


def _folder_size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
