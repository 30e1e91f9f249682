"""The process beside a rank that passes on what it writes to standard output and standard error, and keeps a copy as
`logs/<attempt>/<rank>.log`.

It outlives the rank: what that wrote before it was killed lies in a pipe, which the kernel keeps. Passing on comes first: the copy
is written by a thread, from a queue that has an end, so that a file system that is slow, full or gone costs lines of the log and
nothing else. Attempts are numbered by the events that begin them, so that all ranks, on all nodes, agree without asking; until its
attempt has begun, a rank's words are held back. This file runs as a script of its own, without Argosy or site packages: only
the standard library may be imported here.
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

MARK = "-- argosy: "  # begins the lines that the relay itself puts into a log
BEGINNING, ENDING = f"{MARK}rank ", f"{MARK}it "  # the first and the last of each start
FORGET, FAREWELL = b"f", b"e"  # from the rank: its words matter only if it has trained; it ends by itself
ATTEMPTS_KEPT = 10
_ALL_PIECES, _LEAST_PIECE, _LARGEST_PIECE = 1 << 30, 256 << 10, 8 << 20  # bytes: of all ranks, of one
_QUEUE = 4 << 20  # bytes that wait for the file system
_LONGEST_LINE = 16 << 10
PIPE_BYTES = 256 << 10  # read at once, so that no write of the rank is cut in two
_ATOMIC = 4096  # bytes that a pipe takes together, however many ranks write to it
_LOOK_S = 0.05
_AGAIN_S = 5.0  # after a failure to write
_FLUSH_S, _LAST_FLUSH_S = 2.0, 60.0  # for the log to be complete: while the rank waits for it to end, and after
_ERASE = b"\x1b[2K"  # to a terminal: clear this line
_NOBODY_READS = (errno.EPIPE, errno.EIO, errno.EBADF, errno.ENXIO, errno.ECONNRESET)
_NOT_FOR_US = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


class Order(NamedTuple):
    """What a rank asks for."""

    rank: int
    ranks: int
    pid: int
    host: str
    run: str  # its directory
    before: tuple[int, float]  # how often that had begun
    channels: list[tuple[int, int]]  # where its words come from, and where they go
    warnings: int  # where the relay's own go
    last_words: list[str]  # files in which the rank leaves why it died


class Begun(NamedTuple):
    """How often a run has begun to train, and when it did last."""

    number: int
    time: float

    @classmethod
    def of(cls, run: str) -> Begun:
        found = cls(0, 0.0)
        with contextlib.suppress(OSError), open(os.path.join(run, "events.jsonl"), "rb") as events:
            for line in events:
                if b'"start"' in line or b'"resume"' in line:
                    with contextlib.suppress(ValueError, TypeError, KeyError):
                        event = json.loads(line)
                        if event["event"] in ("start", "resume"):
                            found = cls(found.number + 1, float(event["time"]))
        return found


class Lines:
    """Whole lines out of what a channel brings. Of one that is painted over, as by a progress bar, what was to be seen last."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        *whole, rest = (self._rest + data).split(b"\n")
        if len(rest) > _LONGEST_LINE:
            whole, rest = [*whole, rest], b""
        self._rest = _on_top(rest)
        return b"".join(_on_top(line).rstrip(b"\r") + b"\n" for line in whole)

    def end(self) -> bytes:
        return self.feed(b"\n") if self._rest else b""


def _on_top(line: bytes) -> bytes:
    line = line[line.rstrip(b"\r").rfind(b"\r") + 1 :]
    return line[max(0, line.rfind(_ERASE)) :].removeprefix(_ERASE)


