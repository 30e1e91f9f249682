"""Faults of numbers: NaN, a spike, a flipped bit."""

from __future__ import annotations

from faults.bench import Bench, Outcome


def not_a_number(bench: Bench) -> Outcome:
    """NaN gradients on one rank: the step is skipped on all ranks, counted, and recorded with its samples."""
    with bench.run("nan", env={"ARGOSY_FAULT": "nan:1:13"}) as run:
        assert run.wait() == 0, run.said
        (skip,) = run.events("skip")
        assert (skip["step"], skip["reason"], skip["samples"]) == (13, "non-finite", [48, 51])
        return Outcome("skipped, went on", steps_lost=1)


def spike(bench: Bench) -> Outcome:
    """A gradient norm far above normal: the step is skipped, and the normal range is recorded."""
    with bench.run("spike", env={"ARGOSY_FAULT": "spike:1:13"}, guard={"window": 8}) as run:
        assert run.wait() == 0, run.said
        skip = run.events("skip")[0]
        assert (skip["step"], skip["reason"], skip["samples"]) == (13, "spike", [48, 51])
        assert skip["grad_norm"] > skip["norm_limit"]
        return Outcome("skipped, went on", steps_lost=1)


def flipped_bit(bench: Bench) -> Outcome:
    """One flipped bit in one parameter of one replica is found at the next check, and the run rewinds to before it."""
    with bench.run("flipped-bit", env={"ARGOSY_FAULT": "flip:1:13"}, guard={"replica_check": "2ba"}) as run:
        assert run.wait() == 0, run.said
        (rewind,) = run.events("rewind")
        assert (rewind["reason"], rewind["ranks"], rewind["step"], rewind["to"]) == ("replica-mismatch", [0, 1], 14, 8)
        assert run.result() == bench.undisturbed()
        return Outcome("rewound, bit-equal", steps_lost=rewind["step"] - rewind["to"])
