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
    from mlxlin.convert import Report

DTYPES = ("float32", "float16", "bfloat16")
EPILOG = """\b
Examples:
  mlxlin convert Qwen/Qwen3.5-4B -q 4
  mlxlin convert Qwen/Qwen3.5-4B --recipe mixed-4-6 --dry-run
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
@debug_option
def command(source: str, out: Path | None, dry_run: bool, dtype: str | None, **options: Any) -> None:
    """Convert SOURCE (hub id, alias, folder or weight file) to the folder OUT.

    OUT appears whole or not at all. Without OUT the folder is named after the source, here.
    """
    from mlxlin.backend import mx

    if out is None and not dry_run:
        out = Path(default_name(source, options["bits"], options["recipe"]))
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
