"""A conversation in tokens: what a model has read, and points on the way it can go back to.

A recurrent state cannot be cut: to be at an earlier position one has to have kept the state of that position. So a
timeline keeps checkpoints, and a new prompt costs what lies behind the last checkpoint before it differs from what was
read. Keys and values of attention layers are cut by length; only the fixed-size part of a state is kept per checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mlxlin.backend import memory_bytes, mx
from mlxlin.errors import InputError
from mlxlin.generate import prefill
from mlxlin.models import Model
from mlxlin.state import Checkpoint, State

Progress = Callable[[int, int], None]
_NEAREST_SPACING = 512  # tokens between the end of a long prompt and the last of its spaced checkpoints

_SAVED_POINTS = 8  # checkpoints that go into a saved conversation, the last ones


def default_budget() -> int:
    """Bytes of checkpoints kept in memory: an eighth of the machine's."""
    return memory_bytes() // 8


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


@dataclass(frozen=True)
class Reuse:
    """How much of a prompt did not have to be read again, and why not more.

    Attributes:
        total: tokens of the prompt.
        reused: how many of them were not evaluated.
        why: the reason in words, for the person who waits.
    """

    total: int
    reused: int
    why: str

    def __str__(self) -> str:
        return f"reused {self.reused:,} of {self.total:,} tokens ({self.why})"


class PrefixSource(Protocol):
    """Where states of prompts read earlier, by anybody, may be found (see `store.PrefixStore`)."""

    def find(self, tokens: Sequence[int], longer_than: int, like: State) -> tuple[int, State] | None:
        """The longest stored prefix of `tokens` beyond `longer_than`, as (length, state)."""

    def put(self, tokens: Sequence[int], state: State) -> None:
        """Offer the state that has read exactly `tokens`."""


