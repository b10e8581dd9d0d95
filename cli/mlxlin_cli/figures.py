"""A benchmark record as tables and bars on the terminal, or as a drawing."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlxlin
from mlxlin_cli.terminal import bar, number, size, table

if TYPE_CHECKING:
    from mlxlin.bench import Row
    from mlxlin_cli.record import Record

WORDS = {"prefill": "prefill", "decode": "decode behind", "turn": "next turn behind"}


def render(record: Record, old: Record | None = None) -> str:
    """Everything there is to say about a run, in text."""
    from mlxlin.bench import DRIFT

    parts = [heading(record), speeds(record), bars(record), memory(record)]
    if record.peers:
        parts.append(peers(record))
    if old is not None:
        parts.append(comparison(record, old))
    if abs(record.drift) > DRIFT:
        parts.append(
            f"Warning: speeds changed by {record.drift:+.0%} from the first to the last repetitions; the machine was "
            "busy or got warm. Values in their order are in the --json record."
        )
    return "\n\n".join(filter(None, parts))


def heading(record: Record) -> str:
    """What ran where."""
    machine, model, settings = record.machine, record.model, record.settings
    power = "" if machine["power"] == "unknown" else f" · on {machine['power']}"
    bits = f" · -q {model['bits']}" if model["bits"] else ""
    return (
        f"{model['name']} · {number(model['parameters'] / 1e6)} M parameters · {model['dtype']}"
        f"{bits} · {model['path']}\n"
        f"{machine['chip']} · {machine['cores']} cores · {size(machine['memory_bytes'])} · {machine['os']}{power}\n"
        f"MLX {machine['mlx']} on {machine['device']} · {machine['blas']} · "
        f"mlxlin {machine['mlxlin']} {machine['commit']}\n"
        f"{settings['repetitions']} repetitions after warm-up, alternating; median and half range; nothing reused"
    )


def speeds(record: Record) -> str:
    """One line per row: rate, spread, time, share of the bandwidth."""
    lines = [["", "tokens", "tokens/s", "spread", "time", "bandwidth"]]
    for row in record.rows:
        share = f"{record.share(row):.0%}" if row.kind == "decode" and row.subject == "mlxlin" else ""
        who = f"{row.subject} " if record.peers else ""
        lines.append(
            [
                f"{who}{WORDS[row.kind]} {row.length:,}",
                f"{row.tokens:,}",
                number(row.median),
                f"±{row.spread:.1%}",
                f"{number(row.tokens / row.median * 1e3)} ms",
                share,
            ]
        )
    note = f"bandwidth: share of the {size(record.bandwidth)}/s measured here that decoding uses"
    return table(lines, right=(1, 2, 3, 4, 5)) + f"\n{note}"


def bars(record: Record) -> str:
    """Rates over length, one block of bars per kind and subject."""
    blocks = []
    for kind in ("prefill", "decode"):
        rows = [row for row in record.rows if row.kind == kind]
        if len({row.length for row in rows}) < 2:
            continue
        largest = max(row.median for row in rows)
        lines = [[row.subject, f"{row.length:,}", f"{bar(row.median, largest)} {number(row.median)}"] for row in rows]
        over = "prompt length" if kind == "prefill" else "context"
        blocks.append(f"{kind} tokens/s over {over}\n" + table(lines, right=(1,)))
    return "\n\n".join(blocks)


def memory(record: Record) -> str:
    """What has a fixed size against what grows: bytes of state and of keys and values behind each length."""
    rows = {row.length: row for row in record.rows if row.subject == "mlxlin"}
    largest = max(max(row.state_bytes, row.kv_bytes) for row in rows.values())
    lines = []
    for length, row in sorted(rows.items()):
        lines.append([f"{length:,}", "state", f"{bar(row.state_bytes, largest)} {size(row.state_bytes)}"])
        if row.kv_bytes:
            lines.append(["", "keys and values", f"{bar(row.kv_bytes, largest)} {size(row.kv_bytes)}"])
    return "memory of one conversation over its length\n" + table(lines, right=(0,))


def peers(record: Record) -> str:
    """Each measurement as a ratio to every peer's, with its range over the repetitions."""
    from mlxlin_cli.record import compare

    ours = [row for row in record.rows if row.subject == "mlxlin"]
    lines = []
    for name, about in record.peers.items():
        theirs = [_renamed(row, "mlxlin") for row in record.rows if row.subject == name]
        for change in compare(ours, theirs):
            what = f"{WORDS[change.key[1]]} {change.key[2]:,}"
            lines.append([what, f"{change.ratio:.2f}x {name}", f"{change.low:.2f} to {change.high:.2f}"])
        versions = ", ".join(f"{key} {value}" for key, value in about.items() if isinstance(value, str))
        lines.append([f"greedy tokens equal to {name}'s", f"{about['greedy_tokens_in_common']} of 32", versions])
    return "against peers in the same run\n" + table(lines)


