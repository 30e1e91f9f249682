"""The retry policy: pauses grow, servers' wishes are kept to, attempts and time are bounded, and nothing else is swallowed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from argosy.retry import Clock, GaveUp, RetryPolicy, Transient, retry_after_s


class FakeTime:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now, self.slept = 0.0, list[float]()
        self.interrupted = False
        self.clock = Clock(lambda: self.now, self.sleep)

    def sleep(self, seconds: float) -> bool:
        self.slept.append(seconds)
        self.now += seconds
        return self.interrupted


def failing(times: int, *failures: Transient) -> Callable[[], str]:
    """An operation that fails so many times, with these failures in turn."""
    left = [*failures, *[Transient("down")] * (times - len(failures))]

    def attempt() -> str:
        if left:
            raise left.pop(0)
        return "done"

    return attempt


def test_pauses_double_up_to_the_cap_and_the_result_is_returned() -> None:
    time = FakeTime()
    policy = RetryPolicy(attempts=None, base_s=1.0, cap_s=5.0, clock=time.clock)
    assert policy.call(failing(5)) == "done"
    assert time.slept == [1.0, 2.0, 4.0, 5.0, 5.0]
    assert policy.pause_s(10_000) == 5.0


def test_jitter_is_the_random_share_of_a_pause() -> None:
    policy = RetryPolicy(base_s=8.0, cap_s=8.0, jitter=0.5)
    pauses = [policy.pause_s(1) for _ in range(200)]
    assert min(pauses) >= 4.0
    assert max(pauses) <= 8.0
    assert max(pauses) - min(pauses) > 2.0


def test_the_server_is_never_asked_sooner_than_it_wished() -> None:
    time = FakeTime()
    policy = RetryPolicy(base_s=0.1, clock=time.clock)
    policy.call(failing(1, Transient("busy", retry_after_s=30.0)))
    assert time.slept == [30.0]
    spread = [replace(policy, jitter=0.5).pause_s(1, 30.0) for _ in range(50)]
    assert 30.0 <= min(spread) <= max(spread) <= 30.1


def test_a_wish_that_is_too_long_is_given_up_at_once() -> None:
    time = FakeTime()
    policy = RetryPolicy(longest_retry_after_s=3600.0, clock=time.clock)
    with pytest.raises(GaveUp, match="busy"):
        policy.call(failing(1, Transient("busy", retry_after_s=7200.0)))
    assert time.slept == []


def test_attempts_are_counted_in_a_row_and_progress_starts_anew() -> None:
    time = FakeTime()
    policy = RetryPolicy(attempts=3, base_s=1.0, clock=time.clock)
    with pytest.raises(GaveUp) as over:
        policy.call(failing(9))
    assert (over.value.attempts, time.slept) == (3, [1.0, 2.0])
    gained = [Transient("cut off", progressed=True) for _ in range(6)]
    assert policy.call(failing(6, *gained)) == "done"


def test_the_budget_bounds_attempts_and_pauses_together() -> None:
    time = FakeTime()
    policy = RetryPolicy(attempts=None, base_s=1.0, cap_s=100.0, budget_s=10.0, clock=time.clock)
    with pytest.raises(GaveUp) as over:
        policy.call(failing(9))
    assert time.slept == [1.0, 2.0, 4.0], "a pause of 8 s more would end after 15 s"
    assert (over.value.attempts, over.value.elapsed_s) == (4, 7.0)


def test_an_interrupted_wait_ends_the_attempts() -> None:
    time = FakeTime()
    time.interrupted = True
    with pytest.raises(GaveUp):
        RetryPolicy(clock=time.clock).call(failing(9))
    assert len(time.slept) == 1


def test_any_other_exception_is_not_retried() -> None:
    calls = []

    def attempt() -> None:
        calls.append(1)
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        RetryPolicy(clock=FakeTime().clock).call(attempt)
    assert len(calls) == 1


def test_each_retry_is_announced_with_its_pause() -> None:
    told: list[tuple[str, int, float]] = []
    policy = RetryPolicy(base_s=1.0, clock=FakeTime().clock)
    policy.call(failing(2), lambda failure, failures, pause: told.append((str(failure), failures, pause)))
    assert told == [("down", 1, 1.0), ("down", 2, 2.0)]


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"Retry-After": "17"}, 17.0),
        ({"retry-after": " 0 "}, 0.0),
        ({"Retry-After": "Mon, 01 Jan 2024 00:01:00 GMT", "Date": "Mon, 01 Jan 2024 00:00:00 GMT"}, 60.0),
        ({"Retry-After": "Mon, 01 Jan 2024 00:00:00 GMT"}, 0.0),
        ({"RateLimit": '"api";r=0;t=55'}, 55.0),
        ({"Retry-After": "soon"}, None),
        ({}, None),
    ],
)
def test_the_wish_of_a_server_is_read_in_every_form(headers: dict[str, str], seconds: float | None) -> None:
    assert retry_after_s(headers) == seconds
