"""What a person calls a model: "demo", a folder, a weight file, a hub id, an alias."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path

import mlxlin
from mlxlin.aliases import ALIASES
from mlxlin.errors import CheckpointError, InputError

from .repository import is_repo_id

Progress = Callable[[int, int], None]
Notice = Callable[[str], None]
DEMO = Path(mlxlin.__file__).parent / "demo"


def resolve(
    source: str | Path, revision: str | None = None, *, progress: Progress | None = None, notice: Notice | None = None
) -> Path:
    """The folder (or weight file) behind a name; downloads a hub id.

    Raises:
        CheckpointError: a path that does not exist, or a name nobody knows.
        InputError: a revision for something that has none.
    """
    local = local_path(source, revision)
    if local is not None:
        return local
    from . import hub  # its libraries take longer to import than a small model to load

    repo, file = split_id(str(source))
    folder = hub.fetch(repo, revision, file=file, progress=progress, notice=notice)
    return folder if file is None else folder / file


def local_path(source: str | Path, revision: str | None = None) -> Path | None:
    """Where `source` lies on this machine; None for a hub id or alias.

    Raises:
        CheckpointError: it is a path, but nothing is there; or a name nobody knows.
        InputError: a revision for something on this machine.
    """
    path = DEMO if str(source) == "demo" else Path(source).expanduser()
    if str(source) and path.exists():
        if revision is not None:
            raise InputError(f"{source} is on this machine; only hub ids have revisions.", "Leave --revision out.")
        return path
    text = str(source)
    if not text:
        raise CheckpointError("The name of the model is empty.", "Give a folder, a hub id like owner/name, or demo.")
    if isinstance(source, str) and (text in ALIASES or is_repo_id(split_id(text)[0])):
        return None
    if isinstance(source, Path) or "/" in text or text.startswith((".", "~")):
        raise CheckpointError(
            f"There is no such file or directory: {path}", "Give a folder, or a hub id like owner/name."
        )
    nearest = difflib.get_close_matches(text, ["demo", *ALIASES], n=1, cutoff=0.4)
    also = f"Did you mean '{nearest[0]}'? " if nearest else ""
    raise CheckpointError(
        f"There is no model called '{text}'.", f"{also}Give a folder, a hub id like owner/name, or demo."
    )


def present(source: str | Path, revision: str | None = None) -> Path | None:
    """Where `source` lies on this machine already: a path, or a complete copy in the hub's cache. No request is made.

    Raises:
        CheckpointError: as `local_path`.
    """
    path = local_path(source, revision)
    if path is not None:
        return path
    from . import hub

    repo, file = split_id(str(source))
    return hub.cached(repo, revision, file)


def split_id(source: str) -> tuple[str, str | None]:
    """Hub id and, for "owner/name/file.pth", the file."""
    if source in ALIASES:
        return ALIASES[source].repo, None
    if source.count("/") == 2 and source.endswith((".pth", ".pt", ".bin", ".safetensors")):
        repo, _, file = source.rpartition("/")
        return repo, file
    return source, None


def provenance(path: Path) -> tuple[str | None, str | None]:
    """Hub id and commit of a folder in the hub's cache; (None, None) for any other."""
    folder = path if path.is_dir() else path.parent
    if folder.parent.name != "snapshots" or not folder.parent.parent.name.startswith("models--"):
        return None, None
    return folder.parent.parent.name.removeprefix("models--").replace("--", "/"), folder.name
