"""The command group, and the one place where errors become two lines and an exit code."""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import click

import mlxlin
from mlxlin.errors import KernelWarning
from mlxlin_cli.options import Settings, debug_option, model_option
from mlxlin_cli.terminal import complain, flush, open_streams, say

COMMANDS = {
    "chat": "A conversation, never read twice.",
    "generate": "One completion, of an argument or a pipe.",
    "convert": "A hub checkpoint to a folder, quantised or not.",
    "bench": "Prefill and decode, timed apart.",
    "info": "Layers, sizes, memory, and this machine.",
    "models": "What is on disk, what would fit.",
    "sessions": "Saved conversations.",
    "selftest": "Every kernel against its definition, here.",
}
COMPLETION = "_MLXLIN_COMPLETE"
OK, FAILED, USAGE, INTERRUPTED, CLOSED_PIPE = 0, 1, 2, 130, 141

EPILOG = """\b
Examples:
  mlxlin generate "What is the capital of Japan?"
  mlxlin chat -m Qwen/Qwen3.5-0.8B -q 4
  git diff | mlxlin generate - --system "Summarise this change." -n 200
  mlxlin convert Qwen/Qwen3.5-4B -q 4 --check

\b
Exit codes: 0 done, 1 error, 2 wrong usage, 130 interrupted, 141 output pipe closed.

\b
Shell completion (bash, zsh, fish), for this shell or in its start-up file:
  eval "$(_MLXLIN_COMPLETE=zsh_source mlxlin)"
"""


class UnknownCommand(click.UsageError):
    """With names that are near, as click's own error for options has them."""

    def __init__(self, name: str, ctx: click.Context) -> None:
        from difflib import get_close_matches

        super().__init__(f"No such command '{name}'.", ctx)
        self.possibilities = get_close_matches(name, COMMANDS)


class Commands(click.Group):
    """Subcommands by file name: `mlxlin_cli/<name>.py` holds a click command called `command`.

    Their list is printed without importing them, which would be most of the time that `mlxlin --help` takes.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"mlxlin_cli.{cmd_name}").command
        command.short_help = COMMANDS[cmd_name]
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in COMMANDS:
            raise UnknownCommand(args[0], ctx)
        return super().resolve_command(ctx, args)


@click.group(
    cls=Commands,
    epilog=EPILOG,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(mlxlin.__version__, "-V", "--version", message="mlxlin %(version)s")
@model_option
@debug_option
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Linear-attention, recurrent and hybrid language models, on your own machine.

    Text goes to standard output, everything else to standard error. Without -m the small model that
    ships with the package answers; nothing is downloaded.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code; nothing escapes but the code."""
    settings = Settings()
    try:
        # not cli.main(), which turns a closed pipe and an interruption into exit code 1
        given = list(sys.argv[1:] if arguments is None else arguments)
        with notes(), cli.make_context("mlxlin", given, obj=settings) as ctx:
            cli.invoke(ctx)
        flush()
        return OK
    except click.exceptions.Exit as done:
        return done.exit_code
    except (KeyboardInterrupt, click.Abort):
        say("Interrupted.")
        return INTERRUPTED
    except BrokenPipeError:
        return CLOSED_PIPE
    except Exception as error:
        if settings.debug:
            import traceback

            traceback.print_exc()
        return report(error)


@contextmanager
def notes() -> Iterator[None]:
    """What the library warns of is one line, without the place in the source that Python would show."""
    plain = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *place: Any, **rest: Any) -> None:
        if issubclass(category, KernelWarning):
            say(f"Note: {message}")
        else:
            plain(message, category, *place, **rest)

    with warnings.catch_warnings():  # which puts the function back as well
        warnings.simplefilter("always", KernelWarning)
        warnings.showwarning = cast(Any, show)
        yield


def report(error: Exception) -> int:
    """Print `Error:` and `Hint:` for an exception and return the exit code it deserves."""
    if isinstance(error, mlxlin.MlxlinError):
        complain(error.message, error.hint)
        return error.exit_code
    if isinstance(error, click.UsageError):
        complain(error.message, usage_hint(error))
        return USAGE
    if isinstance(error, click.ClickException):
        complain(error.format_message(), "See 'mlxlin --help'.")
        return FAILED
    if isinstance(error, OSError) and error.strerror:
        named = f": {error.filename}" if error.filename else ""
        complain(f"{error.strerror}{named}.", "Check the path, its permissions, and the space on its disk.")
        return FAILED
    complain(f"Internal error: {type(error).__name__}: {error}", "See where with --debug, and please report it.")
    return FAILED


def usage_hint(error: click.UsageError) -> str:
    """What may have been meant, and where the help is."""
    near = " or ".join(f"'{name}'" for name in getattr(error, "possibilities", None) or ())
    where = error.ctx.command_path if error.ctx else "mlxlin"
    return f"{f'Did you mean {near}? ' if near else ''}See '{where} --help'."


def main() -> None:
    """Entry point: ends the process, quietly also where nobody reads its output any more."""
    open_streams()
    if instruction := os.environ.get(COMPLETION):
        from click.shell_completion import shell_complete

        sys.exit(shell_complete(cli, {}, "mlxlin", COMPLETION, instruction))
    code = run()
    try:
        flush()
    except OSError as error:
        code = CLOSED_PIPE if isinstance(error, BrokenPipeError) else code or report(error)
    if code in (CLOSED_PIPE, FAILED):
        silence()
    sys.exit(code)


def silence() -> None:
    """Let go of what has no reader, about which the interpreter would complain on its way out."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
