"""What is known of failures: every entry matches its own sample, and is not hidden by an earlier one."""

from __future__ import annotations

from pathlib import Path

import pytest

from argosy.watch.doctor import diagnose
from argosy.watch.knowledge import Failure, failures, matches
from argosy.watch.runs import Run
from record.run_dirs import log, make_run


def test_there_are_at_least_forty_with_names_of_their_own() -> None:
    names = [failure.name for failure in failures()]
    assert len(names) >= 40
    assert len(set(names)) == len(names)
    assert {failure.severity for failure in failures()} == {"fatal", "warning"}


@pytest.mark.parametrize("failure", failures(), ids=lambda failure: failure.name)
def test_the_cause_is_named_from_a_recorded_line(failure: Failure, tmp_path: Path) -> None:
    run = make_run(tmp_path / "broken")
    log(run, [10])
    logs = run.root / "logs" / "0"
    logs.mkdir(parents=True)
    lines = [
        "step 10/1000 | loss 4.1 | grad norm 0.9",
        "saved runs/a/checkpoints/step-00000010 in 0.1s",
        failure.sample,
    ]
    (logs / "0.log").write_text("\n".join(lines) + "\n")
    verdict = diagnose(Run("broken", run.root))[0]
    assert verdict.name == failure.name
    assert failure.cause in verdict.verdict
    assert verdict.fix == failure.fix
    assert any(failure.sample[:100] in line for line in verdict.evidence)


def test_a_healthy_log_shows_nothing() -> None:
    lines = [
        "runs/first: llama, 5,000,000 parameters on cuda:0 in bf16", "saved runs/a/checkpoints/step-00000500 in 3.0s",
        "step 500/1000 | loss 2.1250 | grad norm 0.310 | lr 1.00e-03 | 429K tok/s | MFU 41.0% of H100 989 | data wait 0.0%",
        "NCCL INFO NET/OFI Selected Provider is efa", "rank 28 of 122 joined",
    ]  # fmt: skip
    assert list(matches(lines, "log")) == []


def test_a_line_of_any_length_is_looked_at_in_bounded_time() -> None:
    assert list(matches(["a" * 10_000_000, "(" * 100_000], "log")) == []
