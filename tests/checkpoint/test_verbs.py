"""`argosy ckpt` on checkpoints written by one rank or by several: list, verify, prune, diff, average."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from argosy.checkpoint.average import average
from argosy.checkpoint.difference import compare
from argosy.checkpoint.listing import describe, list_run
from argosy.checkpoint.pruning import prune_run
from argosy.checkpoint.source import open_source
from argosy.cli.checkpoint import verify_checkpoints
from argosy.config.resolve import resolve
from argosy.errors import EXIT_DONE, ArgosyError
from argosy.train.run import TrainOptions, train

Write = Callable[..., Path]


@pytest.fixture
def run(write_spec: Write, tmp_path: Path) -> Path:
    """A run with checkpoints of steps 2, 4 and 6."""
    path = write_spec()
    assert train(resolve(path), path, TrainOptions(quiet=True)) == EXIT_DONE
    return tmp_path / "runs" / "tiny"


def test_a_list_says_what_people_ask_of_a_checkpoint(run: Path) -> None:
    newest = list_run(run)[0]
    assert (newest.step, newest.tokens, newest.good, newest.resumes) == (6, 6 * 8 * 32, True, True)
    assert newest.layout == "one process"
    assert newest.loss is not None
    assert newest.age_s is not None
    assert 0 <= newest.age_s < 600
    assert "one process" in describe(run, [newest])
    wide = replace(newest, layout="dp_shard 16 x tp 2 x pp 2", validation_loss=2.5, best=True, tokens=10**12)
    told = describe(run, [replace(wide, step=123_456), replace(newest, good=False, fault="a hash", resumes=False)])
    assert max(map(len, told.splitlines())) <= 100
    assert "good, next, best" in told
    assert "is damaged: a hash" in told
    assert "validation" not in describe(run, [replace(newest, validation_loss=None, best=False)])
    assert [one.step for one in list_run(run / "checkpoints" / "step-00000004")] == [4]


def test_verify_ends_with_a_refusal_where_one_is_damaged(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    verify_checkpoints(run)
    weights = run / "checkpoints" / "step-00000004" / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"oops")
    with pytest.raises(Exception) as ended:
        verify_checkpoints(run)
    assert ended.value.exit_code == 2  # type: ignore[attr-defined]
    assert "weights.safetensors has BLAKE3" in capsys.readouterr().out


def test_pruning_keeps_the_newest_good_one_whatever_it_is_told(run: Path) -> None:
    (run / "checkpoints" / "step-00000006" / "state.json").write_text("{}")
    told = prune_run(run, keep=1, keep_every=None, dry_run=True)
    assert (told.kept, told.steps) == (4, [2])
    assert len(list_run(run, check=False)) == 3
    prune_run(run, keep=1, keep_every=None, dry_run=False)
    assert [one.step for one in list_run(run, check=False)] == [6, 4]
    assert not list((run / "checkpoints").glob(".*"))


def test_a_diff_names_what_moved_and_by_how_much(run: Path) -> None:
    first, second = (str(run / "checkpoints" / f"step-{step:08d}") for step in (4, 6))
    found = compare(first, second, optimizer=True)
    assert not found.same
    weights = {n: open_source(w).read("embed.tokens.weight").double() for n, w in (("a", first), ("b", second))}
    embed = next(one for one in found.moved if one.name == "embed.tokens.weight")
    moved = weights["b"] - weights["a"]
    assert embed.relative == pytest.approx(float(moved.norm() / weights["a"].norm()))
    assert embed.largest == pytest.approx(float(moved.abs().max()))
    assert any(one.name.startswith("optimizer: exp_avg/") for one in found.moved)
    assert compare(first, first).moved == []
    assert "moved" in found.describe(3)


def test_an_average_is_the_mean_and_a_model_to_go_on_with(run: Path, tmp_path: Path) -> None:
    told = average([str(run)], tmp_path / "mean", last=2, dry_run=True)
    assert told.steps == [6, 4]
    assert not (tmp_path / "mean").exists()
    average([str(run)], tmp_path / "mean", last=2)
    sources = [open_source(str(run / "checkpoints" / f"step-{step:08d}")) for step in (4, 6)]
    mean = open_source(str(tmp_path / "mean"))
    for name in mean.infos:
        expected = (sources[0].read(name).double() + sources[1].read(name).double()) / 2
        assert torch.equal(mean.read(name), expected.float())
    assert mean.vocab_size == sources[0].vocab_size
    with pytest.raises(ArgosyError, match="two checkpoints or more"):
        average([str(run)], tmp_path / "other")


def test_models_whose_weights_only_have_the_same_shapes_are_not_averaged(
    run: Path, write_spec: Write, tmp_path: Path
) -> None:
    path = write_spec(name="other")
    overrides = ["model.heads=8", "model.kv_heads=4", "train.steps=2", "optim.warmup=0"]
    assert train(resolve(path, overrides), path, TrainOptions(quiet=True)) == EXIT_DONE
    with pytest.raises(ArgosyError, match=r"head_dim is 8 in .* and 4 in .*other") as refused:
        average([str(run), str(tmp_path / "runs" / "other")], tmp_path / "mean")
    assert refused.value.code == "checkpoint.mismatch"
