"""Commands as children of this process, forked from one that has imported Argosy and torch once.

Starting Python and importing torch takes 2 to 3 s of a core, and most commands that tests run take less than that. A fork server
imports them once. `Popen` and `run` are those of `subprocess` for `python -m argosy ...`, and `Popen` also for `python FILE ...` and
`python -c CODE ...`: the process has its own pid, and is a child of the caller that is signalled and waited for like any other, but
nothing was computed before it was forked. A command that starts others (`--nproc`, `demo`, `launch`, `doctor`) forks them from a
server of its own.

A test that cares about the interpreter's own start (locale, libraries loaded with it, variables that libraries read when they are
loaded, imports) starts a process with `subprocess`.
"""

from __future__ import annotations

import array
import atexit
import ctypes
import functools
import gc
import importlib
import importlib.util
import json
import os
import pkgutil
import runpy
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

ARGOSY = [sys.executable, "-m", "argosy"]
LONGEST_REQUEST = 1 << 20
_PADDING = 4096  # bytes of the server's command line, which its children overwrite with theirs
_PR_SET_CHILD_SUBREAPER = 36


class ForkServer:
    """Forks commands off a process that has imported what they need; started with the first of them."""

    def __init__(self, connection: socket.socket | None = None) -> None:
        self._socket = connection
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def fork(self, words: list[str], descriptors: list[int], **request: Any) -> int:
        """Returns the pid of a new child of this process, which runs `python WORDS`.

        The server forks twice. The process between ends at once, and the child passes to its nearest ancestor that asks for
        orphans, which is this process for as long as it takes.
        """
        message = json.dumps({"words": words, **request}).encode()
        with self._lock:
            server = self._started()
            _adopt_orphans(True)
            try:
                socket.send_fds(server, [message], descriptors)
                return int(server.recv(64))
            finally:
                _adopt_orphans(False)

    def _started(self) -> socket.socket:
        if self._socket is None:
            self._socket, theirs = _socket_pair()
            command = [sys.executable, __file__, str(theirs.fileno()), " " * _PADDING]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
            theirs.close()
        return self._socket

    def close(self) -> None:
        if self._socket is not None and self._process is not None:
            self._socket.close()
            self._process.wait(240)
        self._socket = self._process = None


_server = ForkServer()
atexit.register(_server.close)
_execute_child = subprocess.Popen._execute_child  # type: ignore[attr-defined]


class Popen(subprocess.Popen[Any]):
    """subprocess.Popen of `python ...`, forked. The caller's environment and directory are the default, as there."""

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any, env: Any, *more: Any) -> None:  # fmt: skip
        # The rest, in order: startupinfo, creationflags, shell, six ends of pipes, restore_signals, gid, gids, uid, umask,
        # start_new_session, process_group.
        ends, new_session = more[3:9], bool(more[14])
        assert args[0] == sys.executable
        assert preexec_fn is None
        assert not pass_fds
        theirs = [end if end >= 0 else number for number, end in enumerate((ends[0], ends[3], ends[5]))]
        sys.stdout.flush()
        self.pid = _server.fork(
            [str(word) for word in args[1:]], theirs, new_session=new_session,
            cwd=os.fspath(cwd or Path.cwd()), environ=dict(os.environ if env is None else env),
        )  # fmt: skip
        self._child_created = True
        self._close_pipe_fds(*ends)


def run(words: list[str], timeout: float = 240, **options: Any) -> subprocess.CompletedProcess[str]:
    """subprocess.run of `argosy WORDS` with captured text."""
    given = options.pop("input", None)
    streams = {
        "stdin": subprocess.DEVNULL if given is None else subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
    }
    with Popen([*ARGOSY, *words], text=True, **streams | options) as process:
        try:
            out, err = process.communicate(given, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(["argosy", *words], process.returncode, out, err)


@contextmanager
def command(directory: Path) -> Iterator[Path]:
    """An executable `argosy` in a directory, for shell scripts: it hands its streams, directory and environment over, and ends as
    the command that is forked for it does. Signals to it are not passed on."""
    with tempfile.TemporaryDirectory() as place, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"{place}/socket")
        listener.listen()
        threading.Thread(target=_take_orders, args=(listener,), daemon=True).start()
        (Path(place) / "client.py").write_text(_CLIENT)
        path = directory / "argosy"
        path.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {place}/client.py {place}/socket "$@"\n')
        path.chmod(0o755)
        yield path


_CLIENT = """
import json, os, socket, sys
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as order:
    order.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 21)
    order.connect(sys.argv[1])
    said = {"words": sys.argv[2:], "cwd": os.getcwd(), "env": dict(os.environ)}
    socket.send_fds(order, [json.dumps(said).encode()], [0, 1, 2])
    sys.exit(int(order.recv(64)))
"""


def _take_orders(listener: socket.socket) -> None:
    with suppress(OSError):
        while True:
            threading.Thread(target=_carry_out, args=(listener.accept()[0],), daemon=True).start()


