"""Work between steps that needs memory beside a training's CUDA graphs: all ranks make room for it, whether they have a part of it or not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from argosy.config.resolve import resolve
from argosy.parallel.single import SingleDevice
from argosy.train.run import TrainOptions, train
from suites.local_tasks import write_tasks

Write = Callable[..., Path]
LLAMA = {"family": "llama", "layers": 1, "hidden": 32, "heads": 2, "vocab_size": 257}


@pytest.mark.parametrize("work", ["samples of text", "scores of tasks"])
def test_room_is_made_before_logits_are_computed_and_once_for_all_of_them(
    work: str, write_spec: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    logits = SingleDevice.logits

    def computed(*arguments: object, **inputs: object) -> torch.Tensor:
        done.append("logits")
        return logits(*arguments, **inputs)  # type: ignore[arg-type]

    monkeypatch.setattr(SingleDevice, "make_room", lambda self: done.append("room"))
    monkeypatch.setattr(SingleDevice, "logits", computed)
    if work == "samples of text":
        asked = {"log": {"every": 1, "samples": {"every": 3, "prompts": ["some words", ""], "tokens": 3}}}
    else:
        tasks = {"names": ["colours"], "dir": str(write_tasks(tmp_path / "tasks")), "every": 3, "limit": 3}
        asked = {"eval": {"every": 4, "batches": 1, "tasks": tasks}}
    path = write_spec(model=LLAMA, **asked)
    train(resolve(path, ["train.steps=3"]), path, TrainOptions(quiet=True))
    assert done[0] == "room"
    assert done.count("room") == 1
    assert "logits" in done
