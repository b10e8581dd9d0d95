"""`mlxlin bench`: prefill and decode, timed apart."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import mlxlin
from mlxlin_cli.loading import Loaded, open_model
from mlxlin_cli.options import Settings, debug_option, loading_options
from mlxlin_cli.terminal import progress, say, write

if TYPE_CHECKING:
    from mlxlin.bench import Plan, Subject
    from mlxlin_cli.record import Record

EPILOG = """\b
Examples:
  mlxlin bench -m Qwen/Qwen3.5-0.8B -q 4
  mlxlin bench -p 512,8192 --contexts 512,8192,32768 --json today.json --plot today.png
  mlxlin bench -p 512,8192 --compare today.json
"""


LENGTHS = (512, 2048, 8192)


class Lengths(click.ParamType[tuple[int, ...]]):
    """Whole numbers with commas between."""

    name = "N,N,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        try:
            return tuple(sorted({int(part) for part in value.split(",")}))
        except ValueError:
            self.fail(f"{value!r} is no list of whole numbers such as 512,2048.", param, ctx)


@click.command("bench", epilog=EPILOG)
@click.option("-p", "--prefill", type=Lengths(), help="Prompt lengths; by default those of 512,2048,8192 that fit.")
@click.option("--contexts", type=Lengths(), help="Decode behind this many tokens; the prompt lengths by default.")
@click.option(
    "-n", "--tokens", type=int, default=128, show_default=True, help="Tokens to generate behind each context."
)
@click.option("-r", "--repetitions", type=int, default=5, show_default=True, help="Counted repetitions of everything.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write the record here.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw the figures: .png, .svg or .pdf.")
@click.option("--compare", type=click.Path(dir_okay=False, path_type=Path), help="A record written earlier by --json.")
@click.option("--peer", type=click.Choice(["mlx-lm"]), help="Measure it too, on the same checkpoint and prompts.")
@loading_options
@debug_option
@click.pass_obj
def command(
    settings: Settings, /, json_path: Path | None, plot: Path | None, compare: Path | None, **options: Any
) -> None:
    """Measure prefill and decode, and what the context costs.

    Prompts are random and never repeat, so nothing can be reused; the end of the text is ignored, so all tokens are
    generated; the first trial of each length is warm-up. Lengths alternate; medians come with their spread.
    """
    from mlxlin.bench import Plan
    from mlxlin_cli.figures import check_plot, draw, render
    from mlxlin_cli.record import read_record

    lengths = options["prefill"] or LENGTHS
    plan = Plan(lengths, options["contexts"] or lengths, options["tokens"], options["repetitions"])
    old = read_record(compare) if compare else None
    for path in (json_path, plot):
        if path and not path.absolute().parent.is_dir():
            raise mlxlin.InputError(f"There is no folder {path.absolute().parent}.", "Make it first.")
    if plot:
        check_plot(plot)
    if options["peer"] and options["bits"]:
        raise click.UsageError("--peer reads the checkpoint as it is; leave -q out.")
    loaded = open_model(settings.model, options)
    if options["prefill"] is None and options["contexts"] is None:
        fitting = tuple(n for n in LENGTHS if n + plan.count <= loaded.model.context) or (loaded.model.context // 2,)
        plan = replace(plan, lengths=fitting, contexts=fitting)
    record = run(loaded, plan, options["peer"])
    write(render(record, old) + "\n")
    if json_path:
        save(record, json_path)
    if plot:
        draw(record, plot)


def run(loaded: Loaded, plan: Plan, peer: str | None) -> Record:
    """Measure, and record around it what the numbers depend on."""
    from mlxlin import bench
    from mlxlin.convert.resolve import resolve
    from mlxlin_cli.peer import mlx_lm_worker
    from mlxlin_cli.record import Record, describe_machine

    machine = describe_machine()
    model = loaded.model
    longest = max(plan.lengths + plan.contexts) + plan.count + bench.TURN
    loaded.check_memory(longest)
    if longest > model.context:
        say(f"Note: {longest:,} tokens are more than the {model.context:,} the model was trained for.")
    say("Measuring the memory's bandwidth ...", dim=True)
    bandwidth = bench.memory_bandwidth()
    with contextlib.ExitStack() as stack:
        subjects: list[Subject] = [bench.Local(model)]
        peers: dict[str, Any] = {}
        if peer:
            worker = stack.enter_context(mlx_lm_worker(str(resolve(loaded.name)), str(model.dtype).rsplit(".", 1)[-1]))
            subjects.append(worker)
            common = bench.same_tokens(subjects, model.vocab_size)
            peers[worker.name] = {**worker.about, "greedy_tokens_in_common": common[worker.name]}
        report = stack.enter_context(progress("Measuring"))
        rows = bench.measure(subjects, plan, model.vocab_size, progress=report)
    settings = {
        "lengths": plan.lengths,
        "contexts": plan.contexts,
        "tokens": plan.count,
        "repetitions": plan.repetitions,
    }
    return Record(machine, loaded.describe(), settings, bandwidth, model.nbytes, bench.drift(rows), peers, rows)


def save(record: Record, path: Path) -> None:
    """Write the record as JSON."""
    try:
        path.write_text(json.dumps(record.to_json(), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise mlxlin.InputError(f"{path} cannot be written: {error.strerror}.", "Name another file.") from error
