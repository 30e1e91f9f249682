"""Losses that were not finite are null in the record, and whoever reads it says so."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from argosy.config.resolve import resolve
from argosy.data.open import RunData
from argosy.launch.target import logged_progress
from argosy.parallel.mesh import Mesh
from argosy.record.rundir import RunDir
from argosy.train.closing import closing_lines
from argosy.train.validations import Validations


def recorded(path: Path, losses: list[float | None]) -> RunDir:
    rows = [
        {"step": step, "steps": 9, "time": 1.0, "loss": loss, "eta_s": 5, "validation_loss": loss}
        for step, loss in enumerate(losses, 1)
    ]
    path.mkdir(exist_ok=True)
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return RunDir(path)


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        ([None, None], "no validation loss was finite"),
        ([None, 2.5, 3.0], "best validation loss 2.5000 at step 2"),
        ([2.5, None], "best validation loss 2.5000 at step 1"),
    ],
)
def test_a_run_ends_with_its_best_finite_loss(losses: list[float | None], said: str, tmp_path: Path) -> None:
    keys = ["model=gpt2", "data.train=synthetic", "train.global_batch=8", "train.steps=9", "optim.lr=1e-3"]
    data = RunData(resolve(None, keys).spec, [], None)
    assert said in closing_lines(recorded(tmp_path, losses), 0, data)[0]


def test_the_progress_of_a_run_tells_a_loss_that_is_not_finite(tmp_path: Path) -> None:
    recorded(tmp_path, [2.5, None])
    assert logged_progress(SimpleNamespace(directory=tmp_path)) == "step 2/9, loss not finite, ETA 5s"  # type: ignore[arg-type]


@pytest.mark.parametrize(("losses", "ended"), [([2.5, None, None], True), ([None, None, 2.5], False)])
def test_patience_counts_them_as_no_lower_loss(losses: list[float | None], ended: bool, tmp_path: Path) -> None:
    keys = [
        "model=gpt2",
        "data.train=synthetic",
        "train.global_batch=8",
        "train.steps=9",
        "optim.lr=1e-3",
        "eval.patience=2",
    ]
    validations = Validations(recorded(tmp_path, losses), resolve(None, keys).spec, Mesh(torch.device("cpu")))
    assert validations.begin(3) == ended
