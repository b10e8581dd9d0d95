"""The hub: find a model, download what it needs, resume what was cut, work without a network. Nothing else goes online.

Files land in the cache that huggingface_hub uses, so that other programs find them. A download that was cut continues
where it stopped, also in a new process, and every file is compared with the size and hash the hub states.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock
from typing import Any

import huggingface_hub
from huggingface_hub import constants, errors
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

from mlxlin.errors import HubError, ResourceError

from .folder import check_disk
from .formats import Tensor, safetensors
from .hub_files import Cache, choose, is_commit, missing_file

Progress = Callable[[int, int], None]
Notice = Callable[[str], None]
_WORKERS = 4
_RETRIES = 4  # in a row without a new byte
_PIECE = 1 << 20
_HEAD = 1 << 16  # first guess at the length of a safetensors header


@dataclass(frozen=True)
class Remote:
    """A file of a repository: its size in bytes, and its hash (SHA-256 of large files, git's SHA-1 of small ones)."""

    name: str
    size: int
    digest: str | None


@dataclass(frozen=True)
class Listing:
    """A repository at one commit."""

    repo: str
    commit: str
    files: dict[str, Remote]


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
    cache = Cache(Path(constants.HF_HUB_CACHE), repo)
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
        if not isinstance(error.__cause__, errors.HfHubHTTPError) or _status(error.__cause__) >= 500:
            if folder is not None and lacking is None:
                if notice is not None:
                    notice(f"{error.message} The copy downloaded before is used.")
                return folder
            if folder is not None:
                raise _not_cached(repo, lacking, "the hub cannot be reached") from error
        raise
    side, weights = choose(list(listing.files), repo, file)
    _download(cache, listing, [listing.files[name] for name in side + weights], progress)
    cache.remember(revision, listing.commit)
    folder = cache.snapshot(listing.commit)
    if (lacking := missing_file(folder, file)) is not None:
        raise HubError(f"{repo} is incomplete on the hub: {lacking}.")
    return folder


def look_up(repo: str, revision: str | None = None) -> Listing:
    """What the hub holds, in one request.

    Raises:
        HubError: as `fetch`.
    """
    try:
        info = huggingface_hub.HfApi().model_info(repo, revision=revision, files_metadata=True, timeout=20)
    except Exception as error:
        raise _explain(error, repo, revision) from error
    files = {
        s.rfilename: Remote(s.rfilename, s.size or 0, s.lfs.sha256 if s.lfs is not None else s.blob_id)
        for s in info.siblings or []
    }
    return Listing(repo, str(info.sha), files)


@dataclass(frozen=True)
class Outline:
    """A model on the hub without its weights: config, mlxlin.json where we wrote it, and blank tensors of right shape.

    `tensors` is empty for PyTorch files, which tell nothing before they are read.
    """

    listing: Listing
    folder: Path
    tensors: dict[str, Tensor]
    download_bytes: int


def outline(repo: str, revision: str | None = None, file: str | None = None) -> Outline:
    """What a model consists of: downloads its small files and reads the heads of the large ones.

    Raises:
        HubError: as `fetch`.
    """
    listing = look_up(repo, revision)
    side, weights = choose(list(listing.files), repo, file)
    wanted = [name for name in side if name in ("config.json", "mlxlin.json", safetensors.INDEX)]
    cache = Cache(Path(constants.HF_HUB_CACHE), repo)
    _download(cache, listing, [listing.files[name] for name in wanted], None)
    tensors: dict[str, Tensor] = {}
    for name in weights if weights[0].endswith(".safetensors") else []:
        tensors.update(_remote_header(listing, listing.files[name]))
    total = sum(listing.files[name].size for name in side + weights)
    return Outline(listing, cache.snapshot(listing.commit), tensors, total)


def _remote_header(listing: Listing, remote: Remote) -> dict[str, Tensor]:
    head = _range(listing, remote, 0, min(_HEAD, remote.size))
    length = safetensors.header_length(head, remote.size, remote.name)
    if 8 + length > len(head):
        head += _range(listing, remote, len(head), 8 + length)
    entries = safetensors.parse_header(head[8 : 8 + length], remote.size, remote.name)
    return safetensors.blank_tensors(entries, remote.name)


def _range(listing: Listing, remote: Remote, start: int, stop: int) -> bytes:
    url, headers = _request(listing, remote)
    try:
        response = get_session().get(
            url, headers={**headers, "Range": f"bytes={start}-{stop - 1}"}, follow_redirects=True
        )
        hf_raise_for_status(response)
    except Exception as error:
        raise _explain(error, listing.repo, listing.commit) from error
    content = response.content
    return content[start:stop] if response.status_code == 200 else content


def _request(listing: Listing, remote: Remote) -> tuple[str, dict[str, str]]:
    url = huggingface_hub.hf_hub_url(listing.repo, remote.name, revision=listing.commit, endpoint=constants.ENDPOINT)
    return url, {**build_hf_headers(), "Accept-Encoding": "identity"}


class _Counter:
    """Bytes of several files downloaded at once."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._total, self._progress = total, progress
        self._done, self._lock = 0, Lock()
        self.stopped = Event()

    def add(self, count: int) -> None:
        with self._lock:
            self._done += count
            if self._progress is not None:
                self._progress(self._done, self._total)


def _download(cache: Cache, listing: Listing, files: list[Remote], progress: Progress | None) -> None:
    """Bring `files` into the cache; those that are there already are not asked for again."""
    missing = [remote for remote in files if not _present(cache, remote)]
    check_disk(cache.folder, sum(remote.size for remote in missing))
    counter = _Counter(sum(remote.size for remote in files), progress)
    counter.add(sum(remote.size for remote in files if remote not in missing))

    def one(remote: Remote) -> None:
        _download_blob(cache, listing, remote, counter)

    with ThreadPoolExecutor(_WORKERS) as pool:
        jobs = [pool.submit(one, remote) for remote in missing]
        try:
            for job in jobs:
                job.result()
        except BaseException:
            counter.stopped.set()
            pool.shutdown(cancel_futures=True)
            raise
    for remote in files:
        cache.link(listing.commit, remote.name, _blob(cache, remote))


def _blob(cache: Cache, remote: Remote) -> Path:
    return cache.blob(remote.digest or hashlib.sha1(remote.name.encode()).hexdigest())


def _present(cache: Cache, remote: Remote) -> bool:
    blob = _blob(cache, remote)
    return blob.is_file() and blob.stat().st_size == remote.size


def _download_blob(cache: Cache, listing: Listing, remote: Remote, counter: _Counter) -> None:
    """One file: continue a partial download, check size and hash, move it into place."""
    blob = _blob(cache, remote)
    blob.parent.mkdir(parents=True, exist_ok=True)
    part = blob.with_name(f"{blob.name}.mlxlin-part")
    with part.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # a second process waits, then finds the file complete
        if _present(cache, remote):
            return counter.add(remote.size)
        if file.tell() > remote.size:
            file.truncate(0)
        counter.add(file.tell())
        _receive(listing, remote, file, counter)
        file.flush()
        if remote.digest is not None and _digest(part, remote) != remote.digest:
            part.unlink()
            raise HubError(f"{remote.name} was damaged on the way from the hub; it was removed.", "Run it again.")
        os.fsync(file.fileno())
        os.replace(part, blob)


def _receive(listing: Listing, remote: Remote, file: Any, counter: _Counter) -> None:
    """Append what is missing, starting again where the connection broke."""
    url, headers = _request(listing, remote)
    failures = 0
    while file.tell() < remote.size:
        have = file.tell()
        wanted = {**headers, "Range": f"bytes={have}-"} if have else headers
        try:
            with get_session().stream("GET", url, headers=wanted, follow_redirects=True) as response:
                hf_raise_for_status(response)
                if have and response.status_code != 206:  # a server without ranges sends it all again
                    file.truncate(0)
                    counter.add(-have)
                for piece in response.iter_bytes(_PIECE):
                    file.write(piece)
                    counter.add(len(piece))
                    if counter.stopped.is_set():
                        return
        except errors.HfHubHTTPError as error:
            raise _explain(error, listing.repo, listing.commit) from error
        except OSError as error:
            raise ResourceError(f"{remote.name} cannot be written to the cache: {error}") from error
        except Exception as error:
            file.flush()
            failures = 0 if file.tell() > have else failures + 1
            if failures >= _RETRIES:
                raise _explain(error, listing.repo, listing.commit) from error
            time.sleep(min(8, 2**failures) / 2)


def _digest(path: Path, remote: Remote) -> str:
    git = remote.digest is not None and len(remote.digest) == 40
    digest = hashlib.sha1(f"blob {remote.size}\0".encode()) if git else hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 24):
            digest.update(piece)
    return digest.hexdigest()


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


def _status(error: BaseException) -> int:
    response = getattr(error, "response", None)
    return int(getattr(response, "status_code", 0) or 0)


def _explain(error: Exception, repo: str, revision: str | None) -> HubError:
    """A failed request in words for a person."""
    page, login = f"{constants.ENDPOINT}/{repo}", "log in with `hf auth login`"
    status = _status(error)
    if isinstance(error, errors.GatedRepoError):
        return HubError(
            f"{repo} is gated: its owners want their terms accepted first.", f"Accept them on {page}, then {login}."
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return HubError(f"{repo} has no revision '{revision}'.", "Leave --revision out for the newest one.")
    if isinstance(error, errors.RepositoryNotFoundError):
        return HubError(
            f"There is no model {repo} on the hub, or it is private.", f"Check the name; for a private one {login}."
        )
    if status in (401, 403):
        return HubError(f"The hub refuses access to {repo} ({status}).", f"Ask for access on {page}, or {login}.")
    if status == 404:
        return HubError(f"A file of {repo} is missing on the hub.", "The repository changed; run it again.")
    if status == 429:
        return HubError("The hub has had too many requests from here.", "Wait a few minutes, or log in.")
    if status:
        return HubError(f"The hub answered with error {status}.", "Try again later.")
    return HubError(
        f"The hub cannot be reached ({type(error).__name__}).",
        "Check the connection; what was downloaded stays and continues.",
    )
