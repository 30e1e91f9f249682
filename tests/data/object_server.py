"""Object stores on loopback: a server with fault injection, a real S3 server (moto), a real Azure server (azurite)."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from ports import free_port
from waiting import PATIENCE_S

Answer = tuple[int, dict[str, str], bytes]
FAULTS = ("429", "500", "503", "hang", "truncate", "short", "long", "reset")
HANG_S = 1.5


class FaultyServer:
    """A server that answers from `answer`, unless `fault` (called for each GET) returns one of FAULTS."""

    def __init__(self, answer: Callable[[str, str, dict[str, str], bytes], Answer]) -> None:
        self.answer = answer
        self.fault: Callable[[str], str | None] = lambda path: None
        # (path, range) of successful requests.
        self.gets: Counter[tuple[str, str]] = Counter()
        self.faults: Counter[str] = Counter()
        self.retry_after: str | None = "0"
        self.times: list[float] = []
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            # Headers and body are two writes: with Nagle's algorithm the second waits 40 ms for the client's delayed ACK.
            disable_nagle_algorithm = True

            def handle_any(self) -> None:
                outer._handle(self)

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_any

            def log_message(self, *arguments: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def at_random(self, share: float, seed: int = 0) -> None:
        rng = random.Random(seed)

        def fault(path: str) -> str | None:
            with self._lock:
                return rng.choice(FAULTS) if rng.random() < share else None

        self.fault = fault

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _handle(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        headers = dict(request.headers.items())
        fault = self.fault(request.path) if request.command == "GET" else None
        with contextlib.suppress(ConnectionError, TimeoutError):
            self.times.append(time.monotonic())
            if fault is None:
                status, answered, content = self.answer(request.command, request.path, headers, body)
                if request.command == "GET" and status < 300:
                    with self._lock:
                        self.gets[request.path.partition("?")[0], headers.get("Range", "")] += 1
                self._send(request, status, answered, content)
                return
            with self._lock:
                self.faults[fault] += 1
            self._misbehave(request, fault, headers, body)

    def _misbehave(self, request: BaseHTTPRequestHandler, fault: str, headers: dict[str, str], body: bytes) -> None:
        if fault in ("429", "500", "503", "403", "401"):
            extra = {"Retry-After": self.retry_after} if fault == "429" and self.retry_after else {}
            self._send(request, int(fault), extra, b"")
            return
        if fault == "hang":
            time.sleep(HANG_S)
        elif fault != "reset":
            status, answered, content = self.answer(request.command, request.path, headers, body)
            # The connection ends before the promised length.
            if fault == "truncate":
                request.send_response_only(status)
                for key, value in {**answered, "Content-Length": str(len(content))}.items():
                    request.send_header(key, value)
                request.end_headers()
                request.wfile.write(content[: len(content) // 2])
                request.wfile.flush()
            # A complete response with a wrong length.
            elif fault == "short":
                self._send(request, status, answered, content[:-1])
            else:
                self._send(request, 200, answered, content + b"x")
        request.close_connection = True
        with contextlib.suppress(OSError):
            request.connection.shutdown(socket.SHUT_RDWR)

    def _send(self, request: BaseHTTPRequestHandler, status: int, headers: dict[str, str], content: bytes) -> None:
        request.send_response_only(status)
        if not any(key.lower() == "content-length" for key in headers):
            headers = {**headers, "Content-Length": str(len(content))}
        for key, value in headers.items():
            request.send_header(key, value)
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(content)


def from_directory(root: Path) -> Callable[[str, str, dict[str, str], bytes], Answer]:
    """Serve files with ETag, Range and If-Match, like a static web server."""

    def answer(method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        file = root / path.lstrip("/")
        if not file.is_file():
            return 404, {}, b""
        content = file.read_bytes()
        # A hash, because file times are too coarse.
        tag = f'"{hashlib.md5(content).hexdigest()}"'
        if headers.get("If-Match", tag) != tag:
            return 412, {}, b""
        facts = {"ETag": tag, "Accept-Ranges": "bytes"}
        if asked := headers.get("Range"):
            first, _, last = asked.removeprefix("bytes=").partition("-")
            return 206, facts, content[int(first) : int(last) + 1]
        return 200, {**facts, "Content-Length": str(len(content))}, content

    return answer


def from_buckets(root: Path) -> Callable[[str, str, dict[str, str], bytes], Answer]:
    """Serve the directories of `root` as buckets through Google's JSON API: metadata, range reads, listings."""

    def answer(method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        parts = urlsplit(path)
        found = re.fullmatch(r"/(download/)?storage/v1/b/([^/]+)/o(?:/(.+))?", parts.path)
        if found is None:
            return 400, {}, b""
        bucket, name = root / found[2], unquote(found[3] or "")
        if not name:
            prefix = parse_qs(parts.query).get("prefix", [""])[0]
            files = sorted(str(file.relative_to(bucket)) for file in bucket.rglob("*") if file.is_file())
            items = [_google_facts(bucket, file) for file in files if file.startswith(prefix)]
            return 200, {"Content-Type": "application/json"}, json.dumps({"items": items}).encode()
        if not (bucket / name).is_file():
            return 404, {}, b""
        if found[1] is None:
            return 200, {"Content-Type": "application/json"}, json.dumps(_google_facts(bucket, name)).encode()
        content = (bucket / name).read_bytes()
        if asked := headers.get("Range"):
            first, _, last = asked.removeprefix("bytes=").partition("-")
            end = int(last) + 1 if last else None
            return 206, {}, content[int(first) : end]
        return 200, {}, content

    return answer


def _google_facts(bucket: Path, name: str) -> dict[str, str]:
    about = (bucket / name).stat()
    version = {"generation": str(about.st_mtime_ns), "etag": f"{about.st_mtime_ns:x}"}
    return {"name": name, "bucket": bucket.name, "size": str(about.st_size), **version}


def from_upstream(port: int) -> Callable[[str, str, dict[str, str], bytes], Answer]:
    """Proxy the server on `port`."""

    def answer(method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        try:
            connection.request(method, path, body or None, headers)
            response = connection.getresponse()
            content = response.read()
            passed = {
                key: value
                for key, value in response.getheaders()
                if key.lower() not in ("transfer-encoding", "connection")
                and (method == "HEAD" or key.lower() != "content-length")
            }
            return response.status, passed, content
        except (OSError, http.client.HTTPException):
            return 502, {}, b""
        finally:
            connection.close()

    return answer


@contextlib.contextmanager
def running(command: list[str], port: int, log: Path) -> Iterator[None]:
    """Run a server process that answers on `port`, and terminate it afterwards."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, cwd=log.parent)
    try:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 0.2):
                break
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        yield
    finally:
        process.kill()
        process.wait(10)


@contextlib.contextmanager
def moto(directory: Path) -> Iterator[int]:
    port = free_port()
    server = "from moto.server import main; import sys; main(sys.argv[1:])"
    with running([sys.executable, "-c", server, "-H", "127.0.0.1", "-p", str(port)], port, directory / "moto.log"):
        yield port


# azurite's well-known key.
AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


def azure_connection(port: int) -> str:
    return (
        "DefaultEndpointsProtocol=http;AccountName=devstoreaccount1;"
        f"AccountKey={AZURE_KEY};BlobEndpoint=http://127.0.0.1:{port}/devstoreaccount1;"
    )


@contextlib.contextmanager
def azurite(directory: Path) -> Iterator[int]:
    port, program = free_port(), shutil.which("azurite-blob")
    assert program is not None
    command = [program, "--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(directory), "--silent"]
    with running([*command, "--skipApiVersionCheck"], port, directory / "azurite.log"):
        yield port


def upload(system: Any, corpus: Path, target: str) -> None:
    for file in sorted(corpus.iterdir()):
        system.pipe_file(f"{target}/{file.name}", file.read_bytes())


def no_proxy() -> dict[str, str]:
    """Return the environment without proxy variables, which would redirect loopback requests."""
    return {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
