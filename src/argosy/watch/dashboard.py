"""`argosy dash`: start the dashboard's server on this machine and print its link."""

from __future__ import annotations

import logging
import secrets
import socket
from pathlib import Path

from argosy.console.output import say
from argosy.errors import ArgosyError
from argosy.extras import install_extra

_log = logging.getLogger(__name__)


def serve(root: Path, *, port: int, token: str | None, copied: bool = False) -> None:
    """Serve until Ctrl-C. Port 0 takes any free port. Notes cannot be written into a copy of runs in a cluster (`copied`)."""
    try:
        import uvicorn

        from argosy.watch.server import make_app
    except ImportError:
        raise ArgosyError(
            "watch.missing-extra", "the dashboard needs starlette and uvicorn", fix=install_extra("dash")
        ) from None
    if not root.is_dir():
        raise ArgosyError(
            "run.not-found", f"{root} is not a directory", fix="name the directory your runs are in, as runs"
        )
    token = token or secrets.token_urlsafe(24)
    listener = _listen(port)
    bound = listener.getsockname()[1]
    say(
        f"runs in {'the cluster' if copied else root}: http://127.0.0.1:{bound}/?token={token}\n"
        f"Ctrl-C ends it. From another machine: ssh -L {bound}:127.0.0.1:{bound} HOST"
    )
    config = uvicorn.Config(make_app(root, token, copied=copied), log_level="warning", access_log=False)
    uvicorn.Server(config).run(sockets=[listener])
    _log.info("the dashboard is closed")


def _listen(port: int) -> socket.socket:
    # Naming TCP makes asyncio set TCP_NODELAY, so that answers are not delayed.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
    except OSError as error:
        raise ArgosyError(
            "watch.port-taken", f"port {port} of 127.0.0.1 cannot be used: {error.strerror}", key="--port", value=port,
            fix="choose another with --port, or 0 for any that is free",
        ) from None  # fmt: skip
    return listener
