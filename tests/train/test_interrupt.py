"""The first signal asks for an orderly stop, a second ends the process at once, and none matters once the last step is saved."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from argosy.train import interrupt as module
from argosy.train.interrupt import Interrupt

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class Ended(BaseException):
    """The process would have ended here."""


@pytest.fixture(autouse=True)
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def end(code: int) -> None:
        raise Ended(code)

    before = {number: signal.getsignal(number) for number in SIGNALS}
    monkeypatch.setattr(module.os, "_exit", end)
    monkeypatch.setattr(module, "_SAME_S", -1.0)  # no signal is taken for the one before it
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("first", "second"),
    [(signal.SIGTERM, signal.SIGTERM), (signal.SIGINT, signal.SIGTERM), (signal.SIGUSR1, signal.SIGINT)],
)
def test_a_second_signal_ends_the_process_at_once(first: int, second: int) -> None:
    with Interrupt(quiet=True) as interrupt:
        os.kill(os.getpid(), first)
        assert interrupt.asked == signal.Signals(first).name
        with pytest.raises(Ended) as ended:
            os.kill(os.getpid(), second)
    assert ended.value.args == (128 + second,)


@pytest.mark.parametrize(
    ("first", "second"), [(signal.SIGUSR1, signal.SIGTERM), (signal.SIGTERM, signal.SIGUSR1)], ids=["limit", "agent"]
)
def test_a_scheduler_that_asks_in_two_ways_gets_an_orderly_stop(first: int, second: int) -> None:
    with Interrupt(quiet=True) as interrupt:
        os.kill(os.getpid(), first)
        os.kill(os.getpid(), second)
        assert interrupt.asked == signal.Signals(first).name
        with pytest.raises(Ended):
            os.kill(os.getpid(), second)


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("asked", [True, False], ids=["stopped", "finished"])
def test_once_the_last_step_is_saved_no_signal_changes_the_exit_code(number: int, asked: bool) -> None:
    with Interrupt(quiet=True, hold=True) as interrupt:
        if asked:
            os.kill(os.getpid(), signal.SIGTERM)
        interrupt.settle()
        os.kill(os.getpid(), number)
    for each in SIGNALS:  # while the process leaves
        os.kill(os.getpid(), each)


def test_a_caller_that_goes_on_gets_its_handlers_back() -> None:
    heard: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    with Interrupt(quiet=True) as interrupt:
        interrupt.settle()
    os.kill(os.getpid(), signal.SIGTERM)
    assert heard == [signal.SIGTERM]
