"""The parallelism lab's run specs, scaled down: the same steps on one rank and on two, however they share the work."""

from __future__ import annotations

from pathlib import Path

import pytest

from argosy.config.resolve import resolve
from argosy.errors import EXIT_DONE
from argosy.record.jsonl import read_metrics
from argosy.train.run import TrainOptions
from argosy.train.run import train as train_alone
from dist import runs
from dist.pool import Pool

LAB = Path(__file__).parents[2] / "examples" / "parallelism-lab"
LAYOUTS = ["dp2", "tp2", "sp2", "cp2", "pp2"]
SMALL = [
    "model.layers=2", "model.hidden=32", "model.heads=4", "model.ffn=64", "model.vocab_size=320", "model.max_seq_len=32",
    "data.seq_len=32", "data.split=[90, 10, 0]", "train.global_batch=8", "train.steps=4", "train.precision=fp32", "optim.warmup=1",
    "eval.every=2", "eval.batches=1", "checkpoint.every=4", "log.every=1",
]  # fmt: skip


def keys(tmp_path: Path, corpus: Path, micro_batch: int) -> list[str]:
    return [*SMALL, f"data.train={corpus}", f"runs_dir={tmp_path / 'runs'}", f"parallel.micro_batch={micro_batch}"]


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> dict[int, dict[str, float]]:
    directory = tmp_path_factory.mktemp("lab")
    path = LAB / "baseline.yaml"
    train_alone(resolve(path, keys(directory, corpus, 8)), path, TrainOptions(quiet=True))
    return read_metrics(directory / "runs" / "lab-baseline" / "metrics.jsonl")


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_of_the_lab_takes_the_steps_of_the_baseline(
    pool: Pool, tmp_path: Path, corpus: Path, baseline: dict[int, dict[str, float]], name: str
) -> None:
    path = LAB / f"{name}.yaml"
    micro_batch = 4 if name == "dp2" else 8
    codes = pool.run(2, runs.train, str(path), keys(tmp_path, corpus, micro_batch))
    assert set(codes) == {EXIT_DONE}
    found = read_metrics(tmp_path / "runs" / f"lab-{name}" / "metrics.jsonl")
    assert list(found) == list(baseline)
    for step, record in baseline.items():
        assert found[step]["loss"] == pytest.approx(record["loss"], rel=1e-5)
        assert found[step]["grad_norm"] == pytest.approx(record["grad_norm"], rel=1e-4)
    assert found[4]["validation_loss"] == pytest.approx(baseline[4]["validation_loss"], rel=1e-5)


def test_the_lab_is_one_baseline_and_its_layouts() -> None:
    assert {path.stem for path in LAB.glob("*.yaml")} == {"baseline", *LAYOUTS}
