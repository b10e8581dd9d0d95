"""A conversation in tokens: what a model has read, and points on the way it can go back to.

A recurrent state cannot be cut: to be at an earlier position one has to have kept the state of that position. So a
timeline keeps checkpoints, and a new prompt costs what lies behind the last checkpoint before it differs from what was
read. Keys and values of attention layers are cut by length; only the fixed-size part of a state is kept per checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mlxlin.backend import memory_bytes, mx
from mlxlin.checkpoints import NEAREST_SPACING, Mark, Point, affordable, load_points, nbytes, save_points, spaced
from mlxlin.errors import InputError, SessionError
from mlxlin.generate import prefill
from mlxlin.models import Model
from mlxlin.state import State

Progress = Callable[[int, int], None]
_SAVED_POINTS = 4  # checkpoints that go into a saved conversation, the last ones


def default_budget() -> int:
    """Bytes of checkpoints kept in memory: an eighth of the machine's."""
    return memory_bytes() // 8


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


@dataclass(frozen=True, eq=False)
class _Place:
    """Where a timeline is. Replaced as a whole, so that an interrupt at any time finds parts that belong together."""

    tokens: list[int]
    state: State
    logits: mx.array | None = None


class Timeline:
    """The live state of one conversation, the tokens it has read, and its checkpoints.

    Args:
        model: what reads the tokens.
        budget: bytes of checkpoints to keep in memory; an eighth of the machine's memory by default.
        store: states of prefixes shared with other conversations.

    Attributes:
        points: its checkpoints, in the order of their positions.
        marks: positions that have a name, likewise.
    """

    def __init__(self, model: Model, *, budget: int | None = None, store: PrefixSource | None = None) -> None:
        self.model = model
        self.budget = default_budget() if budget is None else budget
        self.store = store
        self.points: list[Point] = []
        self.marks: list[Mark] = []
        self._place = _Place([], model.fresh())

    @property
    def tokens(self) -> list[int]:
        """Everything read; not to be changed."""
        return self._place.tokens

    @property
    def state(self) -> State:
        """Has read exactly `tokens`."""
        return self._place.state

    @property
    def logits(self) -> mx.array | None:
        """Behind the last token, [1, 1, vocab]; None where they are not at hand."""
        return self._place.logits

    @property
    def position(self) -> int:
        """Tokens read."""
        return len(self.tokens)

    @property
    def checkpoint_nbytes(self) -> int:
        """Bytes of all checkpoints together."""
        return nbytes(self.points)

    @staticmethod
    def held_nbytes(lines: Iterable[Timeline]) -> int:
        """Bytes that these timelines keep alive together: what they share counts once, room to grow counts too."""
        arrays: dict[int, int] = {}
        for line in lines:
            layers = [layer for point in line.points for layer in point.checkpoint.recurrent if layer]
            held = [*line.state.leaves(), *(array for layer in layers for array in layer.values())]
            arrays.update({id(array): array.nbytes for array in held})
        return sum(arrays.values())

    def fork(self) -> Timeline:
        """A second timeline at the same place; shares everything until one of them goes on."""
        twin = Timeline(self.model, budget=self.budget, store=self.store)
        twin.points, twin.marks, twin._place = list(self.points), list(self.marks), self._place
        return twin

    def advance(self, tokens: Sequence[int], *, marks: Sequence[Mark] = (), progress: Progress | None = None) -> None:
        """Read `tokens`; afterwards `logits` are those behind the last of them.

        Checkpoints are taken at the marks (positions counted from the conversation's beginning), before the last token,
        and, in a long text, at positions whose distance to its end halves each time.
        """
        start, end = self.position, self.position + len(tokens)
        here = {mark.position: mark for mark in marks if start <= mark.position <= end}
        stops = sorted(stop for stop in {*here, *spaced(start, end), end - 1, end} if start <= stop <= end)
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
            self._place = _Place([*self.tokens, *tokens], state)

    def keep(self, name: str = "") -> None:
        """Take a checkpoint here, or give the one that is here its name."""
        if self.position and not any(p.position == self.position and (p.name or not name) for p in self.points):
            others = [point for point in self.points if point.position != self.position]
            here = Point(self.position, name, self.state.checkpoint())
            self.points = affordable([*others, here], self.budget, self.position)

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
        known = [mark for mark in marks if mark.position < reused and mark not in self.marks]
        self.marks = sorted([*self.marks, *known], key=lambda mark: mark.position)
        self.advance(tokens[reused:], marks=[m for m in marks if m.position >= reused], progress=progress)
        why = f"{where}; {cause} {changed}" if changed and where else where or f"{cause} {changed}"
        return Reuse(len(tokens), reused, why)

    def snapshot(self) -> tuple[dict[str, mx.array], dict[str, Any]]:
        """Arrays and a record (plain JSON values) to save: the live state, its last checkpoints, tokens and marks."""
        arrays = {f"live.{name}": array for name, array in self.state.arrays().items()}
        if self.logits is not None:
            arrays["logits"] = self.logits
        saved, points = save_points(self.points[-_SAVED_POINTS:])
        marks = [[mark.position, mark.name, mark.shared] for mark in self.marks]
        return arrays | saved, {"tokens": list(self.tokens), "points": points, "marks": marks}

    def restore_snapshot(self, arrays: Mapping[str, mx.array], record: Mapping[str, Any]) -> None:
        """Become what `snapshot` saved; of the same model, which the caller has made sure of.

        Raises:
            SessionError: the arrays do not fit the model or each other; nothing has changed then.
        """
        live = {name.removeprefix("live."): array for name, array in arrays.items() if name.startswith("live.")}
        state = State.from_arrays(live, self.model.fresh())
        tokens, logits = list(record["tokens"]), arrays.get("logits")
        if state.positions.tolist() != [len(tokens)] or state.kv_length not in (0, len(tokens)):
            raise SessionError(f"The saved state has not read the {len(tokens):,} saved tokens.")
        if logits is not None and logits.shape != (1, 1, self.model.vocab_size):
            raise SessionError(f"The saved logits are {tuple(logits.shape)}, not for {self.model.vocab_size} tokens.")
        points = load_points(arrays, record["points"], state)
        self.points = affordable(points, self.budget, len(tokens))
        self.marks = [Mark(*mark) for mark in record["marks"]]
        self._place = _Place(tokens, state, logits)

    def _read(self, piece: Sequence[int], end: int, progress: Progress | None) -> None:
        if not piece:
            return
        before = self.position

        def report(done: int, _: int) -> None:
            if progress is not None:
                progress(before + done, end)

        logits, state = prefill(self.model, piece, self.state, progress=report)
        self._place = _Place([*self.tokens, *piece], state, logits)

    def _restore(self, limit: int) -> None:
        """Go to the last point at or before `limit`; everything behind it is forgotten."""
        points = [point for point in self.points if point.position <= limit]
        position = points[-1].position if points else 0
        state = self.state.restore(points[-1].checkpoint) if points else self.model.fresh()
        # in this order an interrupt leaves fewer checkpoints at worst, never one behind the state
        self.points, self.marks = points, [mark for mark in self.marks if mark.position <= position]
        self._place = _Place(self.tokens[:position], state)

    def _from_store(self, tokens: Sequence[int]) -> str:
        """Jump ahead to a stored prefix when that spares more reading; says so in words."""
        found = self.store.find(tokens[:-1], self.position, self.model.fresh()) if self.store is not None else None
        if found is None:
            return ""
        length, state = found
        self.points = []  # checkpoints of another line's keys and values
        self._place = _Place(list(tokens[:length]), state)
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
        return where if shared - point.position <= NEAREST_SPACING else f"{where}, the nearest one kept"


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common prefix."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return min(len(one), len(other))
