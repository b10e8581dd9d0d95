"""The hub: find a model, download what it needs, resume what was cut, work without a network. Nothing else goes online.

Files land in the cache that huggingface_hub uses, so that other programs find them.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants, errors

from mlxlin.errors import HubError

from ..formats import Tensor, pickles, safetensors, shards
from ..repository import choose, is_commit
from .cache import Cache, Downloaded, downloaded, missing_file
from .requests import Listing, Remote, RemoteFile, complete, look_up, read_range, status_of
from .transfer import Progress, download

Notice = Callable[[str], None]
__all__ = ["Downloaded", "Outline", "cached", "downloaded", "fetch", "outline"]
_HEAD = 1 << 16  # first guess at the length of a safetensors header


def fetch(
    repo: str,
    revision: str | None = None,
    *,
    file: str | None = None,
    progress: Progress | None = None,
    notice: Notice | None = None,
) -> Path:
    """Download a model's files, or find them in the cache.

    With a full commit hash as revision, or with HF_HUB_OFFLINE set, a complete copy in the cache is used without any
    request. Without a connection the cached copy is used too, and `notice` is told.

    Args:
        repo: "owner/name".
        revision: branch, tag or commit; None for the main branch.
        file: the one weight file wanted, where a repository holds several models.
        progress: called with (bytes done, bytes in all).
        notice: called with a sentence for the person.

    Returns:
        The folder that holds them.

    Raises:
        HubError: no such model, no access, no connection and no complete copy in the cache, a damaged download.
    """
    cache = Cache(repo)
    offline = bool(constants.HF_HUB_OFFLINE)
    if offline or is_commit(revision):
        folder, lacking = _cached(cache, revision, file)
        if folder is not None and lacking is None:
            return folder
        if offline:
            raise _not_cached(repo, lacking, "HF_HUB_OFFLINE is set")
    try:
        listing = look_up(repo, revision)
    except HubError as error:
        folder, lacking = _cached(cache, revision, file)
        if not isinstance(error.__cause__, errors.HfHubHTTPError) or status_of(error.__cause__) >= 500:
            if folder is not None and lacking is None:
                if notice is not None:
                    notice(f"{error.message} The copy downloaded before is used.")
                return folder
            if folder is not None:
                raise _not_cached(repo, lacking, "the hub cannot be reached") from error
        raise
    side, weights = choose(list(listing.files), repo, file)
    folder = cache.snapshot(listing.commit)
    download(cache, listing, side)
    weights = _indexed(folder, listing, weights)
    download(cache, listing, side + weights, progress)
    cache.remember(revision, listing.commit)
    if (lacking := missing_file(folder, file)) is not None:
        raise HubError(f"{repo} is incomplete on the hub: {lacking}.")
    return folder


def _indexed(folder: Path, listing: Listing, weights: list[str]) -> list[str]:
    """The weight files that a downloaded index names, where the repository has one; else `weights`.

    Raises:
        HubError: one that the index names is not in the repository.
    """
    for index in (safetensors.INDEX, pickles.INDEX):
        if index in listing.files and (folder / index).is_file():
            weights = sorted(set(shards.read_index(folder / index).values()))
    for name in weights:
        if name not in listing.files:
            raise HubError(f"{listing.repo} is incomplete on the hub: {name} is missing.", "Tell its owner.")
    return weights


def cached(repo: str, revision: str | None = None, file: str | None = None) -> Path | None:
    """The folder of a model that has been downloaded completely, or its one `file`; no request is made."""
    folder, lacking = _cached(Cache(repo), revision, file)
    if folder is None or lacking is not None:
        return None
    return folder if file is None else folder / file


@dataclass(frozen=True)
class Outline:
    """A model on the hub without its weights: config, mlxlin.json where we wrote it, and blank tensors of right shape.

    `format` is that of its files: "safetensors" or "pytorch".
    """

    folder: Path
    tensors: dict[str, Tensor]
    format: str


def outline(repo: str, revision: str | None = None, file: str | None = None) -> Outline:
    """What a model consists of: downloads its small files and reads the heads of the large ones.

    Raises:
        HubError: as `fetch`.
    """
    cache = Cache(repo)
    if constants.HF_HUB_OFFLINE:
        raise _not_cached(repo, _cached(cache, revision, file)[1], "HF_HUB_OFFLINE is set")
    listing = look_up(repo, revision)
    side, weights = choose(list(listing.files), repo, file)
    wanted = [name for name in side if name in ("config.json", "mlxlin.json", safetensors.INDEX)]
    download(cache, listing, wanted)
    tensors: dict[str, Tensor] = {}
    weights = _indexed(cache.snapshot(listing.commit), listing, weights)
    form = "safetensors" if weights[0].endswith(".safetensors") else "pytorch"
    describe = _remote_header if form == "safetensors" else _remote_pickle
    for name in weights:
        tensors.update(describe(listing, complete(listing, listing.files[name])))
    return Outline(cache.snapshot(listing.commit), tensors, form)


def _remote_header(listing: Listing, remote: Remote) -> dict[str, Tensor]:
    head = read_range(listing, remote, 0, min(_HEAD, remote.size))
    length = safetensors.header_length(head, remote.size, remote.name)
    if 8 + length > len(head):
        head += read_range(listing, remote, len(head), 8 + length)
    entries = safetensors.parse_header(head[8 : 8 + length], remote.size, remote.name)
    return safetensors.blank_tensors(entries, remote.name)


def _remote_pickle(listing: Listing, remote: Remote) -> dict[str, Tensor]:
    with io.BufferedReader(RemoteFile(listing, remote)) as file:
        return pickles.blank_tensors(file, remote.name)


def _cached(cache: Cache, revision: str | None, file: str | None) -> tuple[Path | None, str | None]:
    """The folder of the cached copy and what it lacks; (None, None) when there is none."""
    commit = cache.commit(revision)
    folder = cache.snapshot(commit) if commit else None
    if folder is None or not folder.is_dir():
        return None, None
    return folder, missing_file(folder, file)


def _not_cached(repo: str, lacking: str | None, why: str) -> HubError:
    if lacking is None:
        return HubError(f"{repo} has not been downloaded, and {why}.", "Go online once, or give the path of a folder.")
    return HubError(f"The downloaded copy of {repo} is incomplete ({lacking}), and {why}.", "Go online to finish it.")
