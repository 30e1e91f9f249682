"""Console formats: the step line, amounts, durations and curves."""

from __future__ import annotations

import pytest

from argosy.console.braille_plot import plot
from argosy.console.formats import amount, clock, volume
from argosy.console.training_lines import describe

RECORD = {
    "step": 120, "steps": 500, "loss": 4.12345, "grad_norm": 0.9123, "lr": 3e-4, "tokens_per_s": 45_678.0, "tflops": 0.137,
    "mfu": None, "peak": None, "data_wait": 0.012, "memory_gib": 0.43, "eta_s": 92.4,
}  # fmt: skip


def test_the_line_has_everything_a_person_looks_for() -> None:
    line = describe(RECORD)
    for part in ("step 120/500", "loss 4.1235", "grad 0.912", "lr 3.00e-04", "45.7K tok/s", "ETA 1m32s"):
        assert part in line
    assert "data wait 1%" in line
    assert "MFU" not in line, "a figure that is not known is left out"
    assert "MFU 41.2%" in describe(RECORD | {"mfu": 0.412, "peak": "H200 989"})


def test_a_line_of_a_long_run_fits_100_columns() -> None:
    long = {
        "step": 1_000_000,
        "steps": 1_000_000,
        "mfu": 0.412,
        "memory_gib": 134.21,
        "goodput": 1.0,
        "cost": 123_456.7,
    }
    for record in (RECORD, RECORD | long, RECORD | long | {"loss_scale": 65536.0, "grad_norm": 123.4}):
        assert len(describe(record)) <= 100
        assert "ETA 1m32s" in describe(record)


def test_skipped_steps_are_counted_with_and_without_a_loss_scale() -> None:
    assert "skipped" not in describe(RECORD)
    assert "| 2 skipped |" in describe(RECORD | {"skipped": 2})
    assert "| 2 skipped |" in describe(RECORD | {"skipped": 2, "loss_scale": 1024.0})
    assert "| scale 1024 |" in describe(RECORD | {"loss_scale": 1024.0})


@pytest.mark.parametrize(
    ("number", "text"), [(5, "5"), (1234, "1.23K"), (2.5e6, "2.5M"), (3e9, "3B"), (1.2e12, "1.2T")]
)
def test_amounts(number: float, text: str) -> None:
    assert amount(number) == text


@pytest.mark.parametrize(("size", "text"), [(12, "12B"), (1.5e3, "1.5KB"), (2e9, "2GB"), (3.25e12, "3.25TB")])
def test_bytes(size: float, text: str) -> None:
    assert volume(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (59.4, "59s"), (92, "1m32s"), (3960, "1h06m"), (1433 * 86400, "1433.0d")]
)
def test_times(seconds: float, text: str) -> None:
    assert clock(seconds) == text


def test_a_curve_falls_from_the_top_left_to_the_bottom_right() -> None:
    lines = plot([(0.0, 2.0), (10.0, 1.0)], marks=[(10.0, 1.0)], width=20, height=5, x_label="steps").splitlines()
    assert lines[0].startswith("2.00 ┤")
    assert lines[0][6] != " "
    assert lines[4].endswith("●")
    assert "10 steps" in lines[-1]


@pytest.mark.parametrize("points", [[], [(1.0, 1.0)], [(1.0, 5.0), (2.0, 5.0)]])
def test_degenerate_curves_do_not_fail(points: list[tuple[float, float]]) -> None:
    assert plot(points)
