"""Options shared by the commands."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

import mlxlin

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


@dataclass
class Settings:
    """What may be said before or after the command: `mlxlin -m X chat` is `mlxlin chat -m X`."""

    model: str = "demo"
    debug: bool = False


def _remember(ctx: click.Context, parameter: click.Parameter, value: Any) -> None:
    if value is not None and parameter.name is not None:
        setattr(ctx.ensure_object(Settings), parameter.name, value)


def debug_option(command: Decorated) -> Decorated:
    """`--debug`, kept in `Settings.debug`."""
    return click.option(
        "--debug",
        is_flag=True,
        default=None,
        expose_value=False,
        is_eager=True,
        callback=_remember,
        help="Show the traceback of an error.",
    )(command)


def model_option(command: Decorated) -> Decorated:
    """`-m/--model`, kept in `Settings.model`."""
    return click.option(
        "-m",
        "--model",
        metavar="MODEL",
        expose_value=False,
        callback=_remember,
        help="Folder, hub id (owner/name), short alias, or demo (the default).",
    )(command)


@dataclass(frozen=True)
class Quantised(click.ParamType[int | str]):
    """Bits per weight, or the name or file of a recipe."""

    name = "QUANTISATION"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        text = str(value)
        return int(text) if text.removeprefix("-").isdecimal() else text


def quantisation_options(command: Decorated) -> Decorated:
    """How weights are quantised: `-q`, `--group-size`."""
    group = click.option("--group-size", type=int, metavar="N", help="Weights that share a scale: 32, 64 or 128.")
    bits = click.option(
        "-q",
        "--bits",
        type=Quantised(),
        metavar="BITS",
        help="Quantise to 2, 3, 4, 5, 6 or 8 bits per weight, or to mxfp4, mxfp8, nvfp4, mixed-4-6, FILE.json.",
    )
    return bits(group(command))


def quantisation(bits: int | str | None, group_size: int | None) -> dict[str, Any]:
    """What `-q` and `--group-size` say, by the names of `mlxlin.load`."""
    if isinstance(bits, str):
        return {"recipe": bits, "group_size": group_size}
    return {"bits": bits, "group_size": group_size}


def loading_options(command: Decorated) -> Decorated:
    """How a model is loaded: `-m`, `-q`, `--group-size`, `--revision`."""
    revision = click.option("--revision", metavar="REV", help="Branch, tag or commit of a hub repository.")
    return model_option(quantisation_options(revision(command)))


@dataclass(frozen=True)
class Bias(click.ParamType[tuple[int, float]]):
    """`TOKEN:BIAS`, a token id and what is added to its logit."""

    name = "TOKEN:BIAS"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, float]:
        if isinstance(value, tuple):
            return value
        token, separator, bias = str(value).partition(":")
        try:
            return int(token), float(bias if separator else "")
        except ValueError:
            self.fail(f"{value!r} is not a token id, a colon and a number, such as 42:-100.", param, ctx)


@dataclass(frozen=True)
class SamplingOption:
    """One sampling option: its flag, its type, and what it does."""

    flag: str
    type: type[int] | type[float]
    help: str


SAMPLING = {
    "temperature": SamplingOption("--temp", float, "Temperature; 0 always takes the likeliest token."),
    "top_p": SamplingOption("--top-p", float, "Sample from the likeliest tokens that make up this probability."),
    "top_k": SamplingOption("--top-k", int, "Sample from this many of the likeliest tokens; 0 is all."),
    "min_p": SamplingOption("--min-p", float, "Drop tokens below this fraction of the likeliest one's probability."),
    "repeat_penalty": SamplingOption("--repeat-penalty", float, "Divide recent tokens' logits by this; 1 is off."),
    "presence_penalty": SamplingOption("--presence-penalty", float, "Subtract this from recent tokens' logits."),
    "seed": SamplingOption("--seed", int, "Repeat the same choices: any whole number, 0 too."),
}
"""By the names of `mlxlin.Sampling`."""


def sampling_options(command: Decorated) -> Decorated:
    """Sampling; what is not given comes from the model's own generation config."""
    bias = click.option("--logit-bias", type=Bias(), multiple=True, help="Add BIAS to a token's logit; repeatable.")
    command = bias(command)
    for name, option in reversed(SAMPLING.items()):
        command = click.option(option.flag, name, type=option.type, help=option.help)(command)
    return command


def reply_options(command: Decorated) -> Decorated:
    """What bounds and shapes a reply: `--stop`, `--think`, `--context`, `--system`."""
    for option in (
        click.option(
            "--context", type=click.IntRange(min=1), metavar="TOKENS", help="Stop at this many tokens in all."
        ),
        click.option("--think/--no-think", default=None, help="Ask for thinking or not, where the template can."),
        click.option("--hide-thinking", is_flag=True, help="Do not show the thoughts."),
        click.option("--stop", multiple=True, metavar="TEXT", help="Stop before this text; repeatable."),
        click.option("--system-file", type=click.Path(path_type=Path), help="System prompt from a text file."),
        click.option("--system", metavar="TEXT", help="System prompt."),
    ):
        command = option(command)
    return command


def sampling_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """What was given of the sampling options, by the names of `mlxlin.Sampling`."""
    chosen = {name: given[name] for name in SAMPLING if given.get(name) is not None}
    if given.get("logit_bias"):
        chosen["logit_bias"] = dict(given["logit_bias"])
    return chosen


def system_prompt(given: Mapping[str, Any]) -> str | None:
    """The system prompt from `--system` or `--system-file`; None where there is none.

    Raises:
        InputError: the file cannot be read as UTF-8.
    """
    text, path = given["system"], given["system_file"]
    if path is None:
        return text or None
    if text is not None:
        raise click.UsageError("--system and --system-file are two ways to say one thing.")
    try:
        return path.read_text(encoding="utf-8").strip() or None
    except (OSError, UnicodeDecodeError) as error:
        raise mlxlin.InputError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from error
