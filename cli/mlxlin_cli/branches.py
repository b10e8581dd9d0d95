"""The branches of a chat: conversations that share what they have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import mlxlin

if TYPE_CHECKING:
    from mlxlin import Conversation

_SHOWN = 50  # characters of a branch's last message


class Branches:
    """All branches, numbered from 1, and the number of the one talked in, `here`."""

    def __init__(self, first: Conversation) -> None:
        self._all = [first]
        self._budget = first.timeline.budget
        self.here = 1

    def __len__(self) -> int:
        return len(self._all)

    @property
    def current(self) -> Conversation:
        """The conversation talked in."""
        return self._all[self.here - 1]

    @property
    def empty(self) -> bool:
        """Whether nothing was said in any of them."""
        return not any(branch.turns for branch in self._all)

    @property
    def held_nbytes(self) -> int:
        """Bytes of states and checkpoints of all branches; what they share counts once."""
        return mlxlin.Timeline.held_nbytes(branch.timeline for branch in self._all)

    def fork(self) -> None:
        """Begin a branch here and go on in it."""
        self._set([*self._all, self.current.fork()], len(self._all) + 1)

    def go(self, number: int) -> None:
        """Go on in another branch.

        Raises:
            InputError: there is none of this number.
        """
        if not 1 <= number <= len(self._all):
            raise mlxlin.InputError(f"There is no branch {number}.", "See them with /fork list.")
        self.here = number

    def rows(self) -> list[list[str]]:
        """For a table: number, with a mark at the one talked in; turns; the beginning of the last message."""
        rows = []
        for number, branch in enumerate(self._all, 1):
            last = " ".join(str(branch.turns[-2]["content"]).split()) if branch.turns else ""
            shown = last if len(last) <= _SHOWN else f"{last[: _SHOWN - 3]}..."
            rows.append([f"{'*' if number == self.here else ' '} {number}", count(len(branch.turns) // 2), shown])
        return rows

    def record(self) -> dict[str, Any]:
        """What is said in them, as plain JSON values."""
        branches = [{"system": branch.system, "turns": [dict(turn) for turn in branch.turns]} for branch in self._all]
        return {"branches": branches, "here": self.here}

    def restore(self, arrays: Mapping[str, Any], record: Mapping[str, Any], *, from_text: bool) -> None:
        """Become the saved branches: the one talked in with its state, the others as far as they share it.

        Raises:
            SessionError: it does not fit the model; nothing has changed then.
        """
        old = self.current.timeline
        timeline = mlxlin.Timeline(old.model, budget=self._budget, store=old.store)
        current = mlxlin.Conversation(self.current.model, self.current.tokenizer, timeline=timeline)
        current.restore(arrays, record, from_text=from_text)
        restored, here = [current], record.get("here", 1)
        for number, saved in enumerate(record.get("branches", ()), 1):
            if number != here:
                branch = current.fork()
                branch.rewrite(saved["turns"], saved["system"])
                restored.insert(number - 1, branch)
        self._set(restored, here)

    def _set(self, branches: list[Conversation], here: int) -> None:
        self._all, self.here = branches, here
        for branch in branches:  # checkpoints of all branches together keep to what one may have
            branch.timeline.budget = self._budget // len(branches)


def count(turns: int) -> str:
    """3 turns, 1 turn."""
    return f"{turns} turn{'' if turns == 1 else 's'}"
