"""The planner uses the measured constants of a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch

from argosy.errors import EXIT_REFUSED, ArgosyError
from argosy.measure.calibrate import Measured, Sizes, measure
from argosy.plan.calibration import calibration
from argosy.plan.hardware import find_gpu

Argosy = Callable[..., CompletedProcess[str]]


def test_every_share_is_measured() -> None:
    small = Sizes(tokens=64, width=32, outputs=48, heads=2, head_dim=16, seq_len=32, seconds=0.01)
    found = measure(torch.device("cpu"), find_gpu("H200"), small)
    assert found.narrow is not None
    assert all(0 < share < 1 for share in (found.product, found.narrow, found.attention, found.memory))
    assert measure(torch.device("cpu"), find_gpu("A100-80"), small).narrow is None


def test_the_planner_reckons_with_what_was_measured(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(Measured("H200", "2.11.0", product=0.5, narrow=0.4, attention=0.25, memory=0.6).document())
    gpu, stack = find_gpu("H200"), calibration().stacks["argosy"]
    mine, known = (calibration(path).rates(gpu, stack, "fp8") for path in (str(file), None))
    assert mine.product == pytest.approx(0.5 * gpu.peak() * 1e12)
    assert mine.narrow == pytest.approx(0.4 * gpu.peak("fp8") * 1e12)
    assert mine.attention == pytest.approx(0.25 * gpu.peak() * 1e12)
    assert mine.memory / known.memory == pytest.approx(0.6 / calibration().constants["memory"])
    other = find_gpu("A100-80")
    assert calibration(str(file)).rates(other, stack, "bf16") == calibration().rates(other, stack, "bf16")


@pytest.mark.parametrize("content", ["- a list", "stacks: {}", "constants: {product.H100: fast}", "constants: 3"])
def test_what_is_no_calibration_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(content)
    with pytest.raises(ArgosyError, match="calibration"):
        calibration(str(file))
    with pytest.raises(ArgosyError, match="no such file"):
        calibration(str(tmp_path / "missing.yaml"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="only where there is no GPU")
def test_without_a_gpu_there_is_nothing_to_calibrate(argosy: Argosy) -> None:
    done = argosy("bench", "--calibrate")
    assert done.returncode == EXIT_REFUSED
    assert "it has no GPU" in done.stderr
    nothing = argosy("bench")
    assert nothing.returncode == EXIT_REFUSED
    assert "MODEL" in nothing.stderr
