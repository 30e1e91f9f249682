"""Copying a rank's standard output and standard error into the run directory: output of Python, C++, CUDA and child processes,
up to the last byte before a kill.

Both streams go through a relay process (`argosy.record.relay`), which forwards everything at once and keeps a copy. A terminal
is replaced by a pseudo-terminal, so that progress bars and colours stay; anything else by a pipe. If the relay dies first,
this process writes to its original streams again, and a thread forwards what the relay left in the pipes, so that no writer
blocks or gets SIGPIPE.
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
from argosy.record.relay import FAREWELL, FORGET, PIPE_BYTES, RelayOptions, Starts, receive, send

# Seconds that the rank's exit waits for the relay to finish; the relay may be held up by a stopped terminal.
_RELAY_EXIT_S = 10.0
_log = logging.getLogger(__name__)


class RankOutput:
    """Redirects both streams to the relay until the process ends.

    Leaving the `with` block without an error, or with a refusal, tells the relay to discard the log if training never began.

    Args:
        last_words: files in which the rank leaves the reason of its death; the relay appends them to the log.
    """

    def __init__(self, run: Path, rank: int = 0, ranks: int = 1, last_words: Sequence[Path] = ()) -> None:
        self._pid = os.getpid()
        # Duplicates of the original file descriptors 1 and 2.
        self._before: dict[int, int] = {}
        self._relay: subprocess.Popen[bytes] | None = None
        # File descriptors (the relay reads from, the relay writes to).
        self._channels: list[tuple[int, int]] = []
        self._watcher: threading.Thread | None = None
        self._leaving = False
        host, root, words = os.uname().nodename, str(run.absolute()), [str(path) for path in last_words]
        try:
            self._redirect(RelayOptions(rank, ranks, self._pid, host, root, Starts.read(root), [], 2, words))
        except OSError as error:
            _log.warning("no log of rank %d is kept in the run directory: %s", rank, error)
            return
        atexit.register(self.close)

    def _redirect(self, options: RelayOptions) -> None:
        """Start the relay and point both streams at it. Streams with the same target share a channel, which keeps their order."""
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
                options.channels.append((reader, self._before[fds[0]]))
            options = options._replace(warnings=self._before[2])
            self._relay = subprocess.Popen(
                [sys.executable, "-I", "-S", relay.__file__, json.dumps(options._asdict())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds={fd for channel in options.channels for fd in channel} | {*self._before.values()},
            )
            self._channels = options.channels
            readers.pop_all()
            for fd, writer in writers.items():
                os.dup2(writer, fd)
        self._watcher = threading.Thread(target=self._outlive, args=(self._relay,), name="argosy-output", daemon=True)
        self._watcher.start()

    def __enter__(self) -> RankOutput:
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
        """Take over from a relay that ends before this process."""
        # Blocks until the relay closes its end. A buffered read would hold a lock that interpreter exit may need.
        if relay.stdout is not None:
            os.read(relay.stdout.fileno(), 1)
        if self._leaving:
            return
        self._restore()
        send(2, b"warning: the process that keeps this rank's log has ended; the run goes on without a log\n")
        relay.wait()
        places = dict(self._channels)
        while places:
            for source in select.select([*places], [], [])[0]:
                if data := receive(source):
                    send(places[source], data)
                else:
                    del places[source]

    def close(self) -> None:
        """Restore the original streams and wait until the relay has forwarded everything. Later output is not logged."""
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
        self._watcher.join(_RELAY_EXIT_S)


def _channel(like: int) -> tuple[int, int]:
    """Return (read end, write end): a pseudo-terminal if `like` is a terminal, else a pipe."""
    if not os.isatty(like):
        reader, writer = os.pipe()
        if sys.platform == "linux":
            # The user's limit on pipe memory may be reached.
            with contextlib.suppress(OSError):
                fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        return reader, writer
    reader, writer = os.openpty()
    settings = termios.tcgetattr(writer)
    # The real terminal translates line ends.
    settings[1] &= ~termios.OPOST
    termios.tcsetattr(writer, termios.TCSANOW, settings)
    fcntl.ioctl(writer, termios.TIOCSWINSZ, fcntl.ioctl(like, termios.TIOCGWINSZ, bytes(8)))
    return reader, writer
