"""The relay of a rank: a process that forwards the rank's standard output and standard error, and keeps a copy in
`logs/<attempt>/<rank>.log`.

The relay outlives the rank, so output written just before a SIGKILL is not lost: the kernel keeps it in the pipe. Forwarding
has priority. A thread writes the copy from a bounded queue, so a slow, full or missing file system costs lines of the log
and nothing else. Attempts are numbered by counting start events in events.jsonl, so ranks on all nodes agree without
communication; the log is held back until its attempt has begun. This file runs as a script, without Argosy or site
packages: import only the standard library here.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import select
import signal
import sys
import termios
import threading
import time
from collections import deque
from typing import Any, NamedTuple

# Prefix of lines that the relay itself writes to a log; prefixes of the first and the last line of each start.
MARK = "-- argosy: "
BEGINNING, ENDING = f"{MARK}rank ", f"{MARK}it "
# Messages from the rank. FORGET: discard the log if training has not begun. FAREWELL: the rank exits by itself.
FORGET, FAREWELL = b"f", b"e"
ATTEMPTS_KEPT = 10
# Bytes of a log file before it is rotated: a share of 1 GiB for all ranks, between 256 KiB and 8 MiB.
_ALL_PIECES, _LEAST_PIECE, _LARGEST_PIECE = 1 << 30, 256 << 10, 8 << 20
_QUEUE, _LONGEST_LINE = 4 << 20, 16 << 10  # bytes
# Size of a pipe's buffer and of one read: no write of the rank is cut in two. POSIX keeps writes up to PIPE_BUF together.
PIPE_BYTES, _PIPE_BUF = 256 << 10, 4096  # bytes
_POLL_S, _RETRY_S = 0.05, 5.0
# Time to complete the log: while the rank waits for the relay, and after the rank's end.
_FLUSH_S, _LAST_FLUSH_S = 2.0, 60.0
_CLEAR_LINE = b"\x1b[2K"
_NOBODY_READS = (errno.EPIPE, errno.EIO, errno.EBADF, errno.ENXIO, errno.ECONNRESET)
_NOT_FOR_US = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


class RelayOptions(NamedTuple):
    """The settings that a rank passes to its relay. `before` is the run's `Starts` when the rank started, `channels` are file
    descriptors (read from, write to), and `last_words` are files in which the rank leaves the reason of its death."""

    rank: int
    ranks: int
    pid: int
    host: str
    run: str
    before: tuple[int, float]
    channels: list[tuple[int, int]]
    warnings: int
    last_words: list[str]


class Starts(NamedTuple):
    """The number of start and resume events of a run, and the time of the last one."""

    number: int
    time: float

    @classmethod
    def read(cls, run: str) -> Starts:
        found = cls(0, 0.0)
        with contextlib.suppress(OSError), open(os.path.join(run, "events.jsonl"), "rb") as events:
            for line in events:
                if b'"start"' in line or b'"resume"' in line:
                    with contextlib.suppress(ValueError, TypeError, KeyError):
                        event = json.loads(line)
                        if event["event"] in ("start", "resume"):
                            found = cls(found.number + 1, float(event["time"]))
        return found


class LineSplitter:
    """Splits a byte stream into complete lines. A line that was overwritten, as by a progress bar, is kept as last visible."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        *whole, rest = (self._rest + data).split(b"\n")
        if len(rest) > _LONGEST_LINE:
            whole, rest = [*whole, rest], b""
        self._rest = _last_visible(rest)
        return b"".join(_last_visible(line).rstrip(b"\r") + b"\n" for line in whole)

    def end(self) -> bytes:
        return self.feed(b"\n") if self._rest else b""


def _last_visible(line: bytes) -> bytes:
    line = line[line.rstrip(b"\r").rfind(b"\r") + 1 :]
    return line[max(0, line.rfind(_CLEAR_LINE)) :].removeprefix(_CLEAR_LINE)


