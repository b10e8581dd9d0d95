"""States on disk: prefixes shared by all conversations of this machine, and conversations saved under a name.

Both are folders of archives (`archive.py`), so every file is whole, checksummed, and replaced only by a whole one. Two
processes may use them at once: a file that disappears under a reader is a miss, and a session belongs to one chat at a
time.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxlin import archive
from mlxlin.backend import mx
from mlxlin.errors import MlxlinError, ResourceError, SessionError
from mlxlin.state import State

_SUFFIX = ".safetensors"
_SMALLEST_PREFIX = 64  # tokens; fewer are read faster than found
DEFAULT_BUDGET = 4 * 2**30  # bytes of prefixes on disk


def home() -> Path:
    """Where mlxlin keeps its own files: $MLXLIN_HOME, else the system's place for application state."""
    if configured := os.environ.get("MLXLIN_HOME"):
        return Path(configured)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "mlxlin"
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "mlxlin"


class PrefixStore:
    """States of prompts read earlier, found by the tokens they have read.

    Args:
        fingerprint: what the states depend on, `Model.fingerprint`: weights, quantisation and dtypes.
        folder: where they are kept; `home() / "prefixes"` by default.
        budget: bytes on disk over all models; the files unused for longest go first.
    """

    def __init__(self, fingerprint: str, folder: Path | None = None, budget: int = DEFAULT_BUDGET) -> None:
        self.root = folder or home() / "prefixes"
        self.folder = self.root / fingerprint[:32]
        self.budget = budget

    def find(self, tokens: Sequence[int], longer_than: int, like: State) -> tuple[int, State] | None:
        """The longest stored prefix of `tokens` that is worth loading for whoever has read `longer_than` of them.

        Returns:
            Its length and its state.
        """
        names = {path.name: path for path in _files(self.folder)}
        lengths = sorted({_length(name) for name in names})
        wanted = [length for length in lengths if longer_than + _SMALLEST_PREFIX <= length <= len(tokens)]
        for name in reversed(list(_names(tokens, wanted))):
            if (path := names.get(name)) is None:
                continue
            try:
                arrays, _ = archive.read(path)
                state = State.from_arrays(arrays, like)
                if state.positions.tolist() != [_length(name)]:
                    raise SessionError(f"{name} has read another number of tokens.")
            except SessionError:  # damaged, or gone since we looked: a miss, and not to be tried again
                with contextlib.suppress(OSError):
                    path.unlink()
                continue
            with contextlib.suppress(OSError):
                os.utime(path)
            return _length(name), state
        return None

    def put(self, tokens: Sequence[int], state: State) -> None:
        """Keep the state that has read exactly `tokens`, unless it is there, small or larger than the whole budget.

        A full disk is not an error.
        """
        if len(tokens) < _SMALLEST_PREFIX or state.nbytes > self.budget:
            return
        path = self.folder / next(_names(tokens, [len(tokens)]))
        if path.exists():
            return
        with contextlib.suppress(MlxlinError):  # the conversation goes on without
            archive.write(path, state.arrays(), {"tokens": len(tokens)})
            self._evict()

    def _evict(self) -> None:
        """Keep to the budget. Two processes at it choose the same files; the later one sees all that was written."""
        for folder in self.root.glob("*"):
            archive.sweep(folder)
        kept = sorted((stat.st_mtime, stat.st_size, path) for path, stat in _stats(_files(self.root, "*/*")))
        excess = sum(size for _, size, _ in kept) - self.budget
        for _, size, path in kept:
            if excess <= 0:
                return
            with contextlib.suppress(OSError):
                path.unlink()
            excess -= size


@dataclass(frozen=True)
class SessionInfo:
    """One saved conversation: its name, when it was saved (seconds since 1970), its size in bytes."""

    name: str
    saved: float
    nbytes: int


