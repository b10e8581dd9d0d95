"""`mlxlin generate`: one completion."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import click

import mlxlin
from mlxlin_cli.loading import Loaded, open_model
from mlxlin_cli.options import (
    Settings,
    debug_option,
    loading_options,
    reply_options,
    sampling_arguments,
    sampling_options,
    system_prompt,
)
from mlxlin_cli.reply import Printer, Reply, stats_line
from mlxlin_cli.terminal import interactive, progress, say, write

if TYPE_CHECKING:
    from mlxlin.generate import Piece

EPILOG = """\b
Examples:
  mlxlin generate "Name three rivers." -n 40 --temp 0
  cat notes.txt | mlxlin generate --system "Summarise."
  mlxlin generate --raw "Once upon a time" --seed 0 --json
"""


@click.command("generate", epilog=EPILOG)
@click.argument("prompt", required=False)
@click.option("-n", "--max-tokens", type=click.IntRange(0), default=256, show_default=True, help="New tokens at most.")
@click.option("--raw", is_flag=True, help="Continue the text itself, without the chat template.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: the text and how it was made.")
@click.option(
    "--logprobs", type=click.IntRange(0), metavar="K", help="With --json: log probabilities, of the K likeliest too."
)
@reply_options
@sampling_options
@loading_options
@debug_option
@click.pass_obj
def command(settings: Settings, /, prompt: str | None, **options: Any) -> None:
    """Complete one PROMPT: from the argument, from a pipe, or from - (standard input)."""
    if options["logprobs"] is not None and not options["as_json"]:
        raise click.UsageError("--logprobs needs --json.")
    options["system"] = system_prompt(options)
    if options["raw"] and (options["system"] or options["think"] is not None):
        raise click.UsageError("--raw goes without the chat template, so --system and --think have no place in it.")
    text = read_prompt(prompt)
    loaded = open_model(settings.model, options)
    reply = complete(loaded, text, options)
    if options["as_json"]:
        write(json.dumps(as_object(loaded, reply, options["logprobs"]), ensure_ascii=False) + "\n")
    elif reply.stats and interactive(sys.stderr):
        say(stats_line(reply.stats), dim=True)


def read_prompt(prompt: str | None) -> str:
    """The prompt from the argument, or from standard input without its last line end.

    Raises:
        InputError: it is empty, or no UTF-8.
    """
    if prompt is None and sys.stdin.isatty():
        raise click.UsageError("Missing argument 'PROMPT'.")
    if prompt is None or prompt == "-":
        try:
            prompt = sys.stdin.buffer.read().decode().removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError as error:
            raise mlxlin.InputError(
                f"Standard input is not UTF-8 text: {error}.", "Convert it, say with iconv."
            ) from error
    if not prompt.strip():
        raise mlxlin.InputError("The prompt is empty.", "Give some text as the argument or through the pipe.")
    return prompt


def complete(loaded: Loaded, text: str, options: dict[str, Any]) -> Reply:
    """Generate and print the completion of `text`; with `as_json` only collect it."""
    tokenizer, think = loaded.tokenizer, options["think"]
    splitter = None
    ask: Callable[..., Iterator[Piece]]
    if options["raw"]:
        length = len(tokenizer.encode(text))
        ask = partial(mlxlin.stream, loaded.model, tokenizer, text, raw=True)
    else:
        # a system prompt that was read before, on this machine, is not read again
        timeline = mlxlin.Timeline(loaded.model, store=mlxlin.PrefixStore(loaded.model.fingerprint))
        talk = mlxlin.Conversation(loaded.model, tokenizer, system=options["system"], timeline=timeline)
        length = len(talk.prompt(text, think=think))
        splitter = tokenizer.thought_splitter([*talk.messages, {"role": "user", "content": text}], think=think)
        ask = partial(talk.ask, text)
    loaded.check_memory(min(length + options["max_tokens"], options["context"] or loaded.model.context))
    printer = Printer(splitter, hide_thoughts=options["hide_thinking"], quiet=options["as_json"])
    with progress("Reading the prompt") as report:
        pieces = ask(
            max_tokens=options["max_tokens"],
            stop=options["stop"],
            think=think,
            logprobs=options["logprobs"],
            context=options["context"],
            progress=report,
            **sampling_arguments(options),
        )
        return printer.show(pieces)


def as_object(loaded: Loaded, reply: Reply, logprobs: int | None) -> dict[str, Any]:
    """The object `--json` prints."""
    stats = reply.stats
    assert stats is not None
    found = {
        "text": reply.answer,
        "prompt_tokens": stats.prompt_tokens,
        "reused_tokens": stats.reused_tokens,
        "reuse": stats.reuse,
        "generated_tokens": stats.generated_tokens,
        "finish_reason": reply.finish_reason,
        "prefill_tps": stats.prefill_tps,
        "decode_tps": stats.decode_tps,
        "state_bytes": stats.state_bytes,
        "peak_memory_bytes": stats.peak_memory_bytes,
        "model": loaded.name,
        "device": mlxlin.describe_backend()["device"],
        "path": loaded.path,
    }
    if reply.thought:
        found["thinking"] = reply.thought
    if logprobs is not None:
        found["logprobs"] = [token_object(loaded, piece) for piece in reply.pieces if piece.token is not None]
    return found


def token_object(loaded: Loaded, piece: Piece) -> dict[str, Any]:
    """One token: its text, its log probability, and the likeliest tokens at its place."""

    def text(token: int) -> str:
        return loaded.tokenizer.decode([token])

    assert piece.token is not None
    top = [{"token": token, "text": text(token), "logprob": logprob} for token, logprob in piece.top]
    return {"token": piece.token, "text": text(piece.token), "logprob": piece.logprob, "top": top}
