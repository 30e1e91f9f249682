"""A save that is killed at any line leaves a good checkpoint, and nothing half-written that looks like one."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from argosy.checkpoint.manifest import TrainProgress, verify
from argosy.checkpoint.save import save
from argosy.checkpoint.store import latest, listed, prune, step_of, sweep

PLACE = str(Path("argosy") / "checkpoint")


def save_step(root: Path, step: int) -> None:
    tensors = {"w": torch.full((3, 4), float(step)), "v": torch.arange(5.0) * step}
    save(root, TrainProgress(step, step * 8), tensors, tensors)
    prune(root, 1, newest=step)


def save_until(root: Path, line: int) -> int:
    """Save step 2 in a process that kills itself at the n-th line it runs of the code. Returns its wait status."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    count = 0

    def trace(frame: FrameType, kind: str, argument: Any) -> Any:
        nonlocal count
        if PLACE not in frame.f_code.co_filename:
            return None
        count += kind == "line"
        if count == line:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)
    save_step(root, 2)
    os._exit(0)


def kill_at(root: Path, line: int) -> bool:
    """Kill a save at the n-th line. Returns whether it finished before that line."""
    save_step(root, 1)
    status = save_until(root, line)
    faults: list[str] = []
    found = latest(root, report=faults.append)
    assert found is not None
    assert not faults
    assert all(verify(path).progress.step == step_of(path) for path in listed(root))
    sweep(root)
    assert sorted(path.name for path in root.iterdir()) == sorted(path.name for path in listed(root))
    assert status or found.progress.step == 2
    return status == 0


@pytest.mark.parametrize("stride", [31, pytest.param(1, marks=[pytest.mark.slow, pytest.mark.timeout(3000)])])
def test_killed_at_any_line(tmp_path: Path, stride: int) -> None:
    lines = iter(range(1, 100_000, stride))
    killed = 0
    while not kill_at(tmp_path / str(killed), next(lines)):
        killed += 1
    assert killed > 5
