"""Tests wait until something has happened, and not for a time in which it should have: on a busy machine that is never long
enough, and on an idle one always too long."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from argosy.record.pulse import process_state

# Nothing that is waited for takes so long, however busy the machine is: two cores with 30 processes that want to run take 15 times as
# long. Shorter than pytest's own limit, which does not say what was waited for.
PATIENCE_S = 240.0


def wait_for(
    what: Callable[[], Any],
    seconds: float = PATIENCE_S,
    otherwise: Callable[[], str] | None = None,
    *,
    every_s: float = 0.02,
) -> Any:
    """The first answer of `what` that is true; `otherwise` says what is there instead, once patience ends."""
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline, otherwise() if otherwise else "what the test waits for did not come to pass"
        time.sleep(every_s)
    return found


def has_ended(pid: int) -> bool:
    """Return whether a process is gone, or is a zombie that nobody has waited for yet."""
    return (process_state(pid) or "Z")[0] == "Z"
