"""`argosy ckpt ls` lists the checkpoints, whether their hashes are right, and which one a restart would load."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from argosy.checkpoint.listing import list_run
from argosy.checkpoint.manifest import TrainProgress
from argosy.checkpoint.save import save


def _run(root: Path) -> Path:
    for step in (1, 2, 3):
        save(root / "checkpoints", TrainProgress(step, 8 * step), {"w": torch.ones(4)}, {"m": torch.ones(4)})
    (root / "resolved.json").write_text("{}")
    return root


def test_the_newest_good_one_is_what_a_restart_takes(tmp_path: Path) -> None:
    run = _run(tmp_path / "run")
    (run / "checkpoints" / "step-00000003" / "weights.safetensors").write_bytes(b"damaged")
    found = list_run(run)
    assert [(one.step, one.good, one.resumes) for one in found] == [
        (3, False, False),
        (2, True, True),
        (1, True, False),
    ]
    assert "weights.safetensors" in str(found[0].fault)
    assert found[1].consumed_samples == 16
    # A wrong length is found without hashing.
    assert [one.good for one in list_run(run, check=False)] == [False, None, None]


def test_no_run_goes_on_in_an_imported_model(tmp_path: Path) -> None:
    model = _run(tmp_path / "model")
    (model / "resolved.json").rename(model / "model.json")
    assert [(one.good, one.resumes) for one in list_run(model)] == [(True, False)] * 3


def test_the_verb_prints_a_table_or_json(tmp_path: Path, argosy: Callable[..., Any]) -> None:
    run = _run(tmp_path / "run")
    shown = argosy("ckpt", "ls", run)
    assert shown.returncode == 0
    assert shown.stdout.splitlines()[1].endswith("good, next")
    assert [one["step"] for one in json.loads(argosy("ckpt", "ls", run, "--json").stdout)] == [3, 2, 1]
    assert argosy("ckpt", "ls", tmp_path / "none").returncode == 2
