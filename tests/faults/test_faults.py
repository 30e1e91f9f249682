"""Every fault that a CPU can show, injected for real, with what is expected of it. The list at the end is the bench.

`make faults` runs all of them and prints what each cost; `make test` runs those that are not `slow`.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from argosy.errors import EXIT_BUG
from faults.bench import Bench, Outcome


def rank_killed(bench: Bench) -> Outcome:
    """SIGKILL to one rank: noticed at once, all are started again, nothing differs in the end."""
    with bench.run("rank-killed") as run:
        run.wait_step(13)
        step, at = run.newest(), run.signal(signal.SIGKILL, rank=1)
        assert run.wait() == 0, run.said
        (died,) = run.events("rank-died")
        assert died["rank"] == 1
        assert "SIGKILL" in died["cause"]
        assert run.result() == bench.undisturbed()
        return run.cost(at, step, "rank-died")


def rank_stopped(bench: Bench) -> Outcome:
    """SIGSTOP: named with its stack, which is saved before anything is ended."""
    with bench.run("rank-stopped") as run:
        run.wait_step(13)
        step, at = run.newest(), run.signal(signal.SIGSTOP, rank=1)
        assert run.wait() == 0, run.said
        (stall,) = run.events("stall")
        assert (stall["rank"], stall["seconds"] >= 3) == (1, True)
        assert "stopped" in stall["cause"]
        assert any("take_step" in line for line in stall["stack"])
        saved = {file.name for file in (run.root / stall["debug"]).iterdir()}
        assert saved == {
            "verdict.json",
            *(f"rank-{rank}.{kind}" for rank in (0, 1) for kind in ("stacks", "flight.json")),
        }
        assert run.result() == bench.undisturbed()
        return run.cost(at, step, "stall")


def same_step(bench: Bench) -> Outcome:
    """The same exception at the same step, again and again: the reason is told once, and it is not tried for ever."""
    with bench.run("same-step", env={"ARGOSY_FAULT": "raise:1:11:always"}) as run:
        assert run.wait() == EXIT_BUG
        assert len(run.events("rank-died")) == 3
        assert run.events("gave-up")[0]["step"] == 11
        assert run.said.count("Traceback") == 1
        assert "planted: the step failed" in run.said
        assert "rank 1" in run.said
        assert "step 11 has ended it 3 times" in run.said
        return Outcome("stopped with a diagnosis after 3 of the same", steps_lost=0)


Fault = Callable[[Bench], Outcome]
FAULTS: dict[str, Fault] = {
    "2 SIGKILL to one rank": rank_killed,
    "3 SIGSTOP to one rank": rank_stopped,
    "15 the same crash at one step": same_step,
}
SHORT = {"2 SIGKILL to one rank", "15 the same crash at one step"}


@pytest.mark.parametrize("name", [n if n in SHORT else pytest.param(n, marks=pytest.mark.slow) for n in FAULTS])
def test_fault(bench: Bench, name: str) -> None:
    bench.record(name, FAULTS[name](bench))
