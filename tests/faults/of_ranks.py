"""Faults of ranks: killed, stopped, hanging, raising, in different collectives."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from argosy.errors import EXIT_BUG, EXIT_RESUMABLE
from faults.bench import SAVED_EVERY, SOON, Bench, Outcome
from waiting import has_ended


def preempted(bench: Bench) -> Outcome:
    """SIGTERM to the launcher: the step is finished and saved, and the same command resumes after it."""
    with bench.run("preempted") as run:
        run.wait_step(13)
        at = run.signal(signal.SIGTERM)
        assert run.wait() == EXIT_RESUMABLE, run.said
        stopped = time.time() - at
        step = run.newest()
        assert run.events("save")[-1]["step"] == step
        run.start("--nproc", "2")
        assert run.wait() == 0, run.said
        assert run.events("resume")[-1]["step"] == step
        assert run.result() == bench.undisturbed()
        return Outcome("exit 75, then bit-equal", detected_s=stopped, steps_lost=0)


def preempted_twice(bench: Bench) -> Outcome:
    """A second signal ends the run at once. The last checkpoint stays."""
    with bench.run("preempted-twice", env={"ARGOSY_FAULT": "sleep:1:13"}, fault={"stall_after": "10min"}) as run:
        run.wait_step(12)
        at = run.signal(signal.SIGTERM)
        time.sleep(0.5)
        run.signal(signal.SIGTERM)
        assert run.wait() == 128 + signal.SIGTERM, run.said
        return Outcome("ended at once, 143", detected_s=time.time() - at, steps_lost=run.newest() - SAVED_EVERY)


def preempted_between(bench: Bench) -> Outcome:
    """A signal while the supervisor waits before a restart: no rank has a step to finish, and it exits at once."""
    with bench.run("preempted-between", env={"ARGOSY_FAULT": "raise:1:13"}, fault={"backoff": "10min"}) as run:
        run.wait_event("restart")
        at = run.signal(signal.SIGTERM)
        assert run.wait() == EXIT_RESUMABLE, run.said
        stopped = time.time() - at
        run.start("--nproc", "2")
        assert run.wait() == 0, run.said
        assert run.result() == bench.undisturbed()
        return Outcome("exit 75, then bit-equal", detected_s=stopped, steps_lost=12 - SAVED_EVERY)


def rank_killed(bench: Bench) -> Outcome:
    """SIGKILL to one rank: detected at once, all ranks are restarted, and the result is the same."""
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
    """SIGSTOP: the rank is named with its stack, which is saved before any process is killed."""
    with bench.run("rank-stopped", fault=SOON) as run:
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


def gil_held(bench: Bench) -> Outcome:
    """A native call that never returns and never releases the GIL: no thread of that rank can answer."""
    with bench.run("gil-held", env={"ARGOSY_FAULT": "gil:1:13"}, fault=SOON) as run:
        run.wait_step(12)
        at = time.time()
        assert run.wait() == 0, run.said
        (stall,) = run.events("stall")
        assert stall["rank"] == 1
        assert "interpreter's lock" in stall["cause"]
        assert any("_hold_the_gil" in line for line in stall["stack"])
        assert run.result() == bench.undisturbed()
        return run.cost(at, 12, "stall")


def one_rank_waits(bench: Bench) -> Outcome:
    """One rank waits for something, and the others wait for it in a collective. The first is named."""
    with bench.run("one-rank-waits", env={"ARGOSY_FAULT": "sleep:1:13"}, fault=SOON) as run:
        run.wait_step(12)
        at = time.time()
        assert run.wait() == 0, run.said
        (stall,) = run.events("stall")
        assert stall["rank"] == 1
        assert "rank 0 waits in all_reduce" in stall["cause"]
        assert any("_sleep" in line for line in stall["stack"])
        assert run.result() == bench.undisturbed()
        return run.cost(at, 12, "stall")


def exception(bench: Bench) -> Outcome:
    """One rank raises: its traceback is shown once with its rank, and not those of the ranks that failed after it."""
    with bench.run("exception", env={"ARGOSY_FAULT": "raise:1:13"}) as run:
        run.wait_step(12)
        at = time.time()
        assert run.wait() == 0, run.said
        (died,) = run.events("rank-died")
        assert (died["rank"], died["step"], died["cause"]) == (1, 13, "RuntimeError: planted: the step failed")
        assert run.said.count("Traceback") == 1
        assert "rank 1: Traceback" in run.said
        assert run.result() == bench.undisturbed()
        return run.cost(at, 12, "rank-died")


def device_out_of_memory(bench: Bench) -> Outcome:
    """One rank asks its device for more memory than there is: its error is shown, and all ranks go on from the last checkpoint."""
    with bench.run("device-memory", env={"ARGOSY_FAULT": "out-of-memory:1:13"}) as run:
        run.wait_step(12)
        at = time.time()
        assert run.wait() == 0, run.said
        (died,) = run.events("rank-died")
        assert (died["rank"], died["step"]) == (1, 13)
        assert "memory" in died["cause"], died["cause"]
        assert run.result() == bench.undisturbed()
        return run.cost(at, 12, "rank-died")


def collective_timeout(bench: Bench) -> Outcome:
    """A rank gives up a collective that another one never begins. The other one is named, with its stack."""
    planted = {"ARGOSY_FAULT": "sleep:1:13", "ARGOSY_TIMEOUT_S": "12"}
    with bench.run("timeout", env=planted) as run:
        run.wait_step(12)
        at = time.time()
        assert run.wait() == 0, run.said
        (died,) = run.events("rank-died")
        assert died["rank"] == 1, died
        assert "rank 0 waited for it in a collective" in died["cause"], died
        assert any("_sleep" in line for line in died["stack"]), died
        assert run.result() == bench.undisturbed()
        return run.cost(at, 12, "rank-died")


def crash(bench: Bench) -> Outcome:
    """A segmentation fault leaves the Python stack it happened in."""
    with bench.run("crash", env={"ARGOSY_FAULT": "segfault:1:13"}) as run:
        run.wait_step(12)
        at = time.time()
        assert run.wait() == 0, run.said
        (died,) = run.events("rank-died")
        assert (died["rank"], died["step"]) == (1, 13)
        assert "SIGSEGV" in died["cause"]
        assert any("_segfault" in line for line in died["stack"])
        assert run.result() == bench.undisturbed()
        return run.cost(at, 12, "rank-died")


def mismatch(bench: Bench) -> Outcome:
    """One rank leaves out a collective: reported as a mismatch, not as a slow rank."""
    with bench.run("mismatch", env={"ARGOSY_FAULT": "skip-collective:1:13"}, fault=SOON) as run:
        run.wait_step(12)
        at = time.time()
        assert run.wait() == 0, run.said
        trouble = run.events("stall", "rank-died")[0]
        assert "the ranks did not run the same code" in trouble["cause"], trouble
        assert run.result() == bench.undisturbed()
        return run.cost(at, 12, trouble["event"])


def same_step(bench: Bench) -> Outcome:
    """The same exception at the same step: the reason is shown once, and restarts end."""
    with bench.run("same-step", env={"ARGOSY_FAULT": "raise:1:11:always"}, fault={"same_step": 2}) as run:
        assert run.wait() == EXIT_BUG
        assert len(run.events("rank-died")) == 2
        assert run.events("gave-up")[0]["step"] == 11
        assert run.said.count("Traceback") == 1
        assert "rank 1: Traceback" in run.said
        assert "step 11 has ended it 2 times" in run.said
        return Outcome("stopped with a diagnosis", steps_lost=run.newest() - SAVED_EVERY)


def supervisor_killed(bench: Bench) -> Outcome:
    """SIGKILL to the launcher: the ranks die with it, and the next start finds nothing in its way."""
    with bench.run("supervisor-killed") as run:
        run.wait_step(13)
        ranks = [run.pid(rank) for rank in (0, 1)]
        at = run.signal(signal.SIGKILL)
        run.wait()
        step = run.newest()
        run.start("--nproc", "2")
        assert run.wait() == 0, run.said
        assert all(has_ended(pid) for pid in ranks)
        assert run.result() == bench.undisturbed()
        resumed = run.events("resume")[-1]
        return Outcome("next start bit-equal", recovered_s=resumed["time"] - at, steps_lost=step - resumed["step"])


def resumed_thrice(bench: Bench) -> Outcome:
    """A run that is stopped and resumed three times in a row."""
    with bench.run("resumed-thrice") as run:
        for step in (5, 13, 21):
            run.wait_step(step)
            run.signal(signal.SIGTERM)
            assert run.wait() == EXIT_RESUMABLE, run.said
            run.start("--nproc", "2")
        assert run.wait() == 0, run.said
        assert len(run.events("resume")) == 3
        assert run.result() == bench.undisturbed()
        return Outcome("bit-equal", steps_lost=0)


def other_layout(bench: Bench) -> Outcome:
    """A run that resumes with tensor parallelism instead of data parallelism: the same samples, and the same numbers up to
    rounding."""
    expected = bench.undisturbed()[0]
    with bench.goes_on("in-another-layout", parallel={"dp_replicate": 1, "tp": 2}) as run:
        run.start("--nproc", "2")
        assert run.wait() == 0, run.said
        losses = {step: metrics[0] for step, metrics in run.result()[0].items()}
        worst = max(abs(losses[step] / expected[step][0] - 1) for step in expected)
        assert worst < 1e-4, f"a loss differs by {worst:.1e}"
        return Outcome(f"went on, losses within {worst:.0e}", steps_lost=0)


def _with_a_slow_rank(bench: Bench, name: str, factor: float, steps: int) -> list[dict[str, Any]]:
    with bench.run(name, env={"ARGOSY_FAULT": f"slow:1:{factor}"}, train={"steps": steps}, eval="off") as run:
        assert run.wait() == 0, run.said
        return [{**alert, "since": run.events("start")[0]["time"]} for alert in run.events("alert")]


def rank_a_fifth_slower(bench: Bench) -> Outcome:
    """A rank that is 20% slower is named, with the percentage."""
    found = [a for a in _with_a_slow_rank(bench, "slow", 1.3, 300) if a["alert"] == "slow-rank"]
    assert [alert["rank"] for alert in found] == [1], found
    assert "rank 1 takes" in found[0]["text"]
    return Outcome(found[0]["text"].partition(":")[0], detected_s=found[0]["time"] - found[0]["since"], steps_lost=0)


def rank_a_little_slower(bench: Bench) -> Outcome:
    """A rank that is 5% slower raises no alert."""
    found = _with_a_slow_rank(bench, "hardly-slow", 1.05, 300)
    assert "slow-rank" not in {alert["alert"] for alert in found}, found
    return Outcome("no alarm", steps_lost=0)


def out_of_memory(bench: Bench) -> Outcome:
    """The kernel kills a rank that exceeds its cgroup's memory: reported as such, with the memory it held."""
    group = Path("/sys/fs/cgroup/memory") / f"argosy-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(2 * 2**30))
        (group / "memory.swappiness").write_text("0")
    except OSError as error:
        pytest.skip(f"a group of processes with little memory cannot be made here: {error}")
    try:
        with bench.run("out-of-memory", env={"ARGOSY_FAULT": "eat-memory:1:13"}, fault={"stall_after": "60s"}) as run:
            assert run.process is not None
            # The ranks are children, and in the cgroup from their start.
            (group / "cgroup.procs").write_text(str(run.process.pid))
            step, at = 12, run.wait_event("rank-died")["time"]
            assert run.wait() == 0, run.said
            (died,) = run.events("rank-died")
            assert died["rank"] == 1
            assert "lack of memory" in died["cause"], died
            assert "GiB" in died["cause"]
            assert run.result() == bench.undisturbed()
            return run.cost(at, step, "rank-died")
    finally:
        group.rmdir()
