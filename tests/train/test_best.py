"""The checkpoint with the lowest validation loss is kept and can be named; a run whose loss no longer falls ends early."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from argosy.checkpoint.listing import list_run
from argosy.checkpoint.pruning import prune_run
from argosy.checkpoint.source import open_source
from argosy.checkpoint.store import latest, listed
from argosy.config.resolve import resolve
from argosy.errors import EXIT_DONE, ArgosyError
from argosy.record.jsonl import read_jsonl, read_metrics
from argosy.train.run import TrainOptions, train

Write = Callable[..., Path]
# The loss rises from the first step on: the learning rate is far too high.
RISING = {
    "optim": {"lr": 1.0, "schedule": "constant"}, "guard": "off", "train": {"global_batch": 8, "steps": 11},
    "eval": {"every": 1, "batches": 1}, "log": {"every": 4},
}  # fmt: skip


def go(path: Path, *overrides: str) -> int:
    return train(resolve(path, overrides), path, TrainOptions(quiet=True))


def losses_of(run: Path) -> dict[int, float]:
    metrics = read_metrics(run / "metrics.jsonl")
    return {step: record["validation_loss"] for step, record in metrics.items() if "validation_loss" in record}


def test_the_best_checkpoint_is_kept_named_and_survives_pruning(write_spec: Write, tmp_path: Path) -> None:
    saves = {"every": 100, "keep": 1, "mode": "sync", "best": "validation_loss"}
    assert go(write_spec(**RISING, checkpoint=saves)) == EXIT_DONE
    run = tmp_path / "runs" / "tiny"
    losses = losses_of(run)
    best = min(losses, key=losses.__getitem__)
    assert best < 11, "the loss should rise, or the test says nothing"
    assert [path.name for path in listed(run / "checkpoints")] == ["step-00000011", f"step-{best:08d}"]
    assert prune_run(run, keep=1, keep_every=None, dry_run=False).steps == []
    assert open_source(str(run / "best")).step == best
    assert open_source(str(run)).step == 11
    rows = {one.step: (one.best, one.validation_loss) for one in list_run(run, check=False)}
    assert rows == {11: (False, losses[11]), best: (True, losses[best])}


def test_without_an_evaluated_checkpoint_there_is_no_best_one(write_spec: Write, tmp_path: Path) -> None:
    go(write_spec(eval="off"), "train.steps=3")
    with pytest.raises(ArgosyError, match="so that none is known"):
        open_source(str(tmp_path / "runs" / "tiny" / "best"))
    with pytest.raises(ArgosyError, match="evaluation is off"):
        resolve(write_spec(eval="off"), ["checkpoint.best=validation_loss"])


def test_a_run_that_stops_early_is_done_and_goes_on_bit_for_bit_with_more_patience(
    write_spec: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_spec(**RISING, name="whole")
    assert go(path) == EXIT_DONE
    losses = list(losses_of(tmp_path / "runs" / "whole").values())
    path = write_spec(**RISING, name="early")
    assert go(path, "eval.patience=2") == EXIT_DONE
    run = tmp_path / "runs" / "early"
    taken = list(losses_of(run).values())
    assert taken == losses[: len(taken)]
    assert len(taken) < 11
    assert min(taken[-2:]) >= min(taken[:-2])
    assert [event["event"] for event in read_jsonl(run / "events.jsonl")][-2:] == ["early-stop", "done"]
    # Started again, it has nothing to do.
    assert train(resolve(path, ["eval.patience=2"]), path, TrainOptions()) == EXIT_DONE
    assert f"stopped early at step {len(taken)} of 11" in capsys.readouterr().out
    assert go(path) == EXIT_DONE
    one, other = (latest(tmp_path / "runs" / name / "checkpoints", print) for name in ("whole", "early"))
    assert one is not None
    assert other is not None
    ours, theirs = one.weights(), other.weights()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours.infos)


def test_a_fall_smaller_than_min_delta_does_not_count(write_spec: Write, tmp_path: Path) -> None:
    path = write_spec(eval={"every": 1, "batches": 1, "patience": 3, "min_delta": 1000})
    assert go(path, "train.steps=9") == EXIT_DONE
    # The first loss is the lowest so far, and three more are none.
    assert list(losses_of(tmp_path / "runs" / "tiny")) == [1, 2, 3, 4]
