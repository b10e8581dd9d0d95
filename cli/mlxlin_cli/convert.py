"""`mlxlin convert`: a checkpoint to a folder of mlxlin's own."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import click

import mlxlin
from mlxlin_cli import folders
from mlxlin_cli.loading import notice
from mlxlin_cli.options import debug_option, quantisation, quantisation_options
from mlxlin_cli.terminal import closing, number, progress, size, table, write

if TYPE_CHECKING:
    from mlxlin.convert import Recipe, Report

DTYPES = ("float32", "float16", "bfloat16")
EPILOG = """\b
Examples:
  mlxlin convert Qwen/Qwen3.5-4B -q 4
  mlxlin convert Qwen/Qwen3.5-4B --recipe mixed-4-6 --dry-run
  mlxlin convert Qwen/Qwen3.5-4B -q 4 --target-kl 0.05 --check
  mlxlin convert ./checkpoint ./out --dtype bfloat16

\b
RECIPE is mxfp4, mxfp8, nvfp4, mixed-A-B (B bits for embedding, head and output projections, A for the
rest), or a JSON file; -q takes it too. What decides what a state keeps (decay, beta, routers, low-rank
factors) has at least 8 bits; vectors and convolutions are never quantised. Without -q or --recipe the
numbers stay as they are.
"""


@click.command("convert", epilog=EPILOG)
@click.argument("source")
@click.argument("out", required=False, type=click.Path(path_type=Path))
@quantisation_options
@click.option("--recipe", metavar="RECIPE", help="How to quantise, in place of -q; see below.")
@click.option("--dtype", type=click.Choice(DTYPES), help="Of what is not quantised; the checkpoint's own by default.")
@click.option("--revision", metavar="REV", help="Branch, tag or commit of a hub repository.")
@click.option("--dry-run", is_flag=True, help="Only say what would become of every tensor.")
@click.option("--check", is_flag=True, help="Compare the result with the source: divergence, equal choices.")
@click.option("--target-kl", type=float, metavar="NATS", help="Add bits where they matter until this close.")
@debug_option
def command(
    source: str,
    out: Path | None,
    bits: int | str | None,
    group_size: int | None,
    recipe: str | None,
    dtype: str | None,
    revision: str | None,
    dry_run: bool,
    check: bool,
    target_kl: float | None,
) -> None:
    """Convert SOURCE (hub id, alias, folder or weight file) to the folder OUT.

    OUT appears whole or not at all. Without OUT the folder is named after the source, here.
    """
    from mlxlin.backend import mx
    from mlxlin.convert import make_recipe
    from mlxlin.convert.folder import check_target

    if check and dry_run:
        raise click.UsageError("--check needs something written, so it does not go with --dry-run.")
    if recipe is not None and bits is not None:
        raise mlxlin.InputError("A recipe already says how many bits to use.", "Give either -q or --recipe.")
    asked = bits if recipe is None else recipe
    raised = target_kl is not None
    chosen = make_recipe(**quantisation(4 if asked is None and raised else asked, group_size))
    target = None if dry_run else out or Path(default_name(source, asked, raised))
    if target is not None:
        check_target(target)  # before anything is downloaded
    place: str | Path = source
    with closing():
        if target is not None or raised:  # once, so that all of what follows is about the same files
            place, revision = fetched(source, revision), None
        if target_kl is not None:
            chosen = recipe_within(place, target_kl, chosen)
        with progress(f"Converting {source}", in_bytes=True) as report:
            done = mlxlin.convert_checkpoint(
                place,
                target,
                recipe=chosen,
                dtype=getattr(mx, dtype) if dtype else None,
                revision=revision,
                dry_run=dry_run,
                progress=report,
                notice=notice,
            )
    if dry_run:
        rows = [[name, becomes, size(nbytes) if nbytes else ""] for name, becomes, nbytes in done.fates()]
        write(table([["tensor", "becomes", "size"], *rows], right=(2,)) + "\n\n")
    write(summary(done) + "\n")
    if done.out is not None:
        folders.remember(done.out)
    if check and done.out is not None:
        write(f"\n{compared(place, done.out)}\n")


def fetched(source: str, revision: str | None) -> Path:
    """Where the source is on this machine; from the hub it is downloaded."""
    from mlxlin.convert.resolve import resolve

    with progress(f"Downloading {source}", in_bytes=True) as report:
        return resolve(source, revision, progress=report, notice=notice)


def recipe_within(source: str | Path, target_kl: float, start: Recipe) -> Recipe:
    """A recipe that stays within the target, raised from `start` where it matters."""
    from mlxlin.target import recipe_for

    with progress("Measuring what bits bring") as report:
        recipe, found = recipe_for(source, start, target_kl, progress=report, notice=notice)
    if found is not None:
        write(f"divergence {found.kl:.4f} nats\n\n")
    return recipe


def compared(source: str | Path, out: Path) -> str:
    """The result against its source, in words."""
    from mlxlin.check import check_conversion

    with progress("Comparing with the source") as report:
        found = check_conversion(source, out, progress=report)
    before, after = found.perplexities
    return (
        f"against the source, on {found.places} tokens of a text: divergence {found.kl:.4f} nats (worst "
        f"{found.worst_kl:.3f}), the same token likeliest at {found.agreement:.1%}, "
        f"perplexity {before:.2f} -> {after:.2f}"
    )


def default_name(source: str, asked: int | str | None, raised: bool) -> str:
    """A folder name that says what is in it: the source's last part and how it was quantised."""
    suffix = f"{asked}bit" if isinstance(asked, int) else Path(asked).stem if asked else "mixed" if raised else "mlxlin"
    return f"{Path(source).resolve().name if Path(source).exists() else source.split('/')[-1]}-{suffix}"


def summary(done: Report) -> str:
    """What was used, dropped, and stored as what."""
    prepared = done.prepared
    copied = " (it was converted already: copied)" if done.carried else ""
    parts = [
        f"{'Written to ' + str(done.out) if done.out else 'Nothing was written'}{copied}: "
        f"{number(prepared.parameter_count / 1e6)} M weights from {prepared.format}, "
        f"{size(done.nbytes)}, {done.bits_per_weight:.2f} bits per weight",
        table([["stored as", "arrays", "size"]] + [[f, str(n), size(b)] for f, n, b in done.kinds()], right=(1, 2)),
    ]
    if done.recipe.base is not None:
        parts.insert(1, f"recipe: {done.recipe.describe()}")
    if prepared.dropped:
        counts = Counter(reason for _, reason in prepared.dropped)
        example = {reason: name for name, reason in reversed(prepared.dropped)}
        rows = [[str(count), reason, example[reason]] for reason, count in counts.items()]
        parts.append(table([["dropped", "because", "for example"], *rows], right=(0,)))
    else:
        parts.append("every tensor of the source was used")
    return "\n\n".join(parts)
