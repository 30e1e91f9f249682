"""What is measured: parts that add up to the step, goodput across a restart, and no device sync between logs."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from argosy.config.resolve import resolve
from argosy.record.jsonl import read_metrics
from argosy.train.run import TrainOptions, train
from argosy.train.telemetry import Phases

Write = Callable[..., Path]


def go(path: Path, *overrides: str) -> int:
    return train(resolve(path, overrides), path, TrainOptions(quiet=True))


def test_parts_of_a_step_are_means_over_the_steps_since_they_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    phases = Phases(torch.device("cpu"))
    for step in range(3):
        phases.enter("forward_backward")
        now += 2 + step
        phases.enter("communication")
        phases.enter("optimiser")
        now += 1
        phases.end_step()
        now += 50  # between steps: nobody's
    assert phases.take() == pytest.approx({"forward_backward": 3.0, "communication": 0.0, "optimiser": 1.0})
    assert phases.take() == {}


def test_however_rare_logs_are_only_the_newest_steps_are_kept() -> None:
    phases = Phases(torch.device("cpu"))
    for _ in range(10_000):
        phases.enter("forward_backward")
        phases.end_step()
    assert len(phases._steps) == 16


def test_a_record_says_where_time_and_memory_went(write_spec: Write, tmp_path: Path) -> None:
    go(write_spec(), "log.price=3.5", "log.every=2")
    metrics = read_metrics(tmp_path / "runs" / "tiny" / "metrics.jsonl")
    last = metrics[6]
    parts = [last[f"time/{name}"] for name in ("data", "forward_backward", "optimizer")]
    assert 0 < sum(parts) <= 1.5 * last["step_s"]
    memory = sum(last[f"memory/{name}"] for name in ("parameters", "gradients", "optimiser", "rest"))
    assert memory == pytest.approx(last["memory_gib"], rel=1e-3)
    assert last["tokens_per_s_gpu"] == last["tokens_per_s"]
    assert 0 < last["goodput"] < 1
    assert last["cost"] == pytest.approx(3.5 * sum(last["spent"].values()) / 3600, rel=1e-3)
    assert last["spent"]["save"] > 0
    assert last["spent"]["evaluation"] > 0
    assert metrics[6]["spent"]["productive"] > metrics[2]["spent"]["productive"]


def test_the_time_between_two_attempts_is_down_time(write_spec: Write, tmp_path: Path) -> None:
    path = write_spec()
    go(path)
    go(path, "train.steps=8")
    metrics = read_metrics(tmp_path / "runs" / "tiny" / "metrics.jsonl")
    assert metrics[8]["spent"]["productive"] > metrics[6]["spent"]["productive"]
    assert sum(metrics[8]["spent"].values()) > sum(metrics[6]["spent"].values())
