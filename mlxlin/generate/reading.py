"""Prefill: a prompt is read chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mlxlin.backend import mx
from mlxlin.errors import InputError
from mlxlin.generate.records import Progress

if TYPE_CHECKING:
    from mlxlin.models import Model
    from mlxlin.state import State


def chunk_length() -> int:
    """Tokens read at a time: enough to be efficient, few enough to report progress and keep memory flat."""
    return 2048 if mx.default_device() == mx.Device(mx.gpu) else 512


def prefill(
    model: Model,
    tokens: Sequence[int] | Sequence[Sequence[int]] | mx.array,
    state: State | None = None,
    *,
    lengths: Sequence[int] | None = None,
    progress: Progress | None = None,
) -> tuple[mx.array, State]:
    """Read a prompt, chunk by chunk, each evaluated before the next begins; the head runs on the last token only.

    Args:
        tokens: one row of ids, or rows padded on the right to one length.
        state: what came before; stays valid.
        lengths: real tokens of each row, at least 1; None when none is padded.
        progress: called with (tokens read, all) after each chunk. What it raises ends the reading.

    Returns:
        Logits float32 [B, 1, vocab] behind each row's last token, and the state there, both evaluated.

    Raises:
        InputError: a row without tokens.
    """
    rows = _rows(tokens)
    total = rows.shape[1] if isinstance(rows, mx.array) else max(map(len, rows), default=0)
    if not total or (lengths is not None and min(lengths) < 1):
        raise InputError("There is nothing to read: the prompt is empty.", "Give at least one token.")
    logits: mx.array | None = None
    for start in range(0, total, chunk_length()):
        end = min(start + chunk_length(), total)
        chunk = rows[:, start:end] if isinstance(rows, mx.array) else [row[start:end] for row in rows]
        real = None if lengths is None else [min(max(length - start, 0), end - start) for length in lengths]
        ending = [start < length <= end for length in lengths or [total]]
        found, state = model(chunk, state, lengths=real, logits="last" if any(ending) else "none")
        if found is not None:  # rows of a batch end in different chunks
            kept = found if logits is None else logits
            logits = mx.where(mx.array(ending)[:, None, None], found, kept) if lengths else found
        mx.eval(state.leaves() if logits is None else [logits, *state.leaves()])
        if progress is not None:
            progress(end, total)
    mx.clear_cache()
    assert logits is not None and state is not None
    return logits, state


def _rows(tokens: Sequence[int] | Sequence[Sequence[int]] | mx.array) -> Sequence[Sequence[int]] | mx.array:
    if isinstance(tokens, mx.array):
        return tokens[None] if tokens.ndim == 1 else tokens
    flat = len(tokens) == 0 or isinstance(tokens[0], int)
    return [tokens] if flat else tokens  # type: ignore[list-item, return-value]
