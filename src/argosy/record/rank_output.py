"""What this process writes to standard output and standard error, kept in the run directory as well: by Python, by C++ and CUDA, by
the processes it starts, up to its last word.

Both are led through a process of its own, `argosy.record.relay`, which passes everything on as it comes. A terminal is replaced by
another one, so that bars and colours stay; anything else by a pipe. Should the relay end before us, we write where we wrote before, and
a thread passes on what it has left behind: who is just writing is neither held up nor told of a broken pipe.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import logging
import os
import select
import subprocess
import sys
import termios
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from argosy.errors import ArgosyError
from argosy.record import relay
from argosy.record.relay import FAREWELL, FORGET, PIPE_BYTES, Begun, Order, receive, send

_FAREWELL_S = 10.0  # that our end waits for the relay's, as where a terminal is held
_log = logging.getLogger(__name__)


class Output:
    """Kept from here to the end of the process. Inside `with`, what a start says that is refused, or comes to its end, without
    having trained, is not."""

    def __init__(self, run: Path, rank: int = 0, ranks: int = 1, last_words: Sequence[Path] = ()) -> None:
        self._pid = os.getpid()
        self._before: dict[int, int] = {}  # where 1 and 2 went
        self._relay: subprocess.Popen[bytes] | None = None
        self._channels: list[tuple[int, int]] = []  # where the relay reads, and where it writes
        self._watcher: threading.Thread | None = None
        self._leaving = False
        host, root, words = os.uname().nodename, str(run.absolute()), [str(path) for path in last_words]
        try:
            self._lead(Order(rank, ranks, self._pid, host, root, Begun.of(root), [], 2, words))
        except OSError as error:
            _log.warning("no log of rank %d is kept: %s", rank, error)
            return
        atexit.register(self.close)

    def _lead(self, order: Order) -> None:
        """Both through one channel where they go to the same place: what is written first is then passed on first."""
        same: dict[tuple[int, int], list[int]] = {}
        for fd in (1, 2):
            found = os.fstat(fd)
            same.setdefault((found.st_dev, found.st_ino), []).append(fd)
        with contextlib.ExitStack() as opened, contextlib.ExitStack() as readers:
            writers: dict[int, int] = {}
            for fds in same.values():
                reader, writer = _channel(fds[0])
                readers.callback(os.close, reader)
                opened.callback(os.close, writer)
                self._before |= {fd: os.dup(fd) for fd in fds}
                writers |= dict.fromkeys(fds, writer)
                order.channels.append((reader, self._before[fds[0]]))
            order = order._replace(warnings=self._before[2])
            self._relay = subprocess.Popen(
                [sys.executable, "-I", "-S", relay.__file__, json.dumps(order._asdict())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds={fd for channel in order.channels for fd in channel} | {*self._before.values()},
            )
            self._channels = order.channels
            readers.pop_all()
            for fd, writer in writers.items():
                os.dup2(writer, fd)
        self._watcher = threading.Thread(target=self._outlive, args=(self._relay,), name="argosy-output", daemon=True)
        self._watcher.start()

    def __enter__(self) -> Output:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None or issubclass(kind, ArgosyError):
            self._tell(FORGET)

    def _tell(self, word: bytes) -> None:
        if self._relay is not None and self._relay.stdin is not None:
            with contextlib.suppress(OSError):
                os.write(self._relay.stdin.fileno(), word)

    def _restore(self) -> None:
        for fd, before in self._before.items():
            os.dup2(before, fd)

    def _outlive(self, relay: subprocess.Popen[bytes]) -> None:
        """Take the relay's place where it ends before us."""
        if relay.stdout is not None:
            os.read(relay.stdout.fileno(), 1)  # until it closes it; not by a buffer, whose lock an exit might need
        if self._leaving:
            return
        self._restore()
        send(2, b"warning: the process that keeps this rank's log has ended; the run goes on without\n")
        relay.wait()
        places = dict(self._channels)
        while places:
            for source in select.select([*places], [], [])[0]:
                if data := receive(source):
                    send(places[source], data)
                else:
                    del places[source]

    def close(self) -> None:
        """Wait until all has been passed on. What is written later than this, the relay does not see."""
        if self._relay is None or self._watcher is None or os.getpid() != self._pid:
            return
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        self._leaving = True
        self._restore()
        self._tell(FAREWELL)
        if self._relay.stdin is not None:
            self._relay.stdin.close()
        self._watcher.join(_FAREWELL_S)


def _channel(like: int) -> tuple[int, int]:
    """What is written to the second can be read from the first, byte for byte."""
    if not os.isatty(like):
        reader, writer = os.pipe()
        if sys.platform == "linux":
            with contextlib.suppress(OSError):  # there may be too many already
                fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        return reader, writer
    reader, writer = os.openpty()
    settings = termios.tcgetattr(writer)
    settings[1] &= ~termios.OPOST  # the terminal itself sees to line ends
    termios.tcsetattr(writer, termios.TCSANOW, settings)
    fcntl.ioctl(writer, termios.TIOCSWINSZ, fcntl.ioctl(like, termios.TIOCGWINSZ, bytes(8)))
    return reader, writer
