"""The doctor's findings from heartbeats, events and metrics of run directories."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import orjson
import pytest

from argosy.record.jsonl import JsonlWriter
from argosy.record.rundir import RunDir
from argosy.watch.diagnosis import diagnose
from argosy.watch.run_list import Run
from record.run_dirs import log, make_run


def beat(run: RunDir, rank: int, **facts: Any) -> None:
    run.heartbeats.mkdir(exist_ok=True)
    base = {"rank": rank, "host": f"node{rank}", "pid": 100 + rank, "attempt": 0, "step": 31, "phase": "forward_backward", "phase_s": 0.3,
            "progress": 120, "state": "S", "time": time.time(), "beat": 5, "alive": True}  # fmt: skip
    (run.heartbeats / f"{rank}.json").write_bytes(orjson.dumps(base | facts))


def event(run: RunDir, kind: str, **facts: Any) -> None:
    with JsonlWriter(run.events) as events:
        events.write({"event": kind, "step": 31, "time": time.time(), **facts})


def verdict(run: RunDir) -> str:
    return diagnose(Run(run.root.name, run.root))[0].verdict


def started(tmp_path: Path) -> RunDir:
    run = make_run(tmp_path / "sick")
    log(run, [10, 20, 30])
    event(run, "start")
    return run


def test_the_rank_that_is_reading_data_is_named_and_those_that_wait_for_it(tmp_path: Path) -> None:
    run = started(tmp_path)
    beat(run, 3, phase="data", phase_s=300.0, progress=118)
    beat(run, 5, phase_s=299.0)
    said = verdict(run)
    assert said.startswith("rank 5 waits in forward_backward for rank 3, which has been in data of step 31 for 300 s")
    assert "reading data" in said


def test_a_stopped_process_is_the_one_to_blame(tmp_path: Path) -> None:
    run = started(tmp_path)
    for rank in range(4):
        beat(run, rank, phase_s=120.0, progress=120, state="T" if rank == 2 else "S")
    assert "for rank 2, which" in verdict(run)
    assert "is stopped" in verdict(run)


def test_a_slow_but_moving_run_is_not_called_hung(tmp_path: Path) -> None:
    # Its steps take 10 s.
    run = started(tmp_path)
    for rank in range(4):
        beat(run, rank, phase_s=45.0)
    assert verdict(run).startswith("nothing is wrong: the run is training")


def test_a_rank_that_ended_without_a_word_is_named(tmp_path: Path) -> None:
    run = started(tmp_path)
    beat(run, 0)
    beat(run, 1, alive=False, time=time.time() - 5)
    assert verdict(run).startswith("rank 1 on node1 ended without a message at step 31")


def test_what_the_supervisor_found_comes_first(tmp_path: Path) -> None:
    run = started(tmp_path)
    beat(run, 0, alive=False)
    event(
        run,
        "stall",
        rank=3,
        cause="rank 5 waits in all_gather, which rank 3 has not begun",
        phase="data",
        seconds=61.2,
        stack=["File a.py line 3"],
    )
    first = diagnose(Run("sick", run.root))[0]
    assert (
        first.verdict
        == "rank 3 made no progress for 61 s at step 31 in data: rank 5 waits in all_gather, which rank 3 has not begun"
    )
    assert "  File a.py line 3" in first.evidence


def test_an_earlier_attempts_trouble_is_not_this_ones(tmp_path: Path) -> None:
    run = started(tmp_path)
    event(run, "rank-died", rank=1, cause="SIGKILL", phase="data")
    event(run, "resume")
    event(run, "done")
    assert verdict(run).startswith("nothing is wrong: the run is done")


def test_overflowing_loss_scales_are_counted(tmp_path: Path) -> None:
    run = make_run(tmp_path / "half")
    with JsonlWriter(run.metrics) as metrics:
        for step in (1, 2, 3):
            metrics.write(
                {
                    "step": step,
                    "steps": 10,
                    "time": 1.0,
                    "loss": 4.0,
                    "grad_norm": 1.0,
                    "loss_scale": 2.0**20,
                    "skipped": step,
                }
            )
    assert "overflowed in 3 of the last 3 steps" in verdict(run)
    with JsonlWriter(run.metrics) as metrics:
        for step in range(4, 60):
            metrics.write({"step": step, "steps": 99, "time": 1.0, "loss": 4.0, "loss_scale": 1.0, "skipped": 3})
    # The loss scale has been found.
    assert diagnose(Run("half", run.root))[0].name == "dead"
    with JsonlWriter(run.metrics) as metrics:
        metrics.write({"step": 60, "time": 1.0, "loss": 4.0, "loss_scale": "x", "skipped": "many"})
    assert diagnose(Run("half", run.root))[0].name == "dead"


def test_out_of_memory_is_compared_with_the_plan(tmp_path: Path) -> None:
    run = make_run(tmp_path / "big")
    (run.root / "plan.json").write_text('{"plans": [{"memory_gib": [{"device": 71.2, "allocated": 66}]}]}')
    (run.root / "logs").mkdir()
    (run.root / "logs" / "0.log").write_text("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n")
    assert "at step 1: plan said 71 GiB" in verdict(run)


def test_logs_from_elsewhere_can_be_given(tmp_path: Path) -> None:
    run = started(tmp_path)
    dmesg = tmp_path / "dmesg.txt"
    dmesg.write_text("NVRM: Xid (PCI:0000:9b:00): 79, GPU has fallen off the bus.\n")
    assert "fell off the PCIe bus" in diagnose(Run("sick", run.root), [dmesg])[0].verdict


def test_what_is_over_is_not_the_verdict(tmp_path: Path) -> None:
    run = make_run(tmp_path / "sea")
    # 100 seconds between two logs.
    log(run, range(10, 1000, 10))
    with JsonlWriter(run.events) as events:
        events.write({"event": "start", "step": 0, "time": 1_700_000_000.0})
        for step in (100, 300):
            alert = {"event": "alert", "alert": "spike", "text": "the loss is 9", "step": step}
            events.write(alert | {"time": 1_700_000_000.0 + 10 * step})
        events.write({"event": "sink-down", "step": 400, "time": 1_700_004_000.0, "sink": "otel", "text": "otel"})
        events.write({"event": "sink-up", "step": 410, "time": 1_700_004_100.0, "sink": "otel", "text": "otel"})
    assert [finding.name for finding in diagnose(Run("sea", run.root))] == ["dead"]
    with JsonlWriter(run.events) as events:
        events.write(alert | {"step": 980, "time": 1_700_009_800.0})
    assert [finding.name for finding in diagnose(Run("sea", run.root))] == ["dead", "spike"]
    with JsonlWriter(run.events) as events:
        events.write({"event": "done", "step": 1000, "time": 1_700_010_000.0})
    found = diagnose(Run("sea", run.root))
    assert [finding.name for finding in found] == ["done", "spike"]
    assert found[0].verdict.startswith("nothing is wrong")


def test_the_ranks_of_a_node_that_went_away_are_named_and_not_those_that_wait_for_them(tmp_path: Path) -> None:
    run = started(tmp_path)
    for rank in range(4):
        beat(run, rank, phase_s=200.0, longest_s=0.4)
    for rank in (4, 5):
        beat(run, rank, host="node9", phase_s=0.2, longest_s=0.4, time=time.time() - 210)
    said = diagnose(Run("sick", run.root))[0]
    assert said.verdict.startswith("no heartbeat of ranks 4, 5 on node9 for 210 s")
    assert said.verdict.endswith("ranks 0, 1, 2, 3 wait for them")
    assert said.evidence[0].startswith("rank 4 on node9")


@pytest.mark.parametrize(
    ("phase", "phase_s", "longest_s", "hangs"),
    [
        ("evaluate", 280.0, 250.0, False), ("save", 150.0, 60.0, False), ("forward_backward", 200.0, 0.0, False),
        ("data", 150.0, 0.02, True), ("data", 150.0, 0.0, True), ("evaluate", 1200.0, 250.0, True),
        ("forward_backward", 400.0, 0.0, True),
    ],
)  # fmt: skip
def test_a_phase_that_is_always_long_or_is_the_first_of_its_kind_is_no_hang(
    phase: str, phase_s: float, longest_s: float, hangs: bool, tmp_path: Path
) -> None:
    run = started(tmp_path)
    for rank in range(2):
        beat(run, rank, phase=phase, phase_s=phase_s, longest_s=longest_s)
    assert (diagnose(Run("sick", run.root))[0].name == "hang") is hangs


def test_the_evidence_of_a_hang_begins_with_the_rank_to_blame(tmp_path: Path) -> None:
    run = started(tmp_path)
    for rank in range(64):
        beat(
            run,
            rank,
            phase_s=300.0,
            phase="data" if rank == 37 else "communication",
            progress=118 if rank == 37 else 120,
        )
    assert diagnose(Run("sick", run.root))[0].evidence[0].startswith("rank 37 on node37: step 31, data for 300.0 s")


def test_an_overflow_of_fp16_is_not_called_nan_and_a_norm_that_is_none_is(tmp_path: Path) -> None:
    for name, facts, told in [("half", {"loss_scale": 65536.0, "skipped": 0}, False), ("whole", {}, True)]:
        run = make_run(tmp_path / name)
        log(run, [10], grad_norm=None, **facts)
        assert (diagnose(Run(name, run.root))[0].name == "nan") is told


def test_a_record_without_a_loss_is_not_called_nan(tmp_path: Path) -> None:
    run = make_run(tmp_path / "old")
    run.metrics.write_text('{"step": 1, "seconds": 3.0}\n{"step": 2, "loss": "x"}\n')
    assert diagnose(Run("old", run.root))[0].name == "dead"


def test_saves_that_failed_are_told_until_one_does_not(tmp_path: Path) -> None:
    run = started(tmp_path)
    beat(run, 0)
    for step in (10, 20, 30):
        event(run, "save-failed", step=step, cause="Connection timed out")
    assert verdict(run) == "the last 3 checkpoints, of steps 10 to 30, could not be written: Connection timed out"
    event(run, "save", step=40, path="step-00000040")
    assert verdict(run).startswith("nothing is wrong: the run is training")
    event(run, "save-failed", step=50, cause="Connection timed out")
    assert verdict(run).startswith("the checkpoint of step 50 could not be written")


def test_a_step_that_was_skipped_or_a_sink_that_is_down_is_a_note_beside_a_run_that_trains(tmp_path: Path) -> None:
    run = started(tmp_path)
    beat(run, 0)
    event(run, "skip", reason="spike", loss=9.0, grad_norm=2.0, samples=[1, 8])
    event(run, "sink-down", sink="wandb", text="wandb takes no records")
    first, *others = diagnose(Run("sick", run.root))
    assert first.verdict.startswith("nothing is wrong: the run is training")
    assert [other.verdict for other in others] == [
        "1 step was skipped, the last at step 31, where the loss is 9 and the gradient norm 2",
        "wandb takes no records",
    ]