class SessionStore:
    """Conversations saved under a name, in `folder` (`home() / "sessions"` by default)."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or home() / "sessions"

    def path(self, name: str) -> Path:
        """The file of a session.

        Raises:
            SessionError: the name is not usable as a file name.
        """
        if not _usable(name):
            raise SessionError(f"'{name}' is no name for a session.", "Use letters, digits, '-', '_' and spaces.")
        return self.folder / f"{name}{_SUFFIX}"

    def exists(self, name: str) -> bool:
        """Whether a session of this name was saved."""
        return self.path(name).is_file()

    def claim(self, name: str) -> Claim:
        """Have a session for oneself until the claim is released, or its process ends in any way.

        Raises:
            SessionError: another chat has it.
            ResourceError: the folder cannot be written.
        """
        return Claim(self.path(name).with_name(f".{name}.lock"), name)

    def save(self, name: str, arrays: Mapping[str, mx.array], record: Mapping[str, Any]) -> None:
        """Write a session, replacing an older one of that name only when all is on disk."""
        archive.write(self.path(name), arrays, record)

    def load(self, name: str) -> tuple[dict[str, mx.array], dict[str, Any]]:
        """Arrays and record of a session.

        Raises:
            SessionError: there is none of this name, or it is damaged.
        """
        try:
            return archive.read(self._known(name))
        except SessionError as error:
            hint = "What was said may still be whole: take it with --from-text, or /load NAME text."
            raise SessionError(error.message, hint if self.exists(name) else error.hint) from error

    def record(self, name: str) -> dict[str, Any]:
        """What was said in a session, and how, without its arrays; also of one whose arrays are damaged.

        Raises:
            SessionError: there is none of this name, or its record is damaged.
        """
        return archive.read_record(self._known(name))

    def remove(self, name: str) -> None:
        """Delete a session.

        Raises:
            SessionError: there is none of this name, or a chat has it.
        """
        path = self._known(name)
        claim = self.claim(name)
        path.unlink(missing_ok=True)
        claim.release()

    def list(self) -> list[SessionInfo]:
        """All sessions, the latest first; what else lies in the folder is none."""
        sizes = ((path.name[: -len(_SUFFIX)], s) for path, s in _stats(_files(self.folder)) if path.is_file())
        found = [SessionInfo(name, s.st_mtime, s.st_size) for name, s in sizes if _usable(name)]
        return sorted(found, key=lambda info: info.saved, reverse=True)

    def _known(self, name: str) -> Path:
        if not self.exists(name):
            known = ", ".join(f"'{info.name}'" for info in self.list()) or "none"
            raise SessionError(f"There is no session '{name}'.", f"Saved sessions: {known}.")
        return self.path(name)


class Claim:
    """A session taken by this process (see `SessionStore.claim`): a lock the system gives up with the process."""

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        self._handle = -1
        try:
            archive.private_folder(path.parent)
            while self._handle < 0:
                handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if _is_open_at(handle, path):  # else its last owner removed it meanwhile
                        self._handle = handle
                finally:
                    if self._handle < 0:
                        os.close(handle)
        except BlockingIOError as error:
            raise SessionError(
                f"The session '{name}' is open in another chat.", "End that chat, or take another name."
            ) from error
        except OSError as error:
            raise ResourceError(f"{path.parent} cannot be written: {error.strerror}.") from error

    def release(self) -> None:
        """Give it up; again is no error."""
        if self._handle >= 0:
            self.path.unlink(missing_ok=True)
            os.close(self._handle)
            self._handle = -1


def _is_open_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _usable(name: str) -> bool:
    """Whether a session can be called so."""
    forbidden = any(c in '/\\:*?"<>|' or not c.isprintable() for c in name)
    return bool(name) and name == name.strip() and name[0] != "." and not forbidden and len(name.encode()) <= 200


def _files(folder: Path, pattern: str = "*") -> Iterator[Path]:
    return (path for path in folder.glob(pattern + _SUFFIX) if not path.name.startswith("."))


def _stats(paths: Iterator[Path]) -> Iterator[tuple[Path, os.stat_result]]:
    for path in paths:
        with contextlib.suppress(FileNotFoundError):  # another process removed it
            yield path, path.stat()


def _names(tokens: Sequence[int], lengths: Sequence[int]) -> Iterator[str]:
    """File names of the prefixes of the given lengths (ascending), in one pass over the tokens."""
    digest, done = hashlib.sha256(), 0
    for length in lengths:
        digest.update(b"".join(token.to_bytes(4, "little") for token in tokens[done:length]))
        done = length
        yield f"{length}-{digest.copy().hexdigest()[:32]}{_SUFFIX}"


def _length(name: str) -> int:
    """Tokens of the prefix in the file of this name; 0 for a file that is none."""
    length = name.split("-")[0]
    return int(length) if length.isdigit() else 0
