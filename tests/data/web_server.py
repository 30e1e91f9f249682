"""A loopback web server with configurable features and faults: ranges, lengths, validators, encodings."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import re
import socket
import threading
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


@dataclass
class Habits:
    ranges: bool = True
    # How the end of a body is marked: stated, chunked or closed.
    length: str = "stated"
    etag: bool = True
    # Send Last-Modified.
    time: bool = False
    content_type: str | None = None
    encoding: str | None = None
    # A server of signed links answers no HEAD.
    methods: tuple[str, ...] = ("GET",)
    # Faults of the next requests: 503, reset, cut, slow, or a status.
    faults: list[str] = field(default_factory=list)
    gone: bool = False


class WebServer:
    def __init__(self, root: Path, habits: Habits) -> None:
        self.root, self.habits, self.asked = root, habits, list[tuple[str, str]]()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            # Headers and body are two writes: with Nagle's algorithm the second waits 40 ms for the client's delayed ACK.
            disable_nagle_algorithm = True

            def do_GET(self) -> None:
                with contextlib.suppress(ConnectionError):
                    outer._answer(self)

            do_HEAD = do_GET

            def log_message(self, *arguments: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        habits, path = self.habits, request.path
        self.asked.append((request.command, path))
        fault = habits.faults.pop(0) if habits.faults else ""
        if request.command not in habits.methods:
            fault = "405"
        file = self.root / path.lstrip("/")
        if fault == "reset":
            request.close_connection = True
            request.connection.shutdown(socket.SHUT_RDWR)
            return
        if fault.isdigit():
            return self._send(request, int(fault), {"Retry-After": "0"} if fault == "429" else {}, b"")
        if path.endswith("/"):
            links = "".join(f'<a href="{below.name}">{below.name}</a>\n' for below in sorted(self.root.iterdir()))
            return self._send(request, 200, {"Content-Type": "text/html"}, links.encode())
        if habits.gone or not file.is_file():
            return self._send(request, 404, {}, b"")
        if fault == "slow":
            time.sleep(0.3)
        self._send_file(request, file.read_bytes(), cut=fault == "cut")

    def _send_file(self, request: BaseHTTPRequestHandler, content: bytes, *, cut: bool) -> None:
        habits, headers, status = self.habits, dict[str, str](), 200
        if habits.encoding == "gzip":
            content, headers["Content-Encoding"] = gzip.compress(content, mtime=0), "gzip"
        if habits.etag:
            headers["ETag"] = f'"{hashlib.md5(content).hexdigest()}"'
        if habits.time:
            headers["Last-Modified"] = f"Mon, 16 Nov 2026 07:00:{zlib.crc32(content) % 60:02d} GMT"
        if habits.content_type:
            headers["Content-Type"] = habits.content_type
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("Range", ""))
        if habits.ranges and asked is not None:
            first, last = int(asked[1]), min(int(asked[2]), len(content) - 1)
            if first >= len(content):
                return self._send(request, 416, {"Content-Range": f"bytes */{len(content)}"}, b"")
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
            content, status = content[first : last + 1], 206
        self._send(request, status, headers, content, length=habits.length, cut=cut)

    def _send(
        self,
        request: BaseHTTPRequestHandler,
        status: int,
        headers: dict[str, str],
        content: bytes,
        *,
        length: str = "stated",
        cut: bool = False,
    ) -> None:
        request.send_response_only(status)
        told = {"stated": ("Content-Length", str(len(content))), "chunked": ("Transfer-Encoding", "chunked")}
        for key, value in [*headers.items(), told.get(length, ("Connection", "close"))]:
            request.send_header(key, value)
        request.end_headers()
        if request.command == "HEAD":
            return
        if cut:
            content = content[: len(content) // 2]
        if length == "chunked" and content:
            content = b"%x\r\n%s\r\n" % (len(content), content)
        request.wfile.write(content + (b"0\r\n\r\n" if length == "chunked" and not cut else b""))
        if cut or length == "closed":
            request.wfile.flush()
            request.close_connection = True
            request.connection.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def web_server(root: Path, **habits: Any) -> Iterator[WebServer]:
    server = WebServer(root, Habits(**habits))
    try:
        yield server
    finally:
        server.close()