class Timeline:
    """The live state of one conversation, the tokens it has read, and its checkpoints.

    Args:
        model: what reads the tokens.
        budget: bytes of checkpoints to keep in memory; an eighth of the machine's memory by default.
        store: states of prefixes shared with other conversations.
    """

    def __init__(self, model: Model, *, budget: int | None = None, store: PrefixSource | None = None) -> None:
        self.model = model
        self.budget = default_budget() if budget is None else budget
        self.store = store
        self.tokens: list[int] = []
        self.state: State = model.fresh()
        self.logits: mx.array | None = None  # behind the last token, [1, 1, vocab]
        self.points: list[Point] = []
        self.marks: list[Mark] = []

    @property
    def position(self) -> int:
        """Tokens read."""
        return len(self.tokens)

    @property
    def checkpoint_nbytes(self) -> int:
        """Bytes of all checkpoints together."""
        return sum(point.checkpoint.nbytes for point in self.points)

    def fork(self) -> Timeline:
        """A second timeline at the same place; shares everything until one of them goes on."""
        twin = Timeline(self.model, budget=self.budget, store=self.store)
        twin.tokens, twin.state, twin.logits = list(self.tokens), self.state, self.logits
        twin.points, twin.marks = list(self.points), list(self.marks)
        return twin

    def advance(self, tokens: Sequence[int], *, marks: Sequence[Mark] = (), progress: Progress | None = None) -> None:
        """Read `tokens`; afterwards `logits` are those behind the last of them.

        Checkpoints are taken at the marks (positions counted from the conversation's beginning), before the last token,
        and, in a long text, at positions whose distance to its end halves each time.
        """
        start, end = self.position, self.position + len(tokens)
        here = {mark.position: mark for mark in marks if start <= mark.position <= end}
        stops = sorted(stop for stop in {*here, *_spaced(start, end), end - 1, end} if start <= stop <= end)
        for stop in stops:
            self._read(tokens[self.position - start : stop - start], end, progress)
            mark = here.get(stop)
            if mark is not None and mark not in self.marks:
                self.marks.append(mark)
            if mark is not None or stop != end:
                self.keep(mark.name if mark is not None else "")
            if mark is not None and mark.shared and self.store is not None:
                self.store.put(self.tokens, self.state)

    def adopt(self, tokens: Sequence[int], state: State) -> None:
        """Take over `state`, which has read `tokens` behind the timeline's own: what a decode loop has generated."""
        if tokens:
            self.tokens += tokens
            self.state, self.logits = state, None

    def keep(self, name: str = "") -> None:
        """Take a checkpoint here."""
        if self.position and all(point.position != self.position for point in self.points):
            self.points.append(Point(self.position, name, self.state.checkpoint()))
            self._evict()

    def rewind(self, position: int, *, progress: Progress | None = None) -> int:
        """Go back to `position`, reading again what lies between it and the last checkpoint before it.

        Returns:
            The number of tokens that had to be read again.
        """
        if not 0 <= position <= self.position:
            raise InputError(f"Cannot go back to token {position} of {self.position}.")
        if position == self.position:
            return 0
        lost = self.tokens[:position]
        self._restore(position)
        reread = lost[self.position :]
        self.advance(reread, progress=progress)
        return len(reread)

    def resume(
        self,
        tokens: Sequence[int],
        *,
        marks: Sequence[Mark] = (),
        cause: str = "the text changed in",
        progress: Progress | None = None,
    ) -> Reuse:
        """Be behind exactly `tokens`, reading as little as possible; afterwards `logits` are those behind the last one.

        Args:
            tokens: the whole prompt, from the conversation's beginning; not empty.
            marks: where its parts begin.
            cause: who is to blame when it differs from what was read, e.g. "the template rewrote".
            progress: called with (tokens read, tokens of the prompt).
        """
        if not tokens:
            raise InputError("There is nothing to read: the prompt is empty.")
        shared = common_prefix(self.tokens, tokens)
        changed = self._name_at(shared) if shared < self.position else ""
        # the logits behind the last token are needed too: keep one token to read unless they are at hand
        ready = shared == len(tokens) == self.position and self.logits is not None
        if shared < self.position or (shared == len(tokens) and not ready):
            self._restore(min(shared, len(tokens) - 1))
        where = self._describe_start(shared, changed)
        if found := self._from_store(tokens):
            where = found
        reused = self.position
        self.marks += [m for m in marks if m.position < reused and m not in self.marks]
        self.marks.sort(key=lambda mark: mark.position)
        self.advance(tokens[reused:], marks=[m for m in marks if m.position >= reused], progress=progress)
        why = f"{where}; {cause} {changed}" if changed and where else where or f"{cause} {changed}"
        return Reuse(len(tokens), reused, why)

    def snapshot(self) -> tuple[dict[str, mx.array], dict[str, Any]]:
        """Arrays and a record (plain JSON values) to save: the live state, its last checkpoints, tokens and marks."""
        arrays = {f"live.{name}": array for name, array in self.state.arrays().items()}
        if self.logits is not None:
            arrays["logits"] = self.logits
        kept = self.points[-_SAVED_POINTS:]
        for index, point in enumerate(kept):
            arrays[f"points.{index}.positions"] = point.checkpoint.positions
            for layer, named in enumerate(point.checkpoint.recurrent):
                arrays.update({f"points.{index}.{layer}.{name}": array for name, array in (named or {}).items()})
        points = [[point.position, point.name, point.checkpoint.kv_length] for point in kept]
        marks = [[mark.position, mark.name, mark.shared] for mark in self.marks]
        return arrays, {"tokens": self.tokens, "points": points, "marks": marks}

    def restore_snapshot(self, arrays: Mapping[str, mx.array], record: Mapping[str, Any]) -> None:
        """Become what `snapshot` saved; of the same model, which the caller has made sure of.

        Raises:
            SessionError: the arrays do not fit the model.
        """
        live = {name.removeprefix("live."): array for name, array in arrays.items() if name.startswith("live.")}
        state = State.from_arrays(live, self.model.fresh())
        points = []
        for index, (position, name, kv_length) in enumerate(record["points"]):
            recurrent = tuple(
                {key: arrays[f"points.{index}.{layer}.{key}"] for key in named} if isinstance(named, Mapping) else None
                for layer, named in enumerate(state.layers)
            )
            checkpoint = Checkpoint(recurrent, arrays[f"points.{index}.positions"], kv_length)
            points.append(Point(position, name, checkpoint))
        self.state, self.tokens, self.logits = state, list(record["tokens"]), arrays.get("logits")
        self.points, self.marks = points, [Mark(*mark) for mark in record["marks"]]
        self._evict()

    def _read(self, piece: Sequence[int], end: int, progress: Progress | None) -> None:
        if not piece:
            return
        before = self.position

        def report(done: int, _: int) -> None:
            if progress is not None:
                progress(before + done, end)

        self.logits, self.state = prefill(self.model, piece, self.state, progress=report)
        self.tokens += piece

    def _restore(self, limit: int) -> None:
        """Go to the last point at or before `limit`; everything behind it is forgotten."""
        reachable = [point for point in self.points if point.position <= limit]
        self.points = reachable
        if reachable:
            self.state = self.state.restore(reachable[-1].checkpoint)
            self.tokens = self.tokens[: reachable[-1].position]
        else:
            self.state, self.tokens = self.model.fresh(), []
        self.marks = [mark for mark in self.marks if mark.position <= self.position]
        self.logits = None

    def _from_store(self, tokens: Sequence[int]) -> str:
        """Jump ahead to a stored prefix when that spares more reading; says so in words."""
        found = self.store.find(tokens[:-1], self.position, self.model.fresh()) if self.store is not None else None
        if found is None:
            return ""
        length, self.state = found
        self.tokens, self.logits = list(tokens[:length]), None
        self.points = []  # checkpoints of another line's keys and values
        self.keep()
        return "stored earlier on this machine"

    def _name_at(self, position: int) -> str:
        """What the token at `position` belongs to."""
        return next((mark.name for mark in reversed(self.marks) if mark.position <= position), "its beginning")

    def _describe_start(self, shared: int, changed: str) -> str:
        if not self.position:
            return "" if changed else "nothing was read before"
        if not changed:
            return "everything read so far"
        point = self.points[-1]
        where = f"checkpoint before {point.name}" if point.name else f"checkpoint at token {point.position:,}"
        return where if shared - point.position <= _NEAREST_SPACING else f"{where}, the nearest one kept"

    def _evict(self) -> None:
        """Give up the checkpoints least worth their bytes until the budget holds; the newest one always stays."""
        while len(self.points) > 1 and self.checkpoint_nbytes > self.budget:
            worth = [self._worth(index) for index in range(len(self.points) - 1)]
            del self.points[worth.index(min(worth))]

    def _worth(self, index: int) -> float:
        """Tokens a checkpoint is expected to spare.

        Losing it costs the way to the one before it, whenever a prompt departs between it and the next one. Departures
        near the end (undo, retry, a rewritten last turn) are likelier: their distance to the end is taken as uniform in
        its logarithm. A named point begins a turn, where departures really happen, and counts fourfold.
        """
        here = self.points[index].position
        before = self.points[index - 1].position if index else 0
        after = self.points[index + 1].position
        end = self.position + 1
        chance = math.log((end - here + 1) / (end - after + 1))
        return (here - before) * chance * (4 if self.points[index].name else 1)


def _spaced(start: int, end: int) -> Iterable[int]:
    """Positions in a long text whose distance to its end halves each time."""
    distance = (end - start) // 2
    while distance >= _NEAREST_SPACING:
        yield end - distance
        distance //= 2


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common prefix."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return min(len(one), len(other))
