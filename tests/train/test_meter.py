"""Rates, utilisation and the time that is left, worked out by hand."""

from __future__ import annotations

import pytest

from argosy.plan.hardware import Peak
from argosy.train import telemetry
from argosy.train.telemetry import Meter


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(telemetry.time, "perf_counter", lambda: self.now)


def test_a_log_of_four_gpus_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    peak = Peak("H100", 1000.0)
    made = Meter(steps=100, samples=800, flops_per_token=6e9, peak=peak, devices=4, _since=clock.now)

    def log(step: int, samples: int) -> dict[str, float]:
        about = {"loss": 2.0, "grad_norm": 1.0, "lr": 1e-3, "memory_gib": 1.0}
        return made.record(step=step, waited_s=0.5, samples=samples, tokens=samples * 1000, **about)

    for _ in range(5):  # of 2 seconds and 8 samples of 1,000 tokens each
        clock.now += 2.0
        made.count(samples=8, tokens=8000)
    first = log(5, 40)
    assert first["tokens_per_s"] == pytest.approx(4000.0)
    assert first["tokens_per_s_gpu"] == pytest.approx(1000.0)
    assert first["tflops"] == pytest.approx(4000 * 6e9 / 1e12)  # of all GPUs: 24
    assert first["mfu"] == pytest.approx(24 / (4 * 1000))
    assert first["step_s"] == pytest.approx(2.0)
    assert first["data_wait"] == pytest.approx(0.05)
    assert first["eta_s"] == pytest.approx(95 * 2.0)  # 760 samples at 4 a second
    for _ in range(5):
        clock.now += 2.0
        made.count(samples=8, tokens=8000)
    clock.now += 9.0
    made.pause(9.0)  # an evaluation: not in the rates, but it will come again
    second = log(10, 80)
    assert second["step_s"] == pytest.approx(2.0)
    assert second["tokens_per_s"] == pytest.approx(4000.0)
    assert second["eta_s"] == pytest.approx((9 * 2.0 + 9.0) / 72 * 720)
