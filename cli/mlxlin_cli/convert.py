"""`mlxlin convert`: a checkpoint to a folder of mlxlin's own."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import mlxlin
from mlxlin_cli import folders
from mlxlin_cli.loading import notice
from mlxlin_cli.options import debug_option
from mlxlin_cli.terminal import number, progress, size, table, write

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
rest), or a JSON file. Gates and other sensitive projections keep at least 8 bits; vectors are never
quantised. Without -q or --recipe the numbers stay as they are.
"""


@click.command("convert", epilog=EPILOG)
@click.argument("source")
@click.argument("out", required=False, type=click.Path(path_type=Path))
@click.option("-q", "--bits", type=int, metavar="BITS", help="Bits per weight: 2, 3, 4, 5, 6 or 8.")
@click.option("--group-size", type=int, metavar="N", help="Weights that share a scale: 32, 64 or 128.")
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
    dry_run: bool,
    check: bool,
    target_kl: float | None,
    dtype: str | None,
    **options: Any,
) -> None:
    """Convert SOURCE (hub id, alias, folder or weight file) to the folder OUT.

    OUT appears whole or not at all. Without OUT the folder is named after the source, here.
    """
    from mlxlin.backend import mx

    if check and dry_run:
        raise click.UsageError("--check needs something written, so it does not go with --dry-run.")
    name = default_name(source, options["bits"], "mixed" if target_kl else options["recipe"])
    if target_kl is not None:
        options["recipe"] = recipe_within(source, target_kl, options)
        options["bits"] = options["group_size"] = None
    if out is None and not dry_run:
        out = Path(name)
    with progress(f"Converting {source}", in_bytes=True) as report:
        done = mlxlin.convert_checkpoint(
            source,
            out,
            dtype=getattr(mx, dtype) if dtype else None,
            dry_run=dry_run,
            progress=report,
            notice=notice,
            **options,
        )
    if dry_run:
        for text in done.prepared.notices:
            notice(text)
        write(table([["tensor", "becomes"], *map(list, done.fates())]) + "\n\n")
    write(summary(done) + "\n")
    if done.out is not None:
        folders.remember(done.out)
    if check and done.out is not None:
        write(f"\n{compared(source, done.out, options['revision'])}\n")


def recipe_within(source: str, target_kl: float, options: dict[str, Any]) -> Recipe:
    """A recipe that stays within the target, raised from the one asked for (4 bits by default) where it matters."""
    from mlxlin.convert import make_recipe
    from mlxlin.target import recipe_for

    bits = options["bits"] or (None if options["recipe"] else 4)
    start = make_recipe(bits, options["group_size"], None, options["recipe"])
    with progress("Measuring what bits bring") as report:
        recipe, found = recipe_for(
            source, start, target_kl, revision=options["revision"], progress=report, notice=notice
        )
    write(f"divergence {found.kl:.4f} nats with: {recipe.describe()}\n\n")
    return recipe


def compared(source: str, out: Path, revision: str | None) -> str:
    """The result against its source, in words."""
    from mlxlin.check import check_conversion

    with progress("Comparing with the source") as report:
        found = check_conversion(source, out, revision=revision, progress=report)
    before, after = found.perplexities
    return (
        f"against the source, on {found.places} tokens of a text: divergence {found.kl:.4f} nats (worst "
        f"{found.worst_kl:.3f}), the same token likeliest at {found.agreement:.1%}, "
        f"perplexity {before:.2f} -> {after:.2f}"
    )


def default_name(source: str, bits: int | None, recipe: str | None) -> str:
    """A folder name that says what is in it: the source's last part and how it was quantised."""
    suffix = f"{bits}bit" if bits else Path(recipe).stem if recipe else "mlxlin"
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
    if prepared.dropped:
        counts = Counter(reason for _, reason in prepared.dropped)
        example = {reason: name for name, reason in reversed(prepared.dropped)}
        rows = [[str(count), reason, example[reason]] for reason, count in counts.items()]
        parts.append(table([["dropped", "because", "for example"], *rows], right=(0,)))
    else:
        parts.append("every tensor of the source was used")
    return "\n\n".join(parts)
