"""A hub on 127.0.0.1: repositories in memory, ranges, cut connections, refusals; it remembers every request."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "c0ffee" + "0" * 34
_LARGE = (".safetensors", ".pth", ".gguf")  # kept with a SHA-256 instead of git's hash


@dataclass
class Repository:
    files: dict[str, bytes]
    refusal: tuple[int, str] | None = None  # status and X-Error-Code for weights


@dataclass
class Hub:
    """What the server serves, how it misbehaves, and what was asked of it."""

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)  # method, path, Range
    cut_after: float | None = None  # share of a file's bytes after which the connection breaks
    cuts_left: int = 0
    corrupt: bool = False
    status: int | None = None  # answer everything with this
    ranges: bool = True
    broken: str = ""  # a file answered with 500, after a moment
    slow: str = ""  # a file sent in two halves with a pause between
    sizes: bool = True  # whether the listing tells sizes and hashes

    def add(self, repo: str, folder: Path) -> Repository:
        files = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
        self.repositories[repo] = Repository(files)
        return self.repositories[repo]

    def asked(self, name: str) -> list[str | None]:
        """The Range headers of all requests for a file."""
        return [span for method, path, span in self.requests if method == "GET" and path.endswith("/" + name)]


def _sibling(name: str, content: bytes) -> dict[str, object]:
    git = hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
    entry: dict[str, object] = {"rfilename": name, "size": len(content), "blobId": git}
    if name.endswith(_LARGE):
        entry["lfs"] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
    return entry


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None: ...

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, path = self.hub, self.path.split("?")[0]
        hub.requests.append((self.command, path, self.headers.get("Range")))
        if hub.status is not None:
            return self._refuse(hub.status, "")
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            return self._info(match[1], match[2])
        match = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        repository = hub.repositories.get(match[1]) if match else None
        if match is None or repository is None or match[3] not in repository.files:
            return self._refuse(404, "EntryNotFound" if repository else "RepoNotFound")
        if match[3] == hub.broken:
            time.sleep(0.3)
            return self._refuse(500, "")
        if repository.refusal is not None and match[3] != "config.json":
            return self._refuse(*repository.refusal)
        return self._file(match[3], repository.files[match[3]])

    def _info(self, repo: str, revision: str | None) -> None:
        repository = self.hub.repositories.get(repo)
        if repository is None:
            return self._refuse(401, "RepoNotFound")
        if revision not in (None, "main", "v1", COMMIT):
            return self._refuse(404, "RevisionNotFound")
        siblings = [_sibling(name, content) for name, content in repository.files.items()]
        if not self.hub.sizes:
            siblings = [{"rfilename": sibling["rfilename"]} for sibling in siblings]
        body = json.dumps({"id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings, "tags": []}).encode()
        self._answer(200, body, {"Content-Type": "application/json"})

    def _file(self, name: str, content: bytes) -> None:
        hub, span = self.hub, self.headers.get("Range")
        large = name.endswith(_LARGE)
        if hub.corrupt and large:
            content = content[:-1] + bytes([content[-1] ^ 1])
        status, headers, start = 200, {}, 0
        if span is not None and hub.ranges:
            first, _, last = span.removeprefix("bytes=").partition("-")
            start = int(first)
            stop = min(int(last) + 1, len(content)) if last else len(content)
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
            status, body = 206, content[start:stop]
        else:
            body = content
        cut = None
        if name == hub.slow and self.command == "GET":
            half = len(body) // 2
            self._answer(status, body[:half], headers, total=len(body))
            time.sleep(0.8)
            with contextlib.suppress(OSError):
                self.wfile.write(body[half:])
            return
        if large and hub.cut_after is not None and hub.cuts_left > 0:
            hub.cuts_left -= 1
            cut = max(0, int(hub.cut_after * len(content)) - start)
        self._answer(status, body, headers, cut)

    def _refuse(self, status: int, code: str) -> None:
        self._answer(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})

    def _answer(
        self, status: int, body: bytes, headers: dict[str, str], cut: int | None = None, total: int | None = None
    ) -> None:
        self.send_response(status)
        length = len(body) if total is None else total
        for name, value in {**headers, "Content-Length": str(length), "X-Repo-Commit": COMMIT}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(body if cut is None else body[:cut])
        if cut is not None:
            self.wfile.flush()
            self.close_connection = True


class _Server(ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """A client that hangs up is part of the tests."""


@contextmanager
def serve() -> Iterator[Hub]:
    """A running hub."""
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = _Server(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
