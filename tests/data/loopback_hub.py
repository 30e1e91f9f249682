"""A loopback Hugging Face Hub with fault injection: three REST calls, a separate content host for large files, and a queue of faults."""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "c0ffee" + "0" * 34
# Arguments: the handler, the rest of the body, and its offset.
Fault = Callable[["Handler", bytes, int], None]


@dataclass
class Request:
    host: str
    path: str
    headers: dict[str, str]
    time: float = field(default_factory=time.monotonic)


@dataclass
class Hub:
    """The server state. `files` are by repo; names ending in .md or .txt are stored in git, the others in LFS on the content host."""

    files: dict[str, dict[str, bytes]] = field(default_factory=lambda: defaultdict(dict))
    plain: dict[str, bytes] = field(default_factory=dict)
    # Files of model repositories, by their path.
    models: dict[str, bytes] = field(default_factory=dict)
    cards: dict[str, Any] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    # The token that opens gated repos.
    token: str | None = None
    # Keyed by the end of the path; each request uses up one fault.
    faults: dict[str, list[Fault]] = field(default_factory=lambda: defaultdict(list))
    always: Fault | None = None
    page_size: int = 3
    # Replaces the true next page.
    next_page: str | None = None
    # Replaces the content host.
    redirect_to: str | None = None
    # Seconds between pieces of a body.
    pace: float = 0.0
    requests: list[Request] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __enter__(self) -> Hub:
        self.servers = [ThreadingHTTPServer(("127.0.0.1", 0), Handler) for _ in range(2)]
        for server in self.servers:
            server.daemon_threads = True
            server.hub = self  # type: ignore[attr-defined]
            threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        self.port, self.content_port = (server.server_address[1] for server in self.servers)
        self.url, self.content_url = f"http://127.0.0.1:{self.port}", f"http://localhost:{self.content_port}"
        return self

    def __exit__(self, *_: object) -> None:
        for server in self.servers:
            server.shutdown()
            server.server_close()

    def asked(self, what: str) -> list[Request]:
        with self.lock:
            return [request for request in self.requests if what in request.path]

    def fault_for(self, path: str) -> Fault | None:
        with self.lock:
            for end, faults in self.faults.items():
                if path.endswith(end) and faults:
                    return faults.pop(0)
        return self.always


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Headers and body are two writes: with Nagle's algorithm the second waits 40 ms for the client's delayed ACK.
    disable_nagle_algorithm = True

    def log_message(self, format: str, *arguments: object) -> None: ...

    def handle(self) -> None:
        try:
            super().handle()
        except OSError:
            self.close_connection = True

    def do_GET(self) -> None:
        hub: Hub = self.server.hub  # type: ignore[attr-defined]
        parts = urlsplit(self.path)
        path = unquote(parts.path)
        with hub.lock:
            hub.requests.append(
                Request(self.headers["Host"], self.path, {k.lower(): v for k, v in self.headers.items()})
            )
        for kind in ("/api/datasets/", "/api/models/"):
            if path.startswith(kind):
                if fault := hub.fault_for(path):
                    return fault(self, b"[]", 0)
                return self.api(hub, path.removeprefix(kind), parse_qs(parts.query))
        if path.startswith("/content/"):
            repo, _, name = path.removeprefix("/content/").partition("//")
            return self.body(hub, path, hub.files[repo][name])
        if path.removeprefix("/") in hub.models:
            return self.body(hub, path, hub.models[path.removeprefix("/")], etag=True)
        if path.startswith("/plain/") and path.removeprefix("/plain/") in hub.plain:
            return self.body(hub, path, hub.plain[path.removeprefix("/plain/")], etag=True)
        found = re.fullmatch(r"(?:/datasets)?/([^/]+(?:/[^/]+)?)/resolve/([^/]+)/(.+)", path)
        if not found or found[3] not in hub.files.get(found[1], {}):
            return self.answer(404, code="EntryNotFound")
        if found[1] in hub.gated and self.headers["Authorization"] != f"Bearer {hub.token}":
            return self.answer(403, code="GatedRepo")
        if found[3].endswith((".md", ".txt")):
            return self.body(hub, path, hub.files[found[1]][found[3]])
        target = hub.redirect_to or f"{hub.content_url}/content/{found[1]}//{found[3]}?signature=s"
        self.answer(302, headers={"Location": target})

    def api(self, hub: Hub, path: str, query: dict[str, list[str]]) -> None:
        found = re.fullmatch(r"([^/]+(?:/[^/]+)?)/(revision|tree)/([^/]+)(?:/(.*))?", path)
        if not found or found[1] not in hub.files:
            return self.answer(401, code="RepoNotFound")
        repo, what, revision, folder = found.groups()
        if revision not in ("main", COMMIT):
            return self.answer(404, code="RevisionNotFound")
        if what == "revision":
            facts = {"sha": COMMIT, "gated": "auto" if repo in hub.gated else False, "cardData": hub.cards.get(repo)}
            return self.answer(200, json.dumps(facts).encode())
        entries = listing(hub.files[repo], folder or "", query["recursive"] == ["True"])
        if folder and not entries:
            return self.answer(404, code="EntryNotFound")
        start = int(query.get("cursor", ["0"])[0])
        headers = {}
        if start + hub.page_size < len(entries):
            following = (
                f"{hub.url}{urlsplit(self.path).path}?recursive={query['recursive'][0]}&cursor={start + hub.page_size}"
            )
            headers["Link"] = f'<{hub.next_page or following}>; rel="next"'
        self.answer(200, json.dumps(entries[start : start + hub.page_size]).encode(), headers=headers)

    def body(self, hub: Hub, path: str, content: bytes, etag: bool = False) -> None:
        tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"' if etag else ""
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers["Range"] or "")
        first = int(asked[1]) if asked and self.headers.get("If-Range", tag) == tag else 0
        if fault := hub.fault_for(path):
            return fault(self, content, first)
        last = int(asked[2]) if asked and asked[2] else None
        self.send_content(content, first, tag=tag, last=last, pace=hub.pace)

    def send_content(
        self,
        content: bytes,
        first: int,
        *,
        tag: str = "",
        limit: int | None = None,
        pace: float = 0,
        last: int | None = None,
    ) -> None:
        ranged = last is not None
        if first > len(content) or (ranged and first >= len(content)):
            return self.answer(416, headers={"Content-Range": f"bytes */{len(content)}"})
        rest = content[first : last + 1 if last is not None else None]
        self.send_response(206 if first or ranged else 200)
        self.send_header("Content-Length", str(len(rest)))
        if tag:
            self.send_header("ETag", tag)
        if first or ranged:
            self.send_header("Content-Range", f"bytes {first}-{first + len(rest) - 1}/{len(content)}")
        self.end_headers()
        rest = rest[:limit]
        step = 4096 if pace else max(1, len(rest))
        for start in range(0, len(rest), step):
            self.wfile.write(rest[start : start + step])
            time.sleep(pace)
        if limit is not None:
            self.close_connection = True

    def answer(self, status: int, body: bytes = b"", *, code: str = "", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if code:
            self.send_header("X-Error-Code", code)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


def listing(files: dict[str, bytes], folder: str, recursive: bool) -> list[dict[str, Any]]:
    prefix = f"{folder}/" if folder else ""
    entries: dict[str, dict[str, Any]] = {}
    for name, content in files.items():
        if not name.startswith(prefix):
            continue
        *above, _ = name[len(prefix) :].split("/")
        for depth in range(len(above)):
            path = prefix + "/".join(above[: depth + 1])
            if recursive or depth == 0:
                entries[path] = {"type": "directory", "path": path, "size": 0, "oid": "0" * 40}
        if recursive or not above:
            git = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
            entries[name] = {"type": "file", "path": name, "size": len(content), "oid": git}
            if not name.endswith((".md", ".txt")):
                oid = hashlib.sha256(content).hexdigest()
                entries[name]["lfs"] = {"oid": oid, "size": len(content), "pointerSize": 134}
    return list(entries.values())


def status(code: int, **headers: str) -> Fault:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda handler, content, first: handler.answer(code, b"trouble", headers=named)


def wait_until_date(seconds: float) -> Fault:
    """Answer 429 with a Retry-After date. Dates have whole seconds, so the requested wait is up to a second shorter."""
    return lambda handler, content, first: handler.answer(
        429, headers={"Retry-After": formatdate(time.time() + seconds, usegmt=True)}
    )


def truncated(size: int) -> Fault:
    return lambda handler, content, first: handler.send_content(content, first, limit=size)


def stalled(size: int, seconds: float) -> Fault:
    def stall(handler: Handler, content: bytes, first: int) -> None:
        handler.send_content(content, first, limit=size)
        handler.wfile.flush()
        time.sleep(seconds)

    return stall


def reset(handler: Handler, content: bytes, first: int) -> None:
    handler.close_connection = True


def ignores_ranges(handler: Handler, content: bytes, first: int) -> None:
    handler.send_content(content, 0)


def damaged(handler: Handler, content: bytes, first: int) -> None:
    handler.send_content(bytes(byte ^ 1 for byte in content), first)


def error_page(handler: Handler, content: bytes, first: int) -> None:
    handler.answer(200, b"<html>please log in</html>")
