"""Requests to the hub, and what their failures mean in words. With `transfer`, the only code that goes online."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from typing import Any

import huggingface_hub
from huggingface_hub import constants, errors
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

from mlxlin.errors import HubError

from ..repository import is_commit

TIMEOUT = constants.HF_HUB_DOWNLOAD_TIMEOUT  # seconds without a byte
_PIECE = 1 << 17  # bytes of a remote file asked for at a time
UNKNOWN = -1  # size of a file that the listing does not tell


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


def look_up(repo: str, revision: str | None = None) -> Listing:
    """What the hub holds, in one request.

    Raises:
        HubError: as `fetch`.
    """
    try:
        name = revision or constants.DEFAULT_REVISION
        info = huggingface_hub.HfApi().model_info(repo, revision=name, files_metadata=True, timeout=TIMEOUT)
    except Exception as error:
        raise explain(error, repo, revision) from error
    if not is_commit(info.sha):
        raise HubError(f"The hub names no commit of {repo}.", "Try again later.")
    files = {
        s.rfilename: Remote(
            s.rfilename, UNKNOWN if s.size is None else s.size, _hash(s.lfs.sha256 if s.lfs is not None else s.blob_id)
        )
        for s in info.siblings or []
        if ".." not in s.rfilename.split("/")  # no server decides about places outside the cache
    }
    return Listing(repo, str(info.sha), files)


def _hash(text: str | None) -> str | None:
    """A SHA-256 or git's SHA-1 in hex; None for anything else."""
    return text if text and re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", text) else None


def complete(listing: Listing, remote: Remote) -> Remote:
    """`remote` with its size and hash; asks for them where the listing left them out (mirrors of the hub do)."""
    if remote.size != UNKNOWN:
        return remote
    url, headers = file_request(listing, remote)
    try:
        metadata = huggingface_hub.get_hf_file_metadata(url, headers=headers)
    except Exception as error:
        raise explain(error, listing.repo, listing.commit) from error
    if metadata.size is None:
        raise HubError(f"The hub does not tell the size of {remote.name}.", "Download it by hand, and give the folder.")
    return Remote(remote.name, metadata.size, _hash(metadata.etag))


def read_range(listing: Listing, remote: Remote, start: int, stop: int) -> bytes:
    """Bytes [start, stop) of a file."""
    url, headers = file_request(listing, remote)
    try:
        response = get_session().get(
            url, headers={**headers, "Range": f"bytes={start}-{stop - 1}"}, timeout=TIMEOUT, follow_redirects=True
        )
        hf_raise_for_status(response)
    except Exception as error:
        raise explain(error, listing.repo, listing.commit) from error
    content = response.content
    return content[start:stop] if response.status_code == 200 else content


class RemoteFile(io.RawIOBase):
    """A file on the hub; each piece is asked for when something in it is read, once."""

    def __init__(self, listing: Listing, remote: Remote) -> None:
        self._listing, self._remote, self._position = listing, remote, 0
        self._pieces: dict[int, bytes] = {}

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + (0, self._position, self._remote.size)[whence]
        if self._position < 0:
            raise ValueError(f"There is no place {self._position} in a file.")
        return self._position

    def readinto(self, buffer: Any) -> int:
        start = self._position // _PIECE * _PIECE
        if start >= self._remote.size:
            return 0
        if start not in self._pieces:
            stop = min(start + _PIECE, self._remote.size)
            self._pieces[start] = read_range(self._listing, self._remote, start, stop)
        content = self._pieces[start][self._position - start :][: len(buffer)]
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)


def file_request(listing: Listing, remote: Remote) -> tuple[str, dict[str, str]]:
    url = huggingface_hub.hf_hub_url(listing.repo, remote.name, revision=listing.commit)
    return url, {**build_hf_headers(), "Accept-Encoding": "identity"}


def status_of(error: BaseException) -> int:
    response = getattr(error, "response", None)
    return int(getattr(response, "status_code", 0) or 0)


def explain(error: Exception, repo: str, revision: str | None) -> HubError:
    """A failed request in words for a person."""
    page, login = f"{constants.ENDPOINT}/{repo}", "log in with `hf auth login`"
    status = status_of(error)
    if isinstance(error, errors.GatedRepoError):
        return HubError(
            f"{repo} is gated: its owners want their terms accepted first.", f"Accept them on {page}, then {login}."
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return HubError(f"{repo} has no revision '{revision}'.", "Leave --revision out for the newest one.")
    if isinstance(error, errors.RepositoryNotFoundError):
        return HubError(
            f"There is no folder {repo} here and no such model on the hub, or it is private.",
            f"Check the name; for a private one {login}.",
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
        f"The hub cannot be reached for {repo} ({type(error).__name__}).",
        "Check the connection, or the path if a folder was meant; what was downloaded stays and continues.",
    )
