"""Repeat a data job after a failure of the file system that may pass.

A network file system may fail for a moment: a lock server is out of locks, a handle is stale, a server restarts. A job keeps its finished
parts, so the whole job is repeated and goes on where it stopped. If the failure lasts, the error ends the command with the exit code of
work that can be resumed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from argosy.errors import EXIT_RESUMABLE, ArgosyError
from argosy.files import may_pass, write_fix
from argosy.retry import GaveUp, RetryPolicy, Transient

Result = TypeVar("Result")
RETRY = RetryPolicy(attempts=4, base_s=2.0, cap_s=30.0, jitter=0.5)
_log = logging.getLogger(__name__)


def cannot_write(output: Path, error: OSError) -> ArgosyError:
    """Return a `data.write-failed` error, or `data.interrupted` if the failure may pass."""
    passing = may_pass(error)
    fix = "free some space or choose another --output, then run it again: finished parts are kept"
    if passing:
        fix = "run the same command again: finished parts are kept; if it fails again, look at the kernel log (dmesg) and the file server"
    return ArgosyError(
        "data.interrupted" if passing else "data.write-failed",
        f"{output}: {error.strerror or error}",
        key="--output",
        value=str(output),
        fix=write_fix(error, fix),
    )


def resumed(job: Callable[[], Result]) -> Result:
    """Run a job that goes on where it stopped, a few times if the file system fails in a way that may pass."""

    def attempt() -> Result:
        try:
            return job()
        except ArgosyError as error:
            if error.exit_code != EXIT_RESUMABLE:
                raise
            raise Transient(error.cause) from error

    def tell(failure: Transient, failures: int, pause_s: float) -> None:
        _log.warning("%s; going on in %.0f s (failure %d of %d)", failure, pause_s, failures, RETRY.attempts)

    try:
        return RETRY.call(attempt, tell)
    except GaveUp as over:
        raise over.last.__cause__ or over from None
