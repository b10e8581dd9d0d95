"""Downloads that continue where they stopped, also in a new process, and that are compared with size and hash."""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event, Lock
from typing import Any

from huggingface_hub import errors
from huggingface_hub.utils import get_session, hf_raise_for_status

from mlxlin.errors import HubError, ResourceError

from ..folder import check_disk
from .cache import Cache
from .requests import TIMEOUT, Listing, Remote, complete, explain, file_request

Progress = Callable[[int, int], None]
_WORKERS = 4
_RETRIES = 4  # in a row without a new byte


class _Stopped(BaseException):
    """Another file failed, or the person gave up; what has arrived stays for the next run."""


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


def download(cache: Cache, listing: Listing, names: list[str], progress: Progress | None = None) -> None:
    """Bring files into the cache; those that are there already are not asked for again.

    Raises:
        HubError: as `hub.fetch`.
        ResourceError: the cache cannot be written, or the disk is full.
    """
    files = [complete(listing, listing.files[name]) for name in names]
    try:
        _download(cache, listing, files, progress)
    except OSError as error:
        raise ResourceError(f"The download cannot be written: {error}", "Free some space, or set HF_HOME.") from error


def _download(cache: Cache, listing: Listing, files: list[Remote], progress: Progress | None) -> None:
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
            file.seek(0)
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
    url, headers = file_request(listing, remote)
    failures = 0
    while file.tell() < remote.size:
        have = file.tell()
        wanted = {**headers, "Range": f"bytes={have}-"} if have else headers
        try:
            with get_session().stream("GET", url, headers=wanted, timeout=TIMEOUT, follow_redirects=True) as response:
                hf_raise_for_status(response)
                if have and response.status_code != 206:  # a server without ranges sends it all again
                    file.truncate(0)
                    file.seek(0)
                    counter.add(-have)
                for piece in response.iter_bytes():  # as it comes: a broken connection loses nothing received
                    file.write(piece)
                    counter.add(len(piece))
                    if counter.stopped.is_set():
                        raise _Stopped
        except errors.HfHubHTTPError as error:
            raise explain(error, listing.repo, listing.commit) from error
        except OSError:
            raise
        except Exception as error:
            file.flush()
            failures = 0 if file.tell() > have else failures + 1
            if failures >= _RETRIES:
                raise explain(error, listing.repo, listing.commit) from error
            time.sleep(min(8, 2**failures) / 2)


def _digest(path: Path, remote: Remote) -> str:
    git = remote.digest is not None and len(remote.digest) == 40
    digest = hashlib.sha1(f"blob {remote.size}\0".encode()) if git else hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 24):
            digest.update(piece)
    return digest.hexdigest()