def _carry_out(order: socket.socket) -> None:
    with order:
        said, descriptors, _, _ = socket.recv_fds(order, LONGEST_REQUEST, 3)
        asked = json.loads(said)
        streams = dict(zip(("stdin", "stdout", "stderr"), descriptors, strict=True))
        with Popen([*ARGOSY, *asked["words"]], cwd=asked["cwd"], env=asked["env"], **streams) as process:
            for descriptor in descriptors:
                os.close(descriptor)
        order.send(str(process.returncode if process.returncode >= 0 else 128 - process.returncode).encode())


def _fork_if_argosy(process: subprocess.Popen[Any], args: Any, *options: Any) -> None:
    """As Popen starts a process within a forked command: Argosy's own are forked too."""
    forks = not isinstance(args, str | bytes) and list(args[:3]) == ARGOSY and not options[3]
    (Popen._execute_child if forks else _execute_child)(process, args, *options)


def _adopt_orphans(on: bool) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0)


def _socket_pair() -> tuple[socket.socket, socket.socket]:
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in pair:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * LONGEST_REQUEST)
    return pair


def _serve(connection: socket.socket) -> None:
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, LONGEST_REQUEST, 3)
        if not message:
            os._exit(0)
        request = json.loads(message)
        told, tell = os.pipe()
        adopted, adopt = os.pipe()
        between = os.fork()
        if between == 0:
            if os.fork():
                os._exit(0)
            connection.close()
            if request["new_session"]:
                os.setsid()
            os.write(tell, str(os.getpid()).encode())
            for end in (told, tell, adopt):
                os.close(end)
            os.read(adopted, 1)  # which ends once the process between is gone and this one has its parent
            os.close(adopted)
            _become(request, descriptors)
        os.waitpid(between, 0)
        connection.send(os.read(told, 64))
        for end in (told, tell, adopted, adopt, *descriptors):
            os.close(end)


def _become(request: dict[str, Any], descriptors: array.array[int]) -> None:
    """Run the command and end, as the interpreter ends."""
    words = request["words"]
    is_argosy = words[:2] == ARGOSY[1:]
    command = words[2:] if is_argosy else []
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
    for descriptor in descriptors:
        os.close(descriptor)
    os.chdir(request["cwd"])
    if "--nproc" in command or command[:1] in (["demo"], ["launch"], ["doctor"], ["sweep"]):
        _serve_from_here()
    os.environ.clear()
    os.environ.update(request["environ"])
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w", errors="backslashreplace")
    sys.argv = ["argosy", *command] if is_argosy else words
    _show_command_line([sys.executable, *words])
    code: Any = 0
    try:
        _customize_site()
        if is_argosy:
            sys.modules["__main__"].main()
        else:
            _run_program(words)
    except SystemExit as end:
        code = end.code
    except BaseException:  # noqa: BLE001 - as the interpreter does with what nobody caught
        traceback.print_exc()
        code = 1
    with suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)


def _run_program(words: list[str]) -> None:
    """Run `-c CODE` or a file as the interpreter's main module."""
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(words[1], "<string>", "exec"), main.__dict__)  # noqa: S102 - as `python -c` does
    else:
        sys.path.insert(0, str(Path(words[0]).parent))
        runpy.run_path(words[0], run_name="__main__")


def _serve_from_here() -> None:
    """Fork a server for what this command starts, before it has computed anything."""
    global _server
    ours, theirs = _socket_pair()
    if os.fork() == 0:
        ours.close()
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(nothing, number)
        _serve(theirs)
    theirs.close()
    _server = ForkServer(ours)
    subprocess.Popen._execute_child = _fork_if_argosy  # type: ignore[attr-defined]


def _show_command_line(words: list[str]) -> None:
    """Write the command over the server's own, where tests and `ps` look for it."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    text = b"\0".join(os.fsencode(word) for word in words)[: end - start - 1]
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def _customize_site() -> None:
    """Load what PYTHONPATH has in front, as the interpreter does when it starts."""
    for folder in reversed(os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        if folder and folder not in sys.path:
            sys.path.insert(0, folder)
            if (file := Path(folder, "sitecustomize.py")).exists():
                spec = importlib.util.spec_from_file_location("sitecustomize", file)
                assert spec is not None
                assert spec.loader is not None
                spec.loader.exec_module(importlib.util.module_from_spec(spec))


def _load() -> None:
    """Import what commands import, and build the command line, so that a fork has nothing to do but its own work."""
    import typer.main

    import argosy.__main__
    import argosy.cli.app

    ours = [
        module.name for module in pkgutil.walk_packages(argosy.__path__, "argosy.") if "__main__" not in module.name
    ]
    for name in (*ours, "torch.distributed.elastic.agent.server.local_elastic_agent", "numpy.ma", "blake3"):
        importlib.import_module(name)
    typer.main.get_command = functools.cache(typer.main.get_command)
    typer.main.get_command(argosy.cli.app.app)
    sys.modules["__main__"] = argosy.__main__  # which processes that a command spawns import
    del sys.path[0]  # the tests
    gc.collect()
    gc.freeze()  # a collection in a fork neither walks what is here nor copies its pages


if __name__ == "__main__":
    _load()
    _serve(socket.socket(fileno=int(sys.argv[1])))