class Log:
    """A rank's log of an attempt. A full file is rotated; the first file and the last two are kept."""

    def __init__(self, options: RelayOptions, attempt: int) -> None:
        self._options, self._fd, self._size, self._lost = options, -1, 0, 0
        self._piece = min(_LARGEST_PIECE, max(_LEAST_PIECE, _ALL_PIECES // options.ranks))
        self._directory = os.path.join(options.run, "logs", str(attempt))
        self._open()

    def write(self, data: bytes) -> None:
        while len(data) > (room := self._piece - self._size):
            end = data.rfind(b"\n", 0, max(0, room)) + 1
            if not end and self._size < self._piece // 2:
                end = room
            self._append(data[:end])
            data = data[end:]
            self._rotate()
        self._append(data)

    def _append(self, data: bytes) -> None:
        self._size += len(data)
        while data:
            data = data[os.write(self._fd, data) :]

    def _open(self) -> None:
        os.makedirs(self._directory, exist_ok=True)
        self._fd = os.open(self._path(""), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._size = os.fstat(self._fd).st_size

    def _path(self, piece: str) -> str:
        return os.path.join(self._directory, f"{self._options.rank}{piece}.log")

    def _rotate(self) -> None:
        first, before = self._path(".first"), self._path(".before")
        fresh = not os.path.exists(first)
        if os.path.exists(before):
            self._lost += os.path.getsize(before)
        with contextlib.suppress(FileNotFoundError):
            os.replace(self._path(""), first if fresh else before)
        full = self._fd
        self._open()
        os.close(full)
        names = os.path.basename(first) + ("" if fresh else f" and {os.path.basename(before)}")
        gap = f", without {self._lost >> 10} KiB between them" if self._lost else ""
        size = f"a log keeps its first {self._piece >> 10} KiB and at least as much of its end"
        self._append(f"{MARK}earlier lines are in {names}{gap}; {size}\n".encode())


def forget_old(logs: str, newest: int) -> None:
    """Delete the logs of attempts before the last `ATTEMPTS_KEPT`. A directory that holds other files stays."""
    for name in os.listdir(logs):
        if name.isdecimal() and int(name) <= newest - ATTEMPTS_KEPT:
            directory = os.path.join(logs, name)
            with contextlib.suppress(OSError):
                for file in os.listdir(directory):
                    if file.endswith(".log"):
                        os.unlink(os.path.join(directory, file))
                os.rmdir(directory)


class LogWriter(threading.Thread):
    """The thread that writes the log once the attempt has begun. Bytes that fit neither queue nor disk are dropped and counted."""

    def __init__(self, options: RelayOptions) -> None:
        super().__init__(name="log-writer", daemon=True)
        self._options = options
        self._header = f"{BEGINNING}{options.rank} of {options.ranks} on {options.host}, pid {options.pid}, {clock()}\n"
        self._events_stamp: object = None
        self._queue: deque[bytes] = deque()
        # Bytes in the queue; bytes in the queue when events.jsonl was last read.
        self._changed, self._queued, self._queued_then = threading.Condition(), 0, 0
        # Bytes dropped because the queue was full, and because the disk did not take them.
        self._left_out, self._unwritten = 0, 0
        self._retry_at, self._warned, self._closed = 0.0, False, False
        self.forget, self.over = threading.Event(), threading.Event()
        self.start()

    def put(self, data: bytes) -> None:
        with self._changed:
            if self._queued + len(data) > _QUEUE:
                self._left_out += len(data)
            elif data and not self._closed:
                self._queued += len(data)
                self._queue.append(data)
                self._changed.notify_all()

    def end(self) -> None:
        """Record that the rank has ended: if its attempt has not begun yet, it never will."""
        with self._changed:
            self.over.set()
            self._changed.notify_all()

    def flush(self, within_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._queued, within_s)

    def run(self) -> None:
        attempt = self._attempt_number()
        if attempt is None:
            with self._changed:
                self._closed, self._queued = True, 0
                self._changed.notify_all()
            return
        log = self._write(None, attempt, b"")
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue)
                data = b"".join(self._queue)
                self._queue.clear()
                if self._left_out:
                    data, self._left_out = data + _gap(self._left_out), 0
            log = self._write(log, attempt, data)
            with self._changed:
                self._queued = sum(map(len, self._queue))
                self._changed.notify_all()

    def _attempt_number(self) -> int | None:
        """Wait until the attempt has begun and return its number. A rank that ends before counts as the next attempt; None if it
        asked to discard its log."""
        # Longer with more ranks: all of them poll one shared file system.
        every_s = min(15.0, max(1.0, self._options.ranks / 64))
        while not self.over.wait(_POLL_S):
            # New output may mean that training has begun.
            with self._changed:
                self._changed.wait_for(lambda: self._queued > self._queued_then or self.over.is_set(), every_s)
                self._queued_then = self._queued
            if (number := self._begun()) is not None:
                return number
        if (number := self._begun(reread=True)) is not None:
            return number
        kept = os.path.isdir(self._options.run) and not self.forget.is_set()
        return Starts.read(self._options.run).number + 1 if kept else None

    def _begun(self, *, reread: bool = False) -> int | None:
        """Return the number of the attempt if it has begun. Without `reread`, an unchanged events file is not read again."""
        stamp = self._stamp()
        if stamp == self._events_stamp and not reread:
            return None
        self._events_stamp, now = stamp, Starts.read(self._options.run)
        return now.number if now.number and now != Starts(*self._options.before) else None

    def _stamp(self) -> object:
        try:
            found = os.stat(os.path.join(self._options.run, "events.jsonl"))
        except OSError:
            return None
        return found.st_ino, found.st_size, found.st_mtime_ns

    def _write(self, log: Log | None, attempt: int, data: bytes) -> Log | None:
        if time.monotonic() < self._retry_at and not self.over.is_set():
            self._unwritten += len(data)
            return log
        try:
            if log is None:
                log = Log(self._options, attempt)
                if self._options.rank == 0:
                    forget_old(os.path.join(self._options.run, "logs"), attempt)
            if self._header:
                log.write(self._header.encode())
                self._header = ""
            if self._unwritten:
                log.write(_gap(self._unwritten))
                self._unwritten = 0
            log.write(data)
        except OSError as error:
            self._unwritten += len(data)
            self._retry_at = time.monotonic() + _RETRY_S
            self._warn(error)
        return log

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            what = f"warning: the log of rank {self._options.rank} cannot be kept ({error})"
            send(self._options.warnings, f"{what}; the run goes on without it\n".encode())


def _gap(size: int) -> bytes:
    return f"{MARK}{size} bytes are left out here: they could not be written in time\n".encode()


def send(fd: int, data: bytes) -> bool:
    """Write all of `data`, in whole lines if possible: other ranks may write there too. Returns whether the reader still exists."""
    while data:
        end = len(data) if len(data) <= _PIPE_BUF else data.rfind(b"\n", 0, _PIPE_BUF) + 1 or _PIPE_BUF
        try:
            data = data[os.write(fd, data[:end]) :]
        except BlockingIOError:
            # The descriptor was inherited in non-blocking mode.
            select.select([], [fd], [])
        except OSError as error:
            return error.errno not in _NOBODY_READS
    return True


def receive(source: int) -> bytes:
    """Read what is available; empty if all writers have closed."""
    try:
        return os.read(source, PIPE_BYTES)
    except OSError:
        # A pseudo-terminal without writers raises EIO.
        return b""


class Relay:
    """Forwards the channels of a rank and feeds its log."""

    def __init__(self, options: RelayOptions) -> None:
        self._options, self._writer = options, LogWriter(options)
        # A target becomes None when its reader has exited, as `head` does.
        self._targets: dict[int, int | None] = dict(options.channels)
        self._lines = {source: LineSplitter() for source in self._targets}
        self._exited_by_itself = False
        signal.signal(signal.SIGWINCH, lambda number, frame: self._fit_windows())
        self._fit_windows()

    def run(self) -> None:
        """Forward until the rank, and all child processes that hold its streams, have ended."""
        rank_is_there = True
        while self._lines or rank_is_there:
            ready = select.select([*self._lines, *([0] if rank_is_there else [])], [], [])[0]
            for source in ready:
                if source != 0:
                    self._forward(source)
            if 0 in ready:
                rank_is_there = self._read_rank()
        # Readers of these streams see their end now, and need not wait for the log.
        for fd in {2, self._options.warnings, *(target for _, target in self._options.channels)}:
            os.close(fd)
        self._writer.flush(_LAST_FLUSH_S)

    def _forward(self, source: int) -> None:
        data = receive(source)
        if not data:
            self._writer.put(self._lines.pop(source).end())
            os.close(source)
            return
        target = self._targets[source]
        if target is not None and not send(target, data):
            self._targets[source] = None
        self._writer.put(self._lines[source].feed(data))

    def _read_rank(self) -> bool:
        """Read messages of the rank from standard input. Returns False at its end, when the rank has ended."""
        message = os.read(0, 16)
        if FORGET in message:
            self._writer.forget.set()
        self._exited_by_itself |= FAREWELL in message
        if message:
            return True
        self._writer.end()
        while self._lines and (ready := select.select([*self._lines], [], [], 0)[0]):
            for source in ready:
                self._forward(source)
        for lines in self._lines.values():
            self._writer.put(lines.end())
        for path in self._options.last_words:
            self._writer.put(_read_last_words(path))
        how = "ended by itself" if self._exited_by_itself else "was ended, or crashed"
        self._writer.put(f"{ENDING}{how}, {clock()}\n".encode())
        self._writer.flush(_FLUSH_S)
        # The rank waits for this end of file (`RankOutput.close`).
        os.close(1)
        return False

    def _fit_windows(self) -> None:
        """Give the pseudo-terminals the window size of the real ones. Most channels are no terminals."""
        for source, target in self._targets.items():
            if target is not None and source in self._lines:
                with contextlib.suppress(OSError):
                    size = fcntl.ioctl(target, termios.TIOCGWINSZ, bytes(8))
                    fcntl.ioctl(source, termios.TIOCSWINSZ, size)


def _read_last_words(path: str) -> bytes:
    """Return the error that a rank left, or the stacks of a crash. Stacks that the supervisor asked for are left out."""
    try:
        with open(path, "rb") as file:
            text = file.read(_QUEUE // 4)
    except OSError:
        return b""
    asked_for = path.endswith(".stacks") and b"Fatal Python error" not in text
    return b"" if asked_for or not text else text.rstrip(b"\n") + b"\n"


def clock() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())


def main() -> None:
    """Run until standard input, which the rank holds open, and all channels have ended. Argument: `RelayOptions` as JSON."""
    for number in _NOT_FOR_US:
        signal.signal(number, signal.SIG_IGN)
    options: dict[str, Any] = json.loads(sys.argv[1])
    Relay(RelayOptions(**options)).run()


if __name__ == "__main__":
    main()
