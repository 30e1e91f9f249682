"""Alert rules are silent on a healthy run, and name the problem on an unhealthy one."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from argosy.config.watching import AlertsSpec
from argosy.record.alerts import Alerts
from argosy.record.rank_columns import COLUMNS, Ranks

RNG = np.random.default_rng


def rows(own: np.ndarray, data: float = 0.001) -> list[list[float]]:
    return [[float(s), data, 1.0, *[math.nan] * (len(COLUMNS) - 3)] for s in own]


def run(
    tmp_path: Path, *, steps: int = 2000, slower: float = 0.0, seed: int = 0, world: int = 8, step_s: float = 0.5,
    noise: float = 0.013, every: int = 10,
) -> list[dict[str, Any]]:  # fmt: skip
    """Return the alerts of a healthy run of `steps`, logged `every` so many, whose rank 3 is `slower` by a share. `noise` is per log."""
    rng, alerts, found = RNG(seed), Alerts(AlertsSpec(disk_gib=0), tmp_path), []
    for step in range(every, steps + 1, every):
        own = step_s * rng.lognormal(0, noise, world)
        # Now and then, one rank is slow for one log.
        own *= 1 + 0.3 * (rng.random(world) < 0.02)
        own[min(3, world - 1)] *= 1 + slower
        record = {
            "step": step,
            "time": step_s * step,
            "loss": 8 * step**-0.1 + rng.normal(0, 0.03),
            "grad_norm": 1.0,
            "tokens_per_s": 1e5 * rng.lognormal(0, noise),
        }
        found += alerts.observe(record, Ranks.of(rows(own), step=step, time=step_s * step, stages=1))
    return found


# 4% between two steps.
QUIET = {"step_s": 0.5, "noise": 0.013}
# A tiny model on a machine that others use.
NOISY = {"step_s": 0.02, "noise": 0.3}


@pytest.mark.parametrize("machine", [QUIET, NOISY])
@pytest.mark.parametrize("world", [2, 3, 8, 64])
def test_no_false_alarm_in_a_healthy_run_with_a_rank_that_is_five_percent_slower(
    tmp_path: Path, world: int, machine: dict[str, float]
) -> None:
    for seed in range(8):
        assert run(tmp_path, slower=0.05, seed=seed, world=world, **machine) == []


@pytest.mark.parametrize("world", [2, 4, 8, 64])
def test_a_rank_that_is_twenty_percent_slower_is_named_once(tmp_path: Path, world: int) -> None:
    found = run(tmp_path, slower=0.20, world=world)
    assert [alert["alert"] for alert in found] == ["slow-rank"]
    assert found[0]["rank"] == min(3, world - 1)
    assert found[0]["ratio"] == pytest.approx(1.2, abs=0.05)


@pytest.mark.parametrize("world", [2, 8])
def test_in_noise_it_is_named_too_with_more_logs(tmp_path: Path, world: int) -> None:
    for seed in range(4):
        found = run(tmp_path, slower=0.20, world=world, seed=seed, steps=4000, step_s=0.02, noise=0.15)
        assert {(alert["alert"], alert["rank"]) for alert in found} == {("slow-rank", min(3, world - 1))}


def test_a_neighbour_that_is_busy_for_a_short_time_is_no_alarm(tmp_path: Path) -> None:
    alerts, found = Alerts(AlertsSpec(disk_gib=0), tmp_path), []
    for log in range(400):
        # 20 seconds.
        burst = 1.6 if 200 <= log < 300 else 1.0
        record = {"step": log, "time": 0.2 * log, "loss": 2.0, "grad_norm": 1.0, "tokens_per_s": 1e5 / burst}
        made = Ranks.of(rows(np.array([0.02, 0.02 * burst])), step=log, time=0.2 * log, stages=1)
        found += alerts.observe(record, made)
    assert found == []


def test_a_rank_that_is_late_by_microseconds_holds_up_nobody(tmp_path: Path) -> None:
    # 200 logs, the longest span that is tested, take 40 s.
    assert run(tmp_path, slower=0.3, step_s=0.002, steps=40_000, every=100) == []
    late = run(tmp_path, slower=0.3, step_s=0.008, steps=10_000, every=25)
    assert [alert["alert"] for alert in late] == ["slow-rank"]


def test_stages_of_a_pipeline_are_not_compared_with_each_other(tmp_path: Path) -> None:
    alerts, found = Alerts(AlertsSpec(disk_gib=0), tmp_path), []
    record = {"loss": 2.0, "grad_norm": 1.0, "tokens_per_s": 1.0}
    for step in range(50):
        # The last stage has the output head.
        own = np.array([1.0, 1.0, 1.5, 1.5])
        found += alerts.observe(
            record | {"step": step, "time": 10.0 * step}, Ranks.of(rows(own), step=step, time=10.0 * step, stages=2)
        )
    assert found == []


def test_a_rank_short_of_data_is_told_apart(tmp_path: Path) -> None:
    alerts, found = Alerts(AlertsSpec(disk_gib=0), tmp_path), []
    for step in range(30):
        made = rows(np.array([1.0, 1.0, 2.2, 1.0]))
        made[2][1] = 1.2
        record = {"step": step, "time": 10.0 * step, "loss": 2.0, "grad_norm": 1.0, "tokens_per_s": 1.0}
        found += alerts.observe(record, Ranks.of(made, step=step, time=10.0 * step, stages=1))
    assert "waits for data" in found[0]["text"]
    assert found[0]["rank"] == 2


def test_nan_spike_and_drop_are_told_once_and_again_after_a_recovery(tmp_path: Path) -> None:
    alerts, clock = Alerts(AlertsSpec(disk_gib=0), tmp_path), itertools.count(0.0, 10.0)

    def observe(loss: float = 2.0, rate: float = 100.0) -> list[str]:
        record = {"step": 1, "time": next(clock), "loss": loss, "grad_norm": 1.0, "tokens_per_s": rate}
        return [alert["alert"] for alert in alerts.observe(record)]

    for i in range(40):
        assert observe(2.0 + 0.01 * (i % 3)) == []
    assert observe(math.nan) == ["nan"]
    assert observe(math.nan) == []
    assert observe() == []
    assert observe(math.inf) == ["nan"]
    assert observe(9.0) == ["spike"]
    assert observe(9.0) == []
    assert [observe() for _ in range(3)] == [[], [], []]
    assert observe(30.0) == ["spike"]
    assert observe() == []
    assert [observe(rate=50.0) for _ in range(9)].count(["throughput-drop"]) == 1


def test_a_full_disk_is_told(tmp_path: Path) -> None:
    alerts = Alerts(AlertsSpec(disk_gib=1e9), tmp_path)
    found = alerts.observe({"step": 1, "time": 0.0, "loss": 1.0, "grad_norm": 1.0, "tokens_per_s": 1.0})
    assert [alert["alert"] for alert in found] == ["disk-low"]


def spikes(loss: np.ndarray, tmp_path: Path, **more: Any) -> list[int]:
    """Return the logs at which a spike or NaN alert is raised."""
    alerts, found = Alerts(AlertsSpec(disk_gib=0), tmp_path), []
    for log, value in enumerate(loss):
        record = {"step": log, "time": 10.0 * log, "loss": float(value), "grad_norm": 1.0, "tokens_per_s": 1.0} | more
        found += [log for alert in alerts.observe(record) if alert["alert"] in ("spike", "nan")]
    return found


LOSSES = {
    "warm-up": lambda rng, n: 11 - 3 * np.minimum(1, np.arange(n) / 100) + rng.normal(0, 0.03, n),
    "heavy tails": lambda rng, n: 2 + 0.1 * rng.standard_t(5, n),
    "tiny batches": lambda rng, n: 2 * rng.lognormal(0, 0.3, n),
    "learnt by heart": lambda rng, n: 0.001 * rng.lognormal(0, 1, n),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_a_noisy_loss_is_no_spike(name: str, tmp_path: Path) -> None:
    for seed in range(2):
        assert spikes(LOSSES[name](RNG(seed), 2000), tmp_path) == []


@pytest.mark.parametrize("share", [0.01, 0.05])
def test_a_source_that_is_harder_than_the_rest_is_told_a_few_times_at_most(share: float, tmp_path: Path) -> None:
    rng = RNG(1)
    loss = 2 + rng.normal(0, 0.1, 5000) + 1.5 * (rng.random(5000) < share)
    assert len(spikes(loss, tmp_path)) <= 4


def test_a_spike_that_lasts_is_told_once_and_so_is_each_that_comes_later(tmp_path: Path) -> None:
    loss = 2 + RNG(2).normal(0, 0.02, 1200)
    # 10 standard deviations.
    loss[300:310] += 0.2
    # A lasting change: another corpus, or a model that has diverged.
    loss[700:] += 1.0
    loss[1000:1003] += 5.0
    assert spikes(loss, tmp_path) == [301, 700, 1000]


def test_a_scale_that_is_being_found_is_no_alarm_in_fp16(tmp_path: Path) -> None:
    assert spikes(np.full(9, 2.0), tmp_path, grad_norm=math.inf, loss_scale=65536.0) == []
    assert spikes(np.full(9, 2.0), tmp_path, grad_norm=math.inf) == [0]
    assert spikes(np.array([2.0, math.nan]), tmp_path, loss_scale=65536.0) == [1]
