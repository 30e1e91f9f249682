"""What earlier versions wrote still loads: a corpus, a run directory and its checkpoint, kept in tests/kept.

They were written by version 0.1.0 of November 2026. The losses after the resume are those that the same version reached.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import argosy
from argosy.record.jsonl import read_metrics

KEPT = Path(__file__).parent / "kept"
LOSSES = {5: 5.462311267852783, 6: 5.47228479385376}
NORMS = {5: 1.3578513860702515, 6: 1.3359229564666748}
KEPT_ON = "CPU with AVX512"


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    shutil.copytree(KEPT / "corpus", tmp_path / "corpus")
    shutil.copytree(KEPT / "run", tmp_path / "runs" / "kept")
    shutil.copy(KEPT / "run.yaml", tmp_path)
    return tmp_path


def test_a_kept_run_goes_on_with_the_numbers_its_own_version_reached(
    kept: Path, argosy: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    assert argosy("data", "verify", "corpus", cwd=kept).returncode == 0
    assert argosy("ckpt", "verify", "runs/kept", cwd=kept).returncode == 0
    resumed = argosy("train", "run.yaml", "train.steps=6", cwd=kept)
    assert resumed.returncode == 0, resumed.stderr
    found = read_metrics(kept / "runs" / "kept" / "metrics.jsonl")
    for step, loss in LOSSES.items():
        assert found[step]["loss"] == pytest.approx(loss, rel=1e-6)
        assert found[step]["grad_norm"] == pytest.approx(NORMS[step], rel=1e-5)
    changes = [line for line in resumed.stdout.splitlines() if "changed" in line and "train.steps" not in line]
    here = f"CPU with {torch.backends.cpu.get_cpu_capability()}"
    moved = [f"changed since the last start: machine.device: {KEPT_ON} -> {here}"] if here != KEPT_ON else []
    assert changes == moved


def test_a_kept_checkpoint_loads_as_a_module(kept: Path) -> None:
    model = argosy.load_model(kept / "runs" / "kept", device="cpu")
    assert sum(parameter.numel() for parameter in model.parameters()) == 6464