def comparison(record: Record, old: Record) -> str:
    """This run against an earlier one."""
    from mlxlin_cli.record import compare, differences

    lines = [
        [
            f"{who} {WORDS[kind]} {length:,}",
            f"{change.ratio:.3f}x",
            f"{change.low:.3f} to {change.high:.3f}",
            change.verdict,
        ]
        for change in compare(record.rows, old.rows)
        for who, kind, length in [change.key]
    ]
    if not lines:
        return "The earlier run measured nothing that this one did."
    changed = differences(record, old)
    return (
        "against the earlier run, with the range over all repetitions\n"
        + table(lines, right=(1,))
        + ("\nalso changed: " + "; ".join(changed) if changed else "")
    )


def _renamed(row: Row, subject: str) -> Row:
    from dataclasses import replace

    return replace(row, subject=subject)


def check_plot(path: Path) -> None:
    """Refuse early what `draw` could not do.

    Raises:
        InputError: the file's ending. UnsupportedError: matplotlib is not installed.
    """
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise mlxlin.InputError(f"{path} does not say what to draw.", "End its name in .png, .svg or .pdf.")
    if importlib.util.find_spec("matplotlib") is None:
        raise mlxlin.UnsupportedError("Drawing needs matplotlib, which is not installed.", "pip install 'mlxlin[plot]'")


def draw(record: Record, path: Path) -> None:
    """Four panels: prefill and decode rates, memory, share of the bandwidth, over length."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(10, 7), layout="constrained")
    for axis, kind in ((axes[0, 0], "prefill"), (axes[0, 1], "decode")):
        for subject in dict.fromkeys(row.subject for row in record.rows):
            _rates(axis, [row for row in record.rows if row.kind == kind and row.subject == subject])
        axis.set(title=f"{kind}, tokens/s", ylim=(0, None))
        axis.legend()
    ours = sorted((r for r in record.rows if r.subject == "mlxlin" and r.kind != "turn"), key=lambda r: r.length)
    lengths = [row.length for row in ours]
    axes[1, 0].plot(lengths, [row.state_bytes / 1e6 for row in ours], "o-", label="state")
    axes[1, 0].plot(lengths, [row.kv_bytes / 1e6 for row in ours], "s--", label="keys and values")
    axes[1, 0].set(title="memory of one conversation, MB", ylim=(0, None))
    axes[1, 0].legend()
    decode = [row for row in ours if row.kind == "decode"]
    axes[1, 1].plot([row.length for row in decode], [100 * record.share(row) for row in decode], "o-")
    axes[1, 1].set(title=f"% of {size(record.bandwidth)}/s that decoding uses", ylim=(0, None))
    for axis in axes.flat:
        axis.set(xlabel="tokens")
        axis.set_xscale("log", base=2)
    figure.suptitle(f"{record.model['name']} · {record.machine['chip']} · MLX {record.machine['mlx']}")
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise mlxlin.InputError(f"{path} cannot be written: {error.strerror}.", "Name another file.") from error
    finally:
        plt.close(figure)


def _rates(axis: Any, rows: list[Row]) -> None:
    """Medians with the range of all repetitions."""
    if rows:
        middle = [row.median for row in rows]
        below = [row.median - min(row.rates) for row in rows]
        above = [max(row.rates) - row.median for row in rows]
        axis.errorbar([r.length for r in rows], middle, [below, above], marker="o", capsize=3, label=rows[0].subject)