class Log:
    """A rank's file of an attempt. When it is full another one is begun; the first is kept, and the last two."""

    def __init__(self, order: Order, attempt: int) -> None:
        self._order, self._fd, self._size, self._lost = order, -1, 0, 0
        self._piece = min(_LARGEST_PIECE, max(_LEAST_PIECE, _ALL_PIECES // order.ranks))
        self._directory = os.path.join(order.run, "logs", str(attempt))
        self._open()

    def write(self, data: bytes) -> None:
        while len(data) > (room := self._piece - self._size):
            end = data.rfind(b"\n", 0, max(0, room)) + 1
            if not end and self._size < self._piece // 2:
                end = room  # a line that is longer than any file
            self._append(data[:end])
            data = data[end:]
            self._turn()
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
        return os.path.join(self._directory, f"{self._order.rank}{piece}.log")

    def _turn(self) -> None:
        first, before = self._path(".first"), self._path(".before")
        fresh = not os.path.exists(first)
        if os.path.exists(before):
            self._lost += os.path.getsize(before)
        with contextlib.suppress(FileNotFoundError):  # somebody has put it away
            os.replace(self._path(""), first if fresh else before)
        full = self._fd
        self._open()
        os.close(full)
        names = os.path.basename(first) + ("" if fresh else f" and {os.path.basename(before)}")
        gap = f", without {self._lost >> 10} KiB between them" if self._lost else ""
        size = f"of a log its first {self._piece >> 10} KiB are kept, and at least as much of its end"
        self._append(f"{MARK}what came before is in {names}{gap}; {size}\n".encode())


def forget_old(logs: str, newest: int) -> None:
    for name in os.listdir(logs):
        if name.isdecimal() and int(name) <= newest - ATTEMPTS_KEPT:
            directory = os.path.join(logs, name)
            with contextlib.suppress(OSError):  # one with other files in it stays
                for file in os.listdir(directory):
                    if file.endswith(".log"):
                        os.unlink(os.path.join(directory, file))
                os.rmdir(directory)


class Keeper(threading.Thread):
    """Writes the log, once the attempt has begun. What finds no room, in the queue or on the disk, is left out and counted."""

    def __init__(self, order: Order) -> None:
        super().__init__(name="keeper", daemon=True)
        self._order = order
        self._first = f"{BEGINNING}{order.rank} of {order.ranks} on {order.host}, process {order.pid}, {clock()}\n"
        self._looked: object = None
        self._queue: deque[bytes] = deque()
        self._news, self._waiting, self._heard = threading.Condition(), 0, 0  # bytes
        self._left_out, self._unwritten = 0, 0  # bytes: for which there was no room in the queue, and on the disk
        self._again, self._warned, self._closed = 0.0, False, False
        self.forget, self.over = threading.Event(), threading.Event()
        self.start()

    def put(self, data: bytes) -> None:
        with self._news:
            if self._waiting + len(data) > _QUEUE:
                self._left_out += len(data)
            elif data and not self._closed:
                self._waiting += len(data)
                self._queue.append(data)
                self._news.notify_all()

    def end(self) -> None:
        """The rank has ended, and will not begin any more."""
        with self._news:
            self.over.set()
            self._news.notify_all()

    def flush(self, within_s: float) -> None:
        with self._news:
            self._news.wait_for(lambda: not self._waiting, within_s)

    def run(self) -> None:
        attempt = self._number()
        if attempt is None:
            with self._news:
                self._closed, self._waiting = True, 0
                self._news.notify_all()
            return
        log = self._write(None, attempt, b"")
        while True:
            with self._news:
                self._news.wait_for(lambda: self._queue)
                data = b"".join(self._queue)
                self._queue.clear()
                if self._left_out:
                    data, self._left_out = data + _gap(self._left_out), 0
            log = self._write(log, attempt, data)
            with self._news:
                self._waiting = sum(map(len, self._queue))
                self._news.notify_all()

    def _number(self) -> int | None:
        """Of this attempt, once it has begun. One that ends before counts as the next, unless it was refused."""
        every_s = min(15.0, max(1.0, self._order.ranks / 64))  # a shared file system has to bear all ranks
        while not self.over.wait(_LOOK_S):
            with self._news:  # what it says may be that it has begun
                self._news.wait_for(lambda: self._waiting > self._heard or self.over.is_set(), every_s)
                self._heard = self._waiting
            if (number := self._began()) is not None:
                return number
        if (number := self._began(look_closely=True)) is not None:
            return number
        kept = os.path.isdir(self._order.run) and not self.forget.is_set()
        return Begun.of(self._order.run).number + 1 if kept else None

    def _began(self, *, look_closely: bool = False) -> int | None:
        stamp = self._stamp()
        if stamp == self._looked and not look_closely:
            return None
        self._looked, now = stamp, Begun.of(self._order.run)
        return now.number if now.number and now != Begun(*self._order.before) else None

    def _stamp(self) -> object:
        try:
            found = os.stat(os.path.join(self._order.run, "events.jsonl"))
        except OSError:
            return None
        return found.st_ino, found.st_size, found.st_mtime_ns

    def _write(self, log: Log | None, attempt: int, data: bytes) -> Log | None:
        if time.monotonic() < self._again and not self.over.is_set():
            self._unwritten += len(data)
            return log
        try:
            if log is None:
                log = Log(self._order, attempt)
                if self._order.rank == 0:
                    forget_old(os.path.join(self._order.run, "logs"), attempt)
            if self._first:
                log.write(self._first.encode())
                self._first = ""
            if self._unwritten:
                log.write(_gap(self._unwritten))
                self._unwritten = 0
            log.write(data)
        except OSError as error:
            self._unwritten += len(data)
            self._again = time.monotonic() + _AGAIN_S
            self._warn(error)
        return log

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            text = f"warning: the log of rank {self._order.rank} cannot be kept ({error}); the run goes on without it\n"
            send(self._order.warnings, text.encode())


def _gap(size: int) -> bytes:
    return f"{MARK}{size} bytes are left out here: they could not be written in time\n".encode()


def send(fd: int, data: bytes) -> bool:
    """In whole lines, as far as can be: other ranks may write there too. Returns whether there is still somebody to send to."""
    while data:
        end = len(data) if len(data) <= _ATOMIC else data.rfind(b"\n", 0, _ATOMIC) + 1 or _ATOMIC
        try:
            data = data[os.write(fd, data[:end]) :]
        except BlockingIOError:  # whoever gave it to us does not want to wait
            select.select([], [fd], [])
        except OSError as error:
            return error.errno not in _NOBODY_READS
    return True


def receive(source: int) -> bytes:
    """Nothing where there is nobody left to write."""
    try:
        return os.read(source, PIPE_BYTES)
    except OSError:  # how a terminal ends
        return b""


class Relay:
    def __init__(self, order: Order) -> None:
        self._order, self._keeper = order, Keeper(order)
        self._addressees: dict[int, int | None] = dict(order.channels)
        self._lines = {source: Lines() for source in self._addressees}
        self._by_itself = False
        signal.signal(signal.SIGWINCH, lambda number, frame: self._fit_windows())
        self._fit_windows()

    def run(self) -> None:
        """Until the rank has ended, and whatever it started that may speak for it."""
        rank_is_there = True
        while self._lines or rank_is_there:
            ready = select.select([*self._lines, *([0] if rank_is_there else [])], [], [])[0]
            for source in ready:
                if source != 0:
                    self._pass_on(source)
            if 0 in ready:
                rank_is_there = self._listen()
        for fd in {2, self._order.warnings, *(addressee for _, addressee in self._order.channels)}:
            os.close(fd)  # whoever reads there has it all, and need not wait for the log
        self._keeper.flush(_LAST_FLUSH_S)

    def _pass_on(self, source: int) -> None:
        data = receive(source)
        if not data:
            self._keeper.put(self._lines.pop(source).end())
            os.close(source)
            return
        addressee = self._addressees[source]
        if addressee is not None and not send(addressee, data):
            self._addressees[source] = None  # the reader left, as `head` does
        self._keeper.put(self._lines[source].feed(data))

    def _listen(self) -> bool:
        """To the rank itself; its silence is its end."""
        told = os.read(0, 16)
        if FORGET in told:
            self._keeper.forget.set()
        self._by_itself |= FAREWELL in told
        if told:
            return True
        self._keeper.end()
        while self._lines and (ready := select.select([*self._lines], [], [], 0)[0]):
            for source in ready:
                self._pass_on(source)
        for lines in self._lines.values():
            self._keeper.put(lines.end())
        for path in self._order.last_words:
            self._keeper.put(_read(path))
        how = "ended by itself" if self._by_itself else "was ended, or crashed"
        self._keeper.put(f"{ENDING}{how}, {clock()}\n".encode())
        self._keeper.flush(_FLUSH_S)
        os.close(1)  # which tells a rank that waits for it
        return False

    def _fit_windows(self) -> None:
        for source, addressee in self._addressees.items():
            if addressee is not None and source in self._lines:
                with contextlib.suppress(OSError):  # most are no terminals
                    size = fcntl.ioctl(addressee, termios.TIOCGWINSZ, bytes(8))
                    fcntl.ioctl(source, termios.TIOCSWINSZ, size)


def _read(path: str) -> bytes:
    """The reason a rank has left; its stacks, where it did not leave them because it was asked."""
    try:
        with open(path, "rb") as file:
            said = file.read(_QUEUE // 4)
    except OSError:
        return b""
    asked = path.endswith(".stacks") and b"Fatal Python error" not in said
    return b"" if asked or not said else said.rstrip(b"\n") + b"\n"


def clock() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())


def main() -> None:
    """ORDER as JSON: until standard input, which the rank holds open, and all channels have ended."""
    for number in _NOT_FOR_US:
        signal.signal(number, signal.SIG_IGN)
    words: dict[str, Any] = json.loads(sys.argv[1])
    Relay(Order(**words)).run()


if __name__ == "__main__":
    main()
