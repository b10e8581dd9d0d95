"""`mlxlin info`: a model without loading it, and the machine it would run on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

import mlxlin
from mlxlin_cli.loading import notice
from mlxlin_cli.options import Settings, debug_option, model_option, quantisation, quantisation_options
from mlxlin_cli.terminal import bar, number, size, table, write

if TYPE_CHECKING:
    from mlxlin.description import Description

EPILOG = """\b
Examples:
  mlxlin info
  mlxlin info Qwen/Qwen3.5-9B -q 4
"""
CONTEXTS = (1024, 8192, 65536, 524288)


@click.command("info", epilog=EPILOG)
@click.argument("name", metavar="[MODEL]", required=False)
@quantisation_options
@click.option("--revision", metavar="REV", help="Branch, tag or commit of a hub repository.")
@model_option
@debug_option
@click.pass_obj
def command(
    settings: Settings, name: str | None, bits: int | str | None, group_size: int | None, revision: str | None
) -> None:
    """Show a MODEL's layers, sizes and memory, and this machine. Of a hub model only the headers are read."""
    found = mlxlin.describe(name or settings.model, **quantisation(bits, group_size), revision=revision)
    for text in found.notices:
        notice(text)
    write(f"{model_table(found)}\n\n{memory_table(found)}\n\n{verdict(found)}\n\n{machine_table()}\n")


def model_table(found: Description) -> str:
    """What it is made of."""
    spec = found.spec
    kinds = ", ".join(f"{count} x {kind}" for kind, count in found.layers.items())
    decoding = ", ".join(f"{count} x {how}" for how, count in found.decoding.items())
    stored = ", ".join(f"{kind} {size(nbytes)}" for kind, nbytes in found.kinds.items())
    rows = [
        ["model", found.source + (f" ({found.path})" if found.path and str(found.path) != found.source else "")],
        ["family", f"{spec.family}, stored as {found.format}"],
        ["layers", f"{len(spec.layers)}: {kinds}"],
        ["width", f"{spec.width:,}, vocabulary {spec.vocab:,}, context {spec.context:,} tokens"],
        ["on Metal", f"a token: {decoding}"],
        ["parameters", f"{number(found.parameter_count / 1e6)} M"],
        ["weights", f"{size(found.stored_bytes)} stored ({stored})"],
        ["loaded", f"{size(found.memory_bytes)}, computing in {str(found.dtype).rsplit('.', 1)[-1]}"],
        ["state", f"{size(found.state_bytes)} per conversation, whatever its length"],
        ["keys, values", f"{size(found.kv_bytes_per_token)} per token" if found.kv_bytes_per_token else "none"],
    ]
    if found.dropped:
        rows.append(["not used", f"{len(found.dropped)} tensors, such as {found.dropped[0][0]}: {found.dropped[0][1]}"])
    return table(rows)


def memory_table(found: Description) -> str:
    """What has a fixed size against what grows with the conversation."""
    contexts = [c for c in CONTEXTS if c <= found.spec.context] or [found.spec.context]
    if found.spec.context not in contexts:
        contexts.append(found.spec.context)
    largest = max(found.state_bytes, contexts[-1] * found.kv_bytes_per_token)
    rows = [["tokens", "state", "keys, values", ""]]
    for context in contexts:
        grown = context * found.kv_bytes_per_token
        share = bar(grown, largest) if grown else bar(found.state_bytes, largest)
        rows.append([f"{context:,}", size(found.state_bytes), size(grown), share])
    return table(rows, right=(0, 1, 2))


def verdict(found: Description) -> str:
    """Whether it fits into the memory that is free now, and how long a conversation may get."""
    free = size(found.available_bytes)
    if not found.fits:
        return f"Does not fit: it needs {size(found.bytes_at(0))}, {free} are free. Try -q 4, or a smaller model."
    needed = found.bytes_at(found.spec.context)
    if needed <= found.available_bytes:
        return f"Fits, with a whole context of {found.spec.context:,} tokens: {size(needed)} of {free} free."
    tokens = (found.available_bytes - found.bytes_at(0)) // found.kv_bytes_per_token
    return f"Fits up to {tokens:,} of its {found.spec.context:,} tokens: {free} are free."


def machine_table() -> str:
    """Device, versions, BLAS, threads, memory, and which code runs the recurrences."""
    backend = mlxlin.describe_backend()
    threads = backend["blas_threads"]
    blas = f"{backend['blas']}, {threads} thread{'' if threads == 1 else 's'}"
    before = ", imported by this process before mlxlin" if backend["mlx_imported_before_us"] else ""
    rows = [
        ["machine", f"{backend['chip']}, {backend['architecture']}, {size(backend['memory_bytes'])} of memory"],
        ["system", f"{backend['os']}, Python {backend['python']}"],
        ["MLX", f"{backend['mlx']} on {backend['device']}{before}"],
        ["CPU products", blas + (f" ({backend['blas_note']})" if backend["blas_note"] else "")],
        ["mlxlin", mlxlin.__version__],
    ]
    columns = ("path", "device", "decay", "tokens", "heads")
    paths = [["recurrence path", "device", "decay per", "tokens", "heads"]]
    paths += [[row[column] for column in columns] for row in mlxlin.recurrences.paths.table()]
    failures = [["not used here", ""]]
    failures += [[kernel, complaint] for kernel, complaint in mlxlin.recurrences.probe.failures().items()]
    return "\n\n".join(table(part) for part in (rows, paths, failures) if len(part) > 1)
