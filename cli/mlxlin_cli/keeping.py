"""A chat that is kept under a name: claimed from other chats, and saved whenever something was said."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import mlxlin

if TYPE_CHECKING:
    from mlxlin.store import Claim

Saved = tuple[Mapping[str, Any], Mapping[str, Any]]  # arrays and record of a session


class Keeper:
    """The session a chat is saved in.

    Attributes:
        name: of the session; None while the chat is not saved.
        saved: what was said when it was last saved or opened.
    """

    def __init__(self) -> None:
        self.store = mlxlin.SessionStore()
        self.name: str | None = None
        self.saved: Mapping[str, Any] | None = None
        self._claim: Claim | None = None

    def open(self, name: str, restore: Callable[[Mapping[str, Any], Mapping[str, Any]], None], from_text: bool) -> bool:
        """Take a session of this name, and give what is saved in it to `restore`; false where there is none yet.

        Raises:
            SessionError: another chat has it, it is damaged, or `restore` refuses it; the old session stays.
        """
        claim = self._claim if name == self.name else self.store.claim(name)
        try:
            if exists := self.store.exists(name):
                restore(*(({}, self.store.record(name)) if from_text else self.store.load(name)))
        except BaseException:
            if claim is not None and claim is not self._claim:
                claim.release()
            raise
        self._take(name, claim)
        return exists

    def rename(self, name: str) -> None:
        """Save under another name from now on.

        Raises:
            SessionError: there is a session of that name already, or another chat has it.
        """
        claim = self.store.claim(name)
        if self.store.exists(name):
            claim.release()
            raise mlxlin.SessionError(
                f"There is a session '{name}' already.", f"Take another name, or remove it: mlxlin sessions rm '{name}'"
            )
        self._take(name, claim)

    def save(self, said: Mapping[str, Any], snapshot: Callable[[], Saved]) -> bool:
        """Save unless `said` is what was saved last; whether it did.

        Args:
            said: everything said, plain JSON values.
            snapshot: makes what is to be written.

        Raises:
            NumericsError, ResourceError: it could not be written; what was saved before is still there.
        """
        if self.name is None or said == self.saved:
            return False
        self.store.save(self.name, *snapshot())
        self.saved = said
        return True

    def release(self) -> None:
        """Give the session up to other chats."""
        if self._claim is not None:
            self._claim.release()
        self._claim = self.name = self.saved = None

    def _take(self, name: str, claim: Claim | None) -> None:
        if claim is not self._claim:
            self.release()
        self.name, self.saved, self._claim = name, None, claim
