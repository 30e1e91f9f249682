"""Commands in children of a process that has imported Argosy and torch once.

Starting Python and importing torch takes 2 to 3 s, and most commands that tests run take less than that. The server forks for each
command: the child has its own standard streams, directory and exit code, and nothing computed before it was forked. A test that
cares about the interpreter's own start (environment, encodings, signals, imports) starts a process of its own.
"""

from __future__ import annotations

import array
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

LONGEST_REQUEST = 1 << 20


class ForkServer:
    """Started with the first command; one command at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def run(self, arguments: Sequence[str], cwd: Path, timeout: float) -> subprocess.CompletedProcess[str]:
        """As subprocess.run with captured text, for `python -m argosy ARGUMENTS`."""
        server = self._started()
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, open(os.devnull, "rb") as nothing:
            request = json.dumps({"arguments": list(arguments), "cwd": str(cwd), "environ": dict(os.environ)})
            socket.send_fds(server, [request.encode()], [nothing.fileno(), out.fileno(), err.fileno()])
            pid = int(server.recv(64))
            server.settimeout(timeout)
            try:
                code = int(server.recv(64))
            except TimeoutError:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                self.close()
                raise subprocess.TimeoutExpired(["argosy", *arguments], timeout) from None
            finally:
                server.settimeout(None)
            texts = []
            for stream in (out, err):
                stream.seek(0)
                texts.append(stream.read().decode())
        return subprocess.CompletedProcess(["argosy", *arguments], code, *texts)

    def _started(self) -> socket.socket:
        if self._socket is None:
            self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            for end in (self._socket, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * LONGEST_REQUEST)
            command = [sys.executable, __file__, str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
            theirs.close()
        return self._socket

    def close(self) -> None:
        if self._socket is not None and self._process is not None:
            self._socket.close()
            self._process.wait(30)
        self._socket = self._process = None


def _serve(connection: socket.socket) -> None:
    import argosy.__main__
    import argosy.cli.app
    import argosy.train.run

    sys.modules["__main__"] = argosy.__main__  # which processes that a command spawns import
    while True:
        request, descriptors, _, _ = socket.recv_fds(connection, LONGEST_REQUEST, 3)
        if not request:
            return
        pid = os.fork()
        if pid == 0:
            connection.close()
            _become(json.loads(request), descriptors)
        connection.send(str(pid).encode())
        for descriptor in descriptors:
            os.close(descriptor)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        connection.send(str(code).encode())


def _become(request: dict[str, Any], descriptors: array.array[int]) -> None:
    """Run the command and end, as the interpreter ends."""
    import atexit
    import threading
    import traceback

    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environ"])
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")
    sys.argv = ["argosy", *request["arguments"]]
    code: Any = 0
    try:
        sys.modules["__main__"].main()
    except SystemExit as end:
        code = end.code
    except BaseException:  # noqa: BLE001 - as the interpreter does with what nobody caught
        traceback.print_exc()
        code = 1
    with suppress(BaseException):
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
