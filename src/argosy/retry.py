"""The retry policy of all requests to servers: exponential back-off with jitter, Retry-After, a limit of attempts, a time budget.

An attempt that fails in a transient way raises `Transient`; any other exception ends the attempts at once. Polling loops have no
failures to count and are not retries.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TypeVar

Result = TypeVar("Result")

# Request Timeout, Too Early, Too Many Requests, and all server errors.
TRANSIENT_STATUSES = frozenset({408, 425, 429, *range(500, 600)})


class Transient(Exception):
    """A transient failure. `retry_after_s` is the wait the server asked for; `progressed` resets the count of failures in a row."""

    def __init__(self, reason: str, *, retry_after_s: float | None = None, progressed: bool = False) -> None:
        super().__init__(reason)
        self.retry_after_s, self.progressed = retry_after_s, progressed


class GaveUp(Exception):
    """The failure after the attempts or the budget are used up, or the wait was interrupted."""

    def __init__(self, last: Transient, attempts: int, elapsed_s: float) -> None:
        super().__init__(str(last))
        self.last, self.attempts, self.elapsed_s = last, attempts, elapsed_s


@dataclass(frozen=True)
class Clock:
    """The clock that a policy reads and sleeps by. `sleep` returns true if it was interrupted, as `threading.Event.wait` does."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], bool | None] = time.sleep


@dataclass(frozen=True)
class RetryPolicy:
    """The policy for repeating a failing operation: how often, and for how long.

    `attempts` is the limit of failures in a row; None means no limit. The pause doubles from `base_s` up to `cap_s`. `jitter` is the
    random share of the pause, so that many clients do not come back together. `budget_s` limits the time of attempts and pauses
    together. `longest_retry_after_s` is the longest wait a server may ask for. `statuses` are the HTTP statuses to retry.
    """

    attempts: int | None = 8
    base_s: float = 0.5
    cap_s: float = 20.0
    jitter: float = 0.0
    budget_s: float | None = None
    longest_retry_after_s: float | None = None
    statuses: frozenset[int] = TRANSIENT_STATUSES
    clock: Clock = field(default_factory=Clock)

    def pause_s(self, failures: int, retry_after_s: float | None = None) -> float:
        """Return the seconds to wait after `failures` failures in a row, never less than the server asked for."""
        # 2**1024 overflows a float, and any cap is reached long before.
        backoff = min(self.cap_s, self.base_s * 2.0 ** min(failures - 1, 64))
        if retry_after_s is not None:
            return retry_after_s + min(1.0, backoff) * random.uniform(0.0, self.jitter)
        return backoff * random.uniform(1.0 - self.jitter, 1.0)

    def call(
        self, attempt: Callable[[], Result], on_retry: Callable[[Transient, int, float], None] | None = None
    ) -> Result:
        """Call `attempt` until it no longer raises `Transient`, and return its result.

        Args:
            on_retry: called before each pause with the failure, the number of failures in a row, and the pause in seconds.

        Raises:
            GaveUp: no attempt is left; its cause is the last failure.
        """
        began, total, in_a_row = self.clock.now(), 0, 0
        while True:
            try:
                return attempt()
            except Transient as failure:
                last = failure
            total += 1
            in_a_row = 1 if last.progressed else in_a_row + 1
            pause = self.pause_s(in_a_row, last.retry_after_s)
            over = GaveUp(last, total, self.clock.now() - began)
            if self._is_over(in_a_row, over.elapsed_s + pause, last):
                raise over from last
            if on_retry is not None:
                on_retry(last, in_a_row, pause)
            if self.clock.sleep(pause):
                raise over from last

    def _is_over(self, failures: int, needed_s: float, last: Transient) -> bool:
        if self.attempts is not None and failures >= self.attempts:
            return True
        if self.budget_s is not None and needed_s > self.budget_s:
            return True
        return self.longest_retry_after_s is not None and (last.retry_after_s or 0.0) > self.longest_retry_after_s


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Return the seconds a response asks to wait: `Retry-After` as a number or a date, or the reset of `RateLimit: "api";r=0;t=55`.

    A date is compared with the server's own clock if the response has a `Date`. None: the response does not ask for a wait.
    """
    given = {str(name).lower(): str(value).strip() for name, value in headers.items()}
    asked = given.get("retry-after", "")
    if re.fullmatch(r"[0-9]{1,9}", asked):
        return float(asked)
    if until := _date(asked):
        return max(0.0, (until - (_date(given.get("date", "")) or datetime.now(UTC))).total_seconds())
    reset = re.search(r";\s*t\s*=\s*([0-9]{1,9})", given.get("ratelimit", ""))
    return float(reset[1]) if reset else None


def _date(text: str) -> datetime | None:
    try:
        moment = parsedate_to_datetime(text)
    except (TypeError, ValueError):
        return None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
