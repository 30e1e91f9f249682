"""A server of the records of runs, for a pod that reads a shared volume: `python -m argosy.record.record_server RUNS`.

It answers GET only. `/list` tells the files of each run, and `/read` sends parts of those that make up a run's record: spec,
metrics, events, heartbeats, the newest logs, and the manifests and states of checkpoints, which are small JSON files. Weights and all other files are never sent. Every
request must carry the token whose SHA-256 is in the environment, so that the pod's own description does not give the token away.
The server ends when nobody has asked for a while. The standard library is all it needs.
"""

from __future__ import annotations

import argparse
import hashlib
import hmac
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import orjson

from argosy.record.rank_logs import newest_attempt
from argosy.untrusted import open_regular

TOKEN_HEADER, DIGEST_VARIABLE = "X-Argosy-Token", "ARGOSY_READER_SHA256"
# Files of one answer, and bytes of each of them.
MOST_FILES, MOST_BYTES = 200, 1 << 20
_MOST_RUNS, _MOST_RANKS, _MOST_LOGS, _MOST_CHECKPOINT_FILES = 200, 512, 64, 10_000
_TOP = ("run.yaml", "resolved.json", "plan.json", "notes.json", "metrics.jsonl", "events.jsonl", "ranks.jsonl", "samples.jsonl")  # fmt: skip
_RECORD = re.compile(
    "|".join(
        [
            *map(re.escape, _TOP),
            r"heartbeat/\d+\.json",
            r"logs/\d+/\d+\.log",
            r"checkpoints/[\w.-]+/(manifest|state)\.json",
        ]
    )
)


def is_record(path: str) -> bool:
    """Return whether a path below a run directory is part of the run's record, which may be sent."""
    return _RECORD.fullmatch(path) is not None


def list_runs(root: Path, wanted: str | None = None) -> dict[str, list[tuple[str, int, int, int]]]:
    """Return path, size, time of change in nanoseconds and inode of the files of each run, or of one run."""
    try:
        folders = [Path(entry.path) for entry in os.scandir(root) if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        # The first run of a volume makes the directory when it starts to train.
        return {}
    runs = [folder for folder in folders if wanted in (None, folder.name) and _is_run(folder)]
    newest = sorted(runs, key=lambda run: run.stat().st_mtime, reverse=True)[:_MOST_RUNS]
    return {run.name: [facts for path in _files(run) if (facts := _facts(run, path)) is not None] for run in newest}


def _is_run(folder: Path) -> bool:
    return (folder / "metrics.jsonl").is_file() or (folder / "resolved.json").is_file()


def _files(run: Path) -> Iterator[Path]:
    yield from (run / name for name in _TOP)
    yield from sorted((run / "heartbeat").glob("*.json"), key=_by_number)[:_MOST_RANKS]
    attempt = newest_attempt(run)
    yield from [] if attempt is None else sorted(attempt.glob("*.log"), key=_by_number)[:_MOST_LOGS]
    for number, path in enumerate((run / "checkpoints").rglob("*")):
        if number >= _MOST_CHECKPOINT_FILES:
            return
        yield path


def _by_number(path: Path) -> tuple[int, str]:
    return (int(path.stem), "") if path.stem.isdecimal() else (1 << 30, path.name)


def _facts(run: Path, path: Path) -> tuple[str, int, int, int] | None:
    try:
        found = path.lstat()
    except OSError:
        return None
    if path.is_symlink() or not path.is_file():
        return None
    return path.relative_to(run).as_posix(), found.st_size, found.st_mtime_ns, found.st_ino


def read_parts(root: Path, parts: list[str]) -> bytes:
    """Return the bytes of several files as one answer: a line with their lengths, then the bytes.

    Args:
        parts: `OFFSET:RUN/PATH` for each file. At most `MOST_BYTES` from the offset are sent.
    """
    found = [_part(root, part) for part in parts[:MOST_FILES]]
    return orjson.dumps([len(part) for part in found]) + b"\n" + b"".join(found)


def _part(root: Path, part: str) -> bytes:
    offset, _, name = part.partition(":")
    run, _, path = name.partition("/")
    if not offset.isdecimal() or run in ("", ".", "..") or not is_record(path):
        raise PermissionError(f"{name} is not part of a run's record")
    try:
        with open_regular(root / run / path, within=root / run) as file:
            file.seek(int(offset))
            return file.read(MOST_BYTES)
    except OSError:
        # The file was deleted meanwhile, or is not what it seems. The next list tells.
        return b""


class RecordServer(ThreadingHTTPServer):
    """The server of one directory of runs. `idle_s`: seconds without a request after which `serve` returns."""

    daemon_threads = True
    address_family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET

    def __init__(self, root: Path, digest: str, *, port: int, host: str = "", idle_s: float = 900.0) -> None:
        self.root, self.digest, self.asked, self._idle_s = root, digest, time.monotonic(), idle_s
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()

    def serve(self) -> None:
        threading.Thread(target=self._end_when_idle, daemon=True).start()
        self.serve_forever(0.5)

    def _end_when_idle(self) -> None:
        while (left := self.asked + self._idle_s - time.monotonic()) > 0:
            time.sleep(left)
        self.shutdown()


class _Handler(BaseHTTPRequestHandler):
    server: RecordServer
    protocol_version = "HTTP/1.1"
    # Headers and body are two writes: with Nagle's algorithm the second waits 40 ms for the client's delayed ACK.
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: object) -> None: ...

    def do_GET(self) -> None:
        given = hashlib.sha256(self.headers.get(TOKEN_HEADER, "").encode()).hexdigest()
        if not hmac.compare_digest(given, self.server.digest):
            self._answer(403, b"the token is missing or wrong")
            return
        self.server.asked = time.monotonic()
        try:
            self._answer(*self._found())
        except PermissionError as error:
            self._answer(403, str(error).encode())
        except OSError as error:
            self._answer(500, (error.strerror or "the directory cannot be read").encode())

    def _found(self) -> tuple[int, bytes]:
        asked = urlsplit(self.path)
        query = parse_qs(asked.query)
        if asked.path == "/list":
            return 200, orjson.dumps(list_runs(self.server.root, query.get("run", [None])[0]))
        if asked.path == "/read":
            return 200, read_parts(self.server.root, query.get("part", []))
        return 404, b"there is /list and /read"

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve the records of the runs in a directory, read only.")
    parser.add_argument("runs", type=Path)
    parser.add_argument("--port", type=int, required=True)
    given = parser.parse_args()
    RecordServer(given.runs, os.environ[DIGEST_VARIABLE], port=given.port).serve()


if __name__ == "__main__":
    main()
