"""The hub's cache on disk, as huggingface_hub lays it out: what is there, and is it complete."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CacheNotFound, constants, scan_cache_dir

from mlxlin.errors import CheckpointError

from ..formats import pickles, safetensors
from ..repository import is_commit


class Cache:
    """One model's place in the hub's cache: blobs by hash, a folder of links per commit, names of commits."""

    def __init__(self, repo: str) -> None:
        self.folder = Path(constants.HF_HUB_CACHE) / ("models--" + repo.replace("/", "--"))

    def snapshot(self, commit: str) -> Path:
        return self.folder / "snapshots" / commit

    def blob(self, name: str) -> Path:
        return self.folder / "blobs" / name

    def commit(self, revision: str | None) -> str | None:
        """The commit a branch or tag stood for when it was last looked up."""
        if is_commit(revision):
            return revision
        reference = self.folder / "refs" / (revision or "main")
        return reference.read_text().strip() if reference.is_file() else None

    def remember(self, revision: str | None, commit: str) -> None:
        if not is_commit(revision):
            self._write(self.folder / "refs" / (revision or "main"), commit)

    def link(self, commit: str, name: str, blob: Path) -> None:
        """Make `blob` appear as file `name` of a commit."""
        place = self.snapshot(commit) / name
        place.parent.mkdir(parents=True, exist_ok=True)
        temporary = place.with_name(f".{place.name}.{os.getpid()}")
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(os.path.relpath(blob, place.parent))
        os.replace(temporary, place)

    def _write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text(text)
        os.replace(temporary, path)


@dataclass(frozen=True)
class Downloaded:
    """A model in the cache: its hub id, the bytes it takes, and a function that removes it."""

    repo: str
    nbytes: int
    remove: Callable[[], None]


def downloaded() -> list[Downloaded]:
    """All models in the hub's cache, by name; those of other programs too."""
    try:
        cache = scan_cache_dir(constants.HF_HUB_CACHE)
    except CacheNotFound:
        return []
    models = sorted((repo for repo in cache.repos if repo.repo_type == "model"), key=lambda repo: repo.repo_id)
    removals = [cache.delete_revisions(*(revision.commit_hash for revision in repo.revisions)) for repo in models]
    return [
        Downloaded(repo.repo_id, repo.size_on_disk, removal.execute)
        for repo, removal in zip(models, removals, strict=True)
    ]


def missing_file(folder: Path, only: str | None = None) -> str | None:
    """What a downloaded model lacks before it can be loaded; None when it is complete, by the heads of its weights."""
    if only is None and not (folder / "config.json").is_file() and not any(folder.glob("*.pth")):
        return "config.json"
    if only is not None:
        return None if (folder / only).is_file() else only
    try:
        if safetensors.shard_names(folder):
            safetensors.read_folder(folder)
            return None
        if pickles.file_names(folder):
            return None
    except CheckpointError as error:
        return error.message
    return "the weights"
