"""The handler that shows the `argosy` logger's records on standard error: a note, a warning or an error a line.

The package is quiet when it is imported as a library (`argosy/__init__.py` adds a NullHandler). The command line, and the
processes that it starts, install this handler.
"""

from __future__ import annotations

import contextlib
import logging
import sys

_PREFIX = {logging.INFO: "note: ", logging.WARNING: "warning: "}


class StderrHandler(logging.Handler):
    """Writes to whatever `sys.stderr` is when the record is made. A closed standard error never raises into the caller."""

    def emit(self, record: logging.LogRecord) -> None:
        text = f"{_PREFIX.get(record.levelno, '')}{self.format(record)}\n"
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(text)
            sys.stderr.flush()


def install_log_handler() -> None:
    """Show records of the `argosy` logger from INFO on. A second call changes nothing."""
    logger = logging.getLogger("argosy")
    logger.setLevel(logging.INFO)
    if not has_log_handler():
        logger.addHandler(StderrHandler())


def has_log_handler() -> bool:
    """Return whether this process shows records. A process that it starts should do the same."""
    return any(isinstance(handler, StderrHandler) for handler in logging.getLogger("argosy").handlers)
