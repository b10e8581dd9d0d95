"""Checkpoints on a conversation's way: where to take them, and which are worth their bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlxlin.backend import mx
from mlxlin.errors import SessionError
from mlxlin.state import Checkpoint, State

NEAREST_SPACING = 512  # tokens between the end of a long prompt and the last of its spaced checkpoints
_NAMED = 4  # how much likelier a prompt departs where a turn begins than anywhere else


@dataclass(frozen=True)
class Mark:
    """A position where something begins that people have a name for, e.g. (120, "turn 3"); worth a checkpoint.

    What ends at a `shared` mark is likely to open other conversations too, and is offered to the store.
    """

    position: int
    name: str
    shared: bool = False


@dataclass(frozen=True)
class Point:
    """A position that can be returned to. `name` says what begins there; empty for the spaced ones in long prompts."""

    position: int
    name: str
    checkpoint: Checkpoint


def spaced(start: int, end: int) -> Iterable[int]:
    """Positions in a long text whose distance to its end halves each time."""
    distance = (end - start) // 2
    while distance >= NEAREST_SPACING:
        yield end - distance
        distance //= 2


def nbytes(points: Iterable[Point]) -> int:
    """Bytes that the checkpoints keep alive."""
    return sum(point.checkpoint.nbytes for point in points)


def affordable(points: Sequence[Point], budget: int, end: int) -> list[Point]:
    """The points most worth their bytes, within `budget` bytes; the last one always stays.

    Args:
        points: in the order of their positions.
        end: position of the conversation.
    """
    kept = list(points)
    while len(kept) > 1 and nbytes(kept) > budget:
        worth = [_worth(kept, index, end) for index in range(len(kept) - 1)]
        del kept[worth.index(min(worth))]
    return kept


def _worth(points: Sequence[Point], index: int, end: int) -> float:
    """Tokens a checkpoint is expected to spare.

    Losing it costs the way to the one before it, whenever a prompt departs between it and the next one. Departures near
    the end (undo, retry, a rewritten last turn) are likelier: their distance to the end is taken as uniform in its
    logarithm. A named point begins a turn, where departures really happen.
    """
    here, after = points[index].position, points[index + 1].position
    before = points[index - 1].position if index else 0
    chance = math.log((end - here + 1) / (end - after + 1))
    return (here - before) * chance * (_NAMED if points[index].name else 1)


def save_points(points: Sequence[Point]) -> tuple[dict[str, mx.array], list[list[Any]]]:
    """Named arrays and plain JSON values; `load_points` reads them back."""
    arrays: dict[str, mx.array] = {}
    for index, point in enumerate(points):
        arrays[f"points.{index}.positions"] = point.checkpoint.positions
        for layer, named in enumerate(point.checkpoint.recurrent):
            arrays.update({f"points.{index}.{layer}.{name}": array for name, array in (named or {}).items()})
    return arrays, [[point.position, point.name, point.checkpoint.kv_length] for point in points]


def load_points(arrays: Mapping[str, mx.array], record: Sequence[Sequence[Any]], state: State) -> list[Point]:
    """The saved points on the way to `state`.

    Raises:
        SessionError: an array is missing or of another shape or dtype, or a point lies behind the state.
    """
    points = []
    for index, (position, name, kv_length) in enumerate(record):
        recurrent = tuple(
            {key: _like(array, arrays, f"points.{index}.{layer}.{key}") for key, array in named.items()}
            if isinstance(named, Mapping)
            else None
            for layer, named in enumerate(state.layers)
        )
        positions = _like(state.positions, arrays, f"points.{index}.positions")
        if positions.tolist() != [position] or kv_length not in (0, position) or kv_length > state.kv_length:
            raise SessionError(f"The saved checkpoint at token {position} does not lie on the way to the saved state.")
        points.append(Point(position, name, Checkpoint(recurrent, positions, kv_length)))
    return points


def _like(wanted: mx.array, arrays: Mapping[str, mx.array], name: str) -> mx.array:
    array = arrays.get(name)
    if array is None or array.shape != wanted.shape or array.dtype != wanted.dtype:
        found = "missing" if array is None else f"{array.dtype} {tuple(array.shape)}"
        raise SessionError(f"'{name}' of the saved checkpoints is {found}, expected {wanted.dtype} {wanted.shape}.")
    return array
