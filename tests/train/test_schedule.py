"""Schedules against their closed forms, and a batch that grows: counted, scheduled and resumed right."""

from __future__ import annotations

import ast
import gc
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from argosy.config import lr_schedules
from argosy.config.batches import Batches
from argosy.config.lr_schedules import LR_SCHEDULES, SHAPES, LrSchedule
from argosy.config.resolve import resolve
from argosy.config.schema import OptimSpec, RampupSpec, RunSpec
from argosy.config.units import Duration
from argosy.errors import ArgosyError
from argosy.measure.dry_run import dry_run
from argosy.parallel.mesh import Mesh
from argosy.record.jsonl import read_metrics
from argosy.train.run import TrainOptions, train
from argosy.train.schedule import Schedule, make_schedule
from argosy.train.session import open_session
from argosy.train.step import COLLECT_EVERY, StepwiseCollection

Write = Callable[..., Path]
RAMP = {"global_batch": 16, "steps": 12, "batch_rampup": {"start": 4, "increment": 4, "samples": 60}}


@pytest.fixture(scope="module")
def base() -> RunSpec:
    keys = ["model=gpt2-xl", "data.train=x", "data.seq_len=8", "parallel.micro_batch=1"]
    return resolve(None, [*keys, "train.global_batch=1", "train.steps=1", "optim.lr=1"]).spec


def schedule_of(base: RunSpec, kind: str, *, steps: int, batch: int = 1, ramp: Any = None, **optim: Any) -> Schedule:
    train = base.train.model_copy(update={"global_batch": batch, "batch_rampup": ramp, "steps": steps})
    rates = OptimSpec.model_validate({"schedule": kind, **optim})
    return make_schedule(base.model_copy(update={"train": train, "optim": rates}), steps=steps, epoch_samples=0)


def test_a_new_schedule_is_an_entry_of_the_registry(base: RunSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "square", lambda done: (1 - done) ** 2)
    monkeypatch.setitem(LR_SCHEDULES, "quadratic", LrSchedule("square"))
    optim = base.optim.model_copy(update={"schedule": "quadratic", "min_lr": 0.0})
    made = make_schedule(base.model_copy(update={"optim": optim}), steps=11, epoch_samples=0)
    assert [made.lr(step) for step in (0, 5, 10)] == pytest.approx([1.0, 0.25, 0.0])


def test_nothing_but_the_registry_compares_the_names_of_schedules() -> None:
    source, keys = Path(lr_schedules.__file__).parents[1], ("schedule", "decay_shape")
    found = []
    for path in sorted(source.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Compare):
                continue
            inner = list(ast.walk(node))
            is_key = any(
                (isinstance(part, ast.Attribute) and part.attr in keys)
                or (isinstance(part, ast.Constant) and part.value in ("optim.schedule", "optim.decay_shape"))
                for part in inner
            )
            if is_key and any(isinstance(part, ast.Constant) and part.value in LR_SCHEDULES for part in inner):
                found.append(f"{path.relative_to(source)}:{node.lineno}")
    assert not found


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant"])
def test_the_schedule_rises_peaks_and_lands(kind: str, base: RunSpec) -> None:
    schedule = schedule_of(base, kind, lr=1.0, min_lr=0.1, warmup=10, steps=100)
    rates = [schedule.lr(step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == rates[10] == 1.0
    assert rates[:10] == sorted(rates[:10])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] == pytest.approx(1.0 if kind == "constant" else 0.1)
    if kind != "constant":
        assert schedule.lr(10 + 89 // 2) == pytest.approx(0.55, abs=0.01)
    assert schedule.lr(500) == pytest.approx(rates[-1])


def test_inverse_square_root_has_its_closed_form_and_a_floor(base: RunSpec) -> None:
    schedule = schedule_of(base, "inverse_sqrt", lr=2.0, min_lr=0.5, warmup=10, steps=1000)
    assert [schedule.lr(step) for step in (0, 9, 10)] == pytest.approx([0.2, 2.0, 2.0])
    for step in (11, 40, 100):
        assert schedule.lr(step) == pytest.approx(2.0 * math.sqrt(10 / step))
    assert schedule.lr(999) == 0.5
    assert schedule_of(base, "inverse_sqrt", lr=2.0, min_lr=0.0, steps=10).lr(4) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("shape", "left"),
    [
        ("linear", lambda d: 1 - d),
        ("cosine", lambda d: (1 + math.cos(math.pi * d)) / 2),
        ("sqrt", lambda d: 1 - math.sqrt(d)),
        ("exponential", lambda d: 2 * 0.5**d - 1),
    ],
)
def test_wsd_stays_and_falls_over_its_decay(shape: str, left: Callable[[float], float], base: RunSpec) -> None:
    schedule = schedule_of(base, "wsd", lr=1.0, min_lr=0.1, warmup=10, steps=100, decay=20, decay_shape=shape)
    assert [schedule.lr(step) for step in (9, 10, 50, 79)] == [1.0] * 4
    for number in range(1, 21):  # the k-th of the last 20 steps
        assert schedule.lr(79 + number) == pytest.approx(0.1 + 0.9 * left(number / 20))
    assert schedule.lr(99) == pytest.approx(0.1)


@pytest.mark.parametrize("kind", ["cosine", "linear", "inverse_sqrt", "wsd"])
def test_without_a_ramp_samples_and_steps_give_the_same_bits(kind: str, base: RunSpec) -> None:
    optim = {"lr": 3e-4, "min_lr": 3e-5, "warmup": 7, "decay": 30, "steps": 90}
    by_steps, by_samples = schedule_of(base, kind, **optim), schedule_of(base, kind, batch=24, **optim)
    assert [by_steps.lr(step) for step in range(90)] == [by_samples.lr(step) for step in range(90)]


def test_while_the_batch_grows_the_schedule_follows_the_samples(base: RunSpec) -> None:
    batches, ramp = Batches(16, (4, 4, 60)), RampupSpec(start=4, increment=4, samples=60)
    schedule = schedule_of(base, "linear", lr=1.0, min_lr=0.0, steps=30, batch=16, ramp=ramp)
    last = batches.samples(29)
    for step in range(30):
        assert schedule.lr(step) == pytest.approx(1 - batches.samples(step) / last)


def test_schedules_that_cannot_be_are_refused(write_spec: Write) -> None:
    for optim, key in (
        ({"schedule": "wsd"}, "optim.decay"),
        ({"schedule": "cosine", "decay": 3}, "optim.decay"),
        ({"schedule": "linear", "decay_shape": "sqrt"}, "optim.decay_shape"),
        ({"schedule": "wsd", "decay": "3min"}, "optim.decay"),
        ({"schedule": "wsd", "decay": 5, "warmup": 2}, "optim.decay"),
        ({"schedule": "wsd", "decay": 6, "warmup": 6}, "optim.warmup"),
    ):
        with pytest.raises(ArgosyError) as refusal:
            resolve(write_spec(optim={"lr": 1e-3} | optim))
        assert refusal.value.key == key
    assert resolve(write_spec(optim={"lr": 1e-3, "schedule": "wsd", "decay": "500tok"})).spec.optim.decay is not None


def test_a_growing_batch_is_counted_in_samples_and_tokens(write_spec: Write, tmp_path: Path) -> None:
    path = write_spec(train=RAMP, optim={"lr": 1e-3, "schedule": "linear", "warmup": "32sp"}, eval=False)
    assert train(resolve(path), path, TrainOptions(quiet=True)) == 0
    metrics = read_metrics(tmp_path / "runs" / "tiny" / "metrics.jsonl")
    sizes = [4] * 5 + [8] * 3 + [12] * 2 + [16] * 2  # a third of 60 samples at each size: 20, 44 after 8, 68 after 10
    consumed = [sum(sizes[:n]) for n in range(1, 13)]
    assert [record["samples"] for record in metrics.values()] == consumed
    assert [record["tokens"] for record in metrics.values()] == [32 * n for n in consumed]
    rates = [record["lr"] for record in metrics.values()]
    assert rates[0] == pytest.approx(1e-3 * 4 / 36)  # the warm-up of 32 samples ends with step 7, after 36
    assert rates[6] == pytest.approx(1e-3)


@pytest.mark.parametrize("decay", ["16sp", "512tok", "1ba"])
def test_a_fall_in_samples_is_counted_from_the_end_where_the_batch_has_grown(write_spec: Write, decay: str) -> None:
    path = write_spec(train=RAMP, optim={"lr": 1e-3, "schedule": "wsd", "decay": decay})
    schedule = open_session(resolve(path).spec, Mesh(torch.device("meta"))).schedule
    # One step of 16 samples; of the first steps, of 4, it would be four.
    assert [schedule.lr(step) for step in (9, 10, 11)] == pytest.approx([1e-3, 1e-3, 1e-4])


def test_a_fall_in_steps_before_decay_end_is_of_the_steps_there(write_spec: Write) -> None:
    optim = {"lr": 1e-3, "min_lr": 0, "schedule": "wsd", "decay": "2ba", "decay_end": "11ba"}
    schedule = open_session(resolve(write_spec(train=RAMP, optim=optim)).spec, Mesh(torch.device("meta"))).schedule
    # Steps 10 and 11, of 12 and 16 samples; of the first steps, of 4, it would be half of one.
    assert [schedule.lr(step) for step in (8, 9, 10, 11)] == pytest.approx([1e-3, 1e-3, 1e-3 * 16 / 28, 0.0])


def test_a_fall_longer_than_the_run_is_refused_however_it_is_counted(write_spec: Write) -> None:
    for decay in ("101sp", "13ba"):  # twelve steps take 100 samples
        with pytest.raises(ArgosyError) as refusal:
            resolve(write_spec(train=RAMP, optim={"lr": 1e-3, "schedule": "wsd", "decay": decay}))
        assert refusal.value.key == "optim.decay"
    assert resolve(write_spec(train=RAMP, optim={"lr": 1e-3, "schedule": "wsd", "decay": "100sp"})).spec.optim.decay


@pytest.mark.parametrize(
    ("length", "steps"), [("train.samples=45", 9), ("train.tokens=1440", 9), ("train.samples=44", 8)]
)
def test_lengths_in_samples_and_tokens_end_where_they_say(write_spec: Write, length: str, steps: int) -> None:
    spec = resolve(write_spec(train=RAMP), [length]).spec
    assert open_session(spec, Mesh(torch.device("meta"))).steps == steps


def test_a_run_stopped_while_its_batch_grows_goes_on_bit_for_bit(write_spec: Write, tmp_path: Path) -> None:
    path = write_spec(train=RAMP, optim={"lr": 1e-3, "schedule": "constant"})
    for name, lengths in (("whole", [12]), ("cut", [3, 7, 12])):
        for steps in lengths:
            assert train(resolve(path, [f"name={name}", f"train.steps={steps}"]), path, TrainOptions(quiet=True)) == 0
    whole, cut = (tmp_path / "runs" / name for name in ("whole", "cut"))
    found = [
        [(r["loss"], r["grad_norm"]) for r in read_metrics(run / "metrics.jsonl").values()] for run in (whole, cut)
    ]
    assert found[0] == found[1]
    last = "checkpoints/step-00000012/weights.safetensors"
    assert (whole / last).read_bytes() == (cut / last).read_bytes()
    with pytest.raises(ArgosyError, match=r"train\.batch_rampup"):
        train(resolve(path, ["name=cut", "train.batch_rampup.samples=90"]), path, TrainOptions(quiet=True))


def test_a_dry_run_says_how_the_batch_grows(write_spec: Write) -> None:
    lines = dry_run(resolve(write_spec(train=RAMP)), TrainOptions())
    assert any("128 tokens at first, growing, and from step 11 on 512 tokens each" in line for line in lines)


def test_what_is_due_by_samples_is_due_at_the_step_that_takes_the_last_of_them(write_spec: Write) -> None:
    session = open_session(resolve(write_spec(train=RAMP)).spec, Mesh(torch.device("meta")))
    by_samples, by_steps = session.timer(Duration(20, "samples")), session.timer(Duration(2, "steps"))
    # The steps end with 20, 44, 68, 84 and 100 samples.
    assert [step for step in range(1, 13) if by_samples.due(step)] == [5, 8, 10, 11, 12]
    assert [step for step in range(1, 13) if by_steps.due(step)] == [2, 4, 6, 8, 10, 12]


def test_z_loss_is_trained_and_recorded(write_spec: Write, tmp_path: Path) -> None:
    path = write_spec()
    for name, weight in (("without", 0.0), ("with", 0.1)):
        train(resolve(path, [f"name={name}", f"train.z_loss={weight}"]), path, TrainOptions(quiet=True))
    without, with_z = (read_metrics(tmp_path / "runs" / name / "metrics.jsonl") for name in ("without", "with"))
    assert "z_loss" not in without[1]
    assert with_z[1]["loss"] == without[1]["loss"]  # the loss on the record is the cross-entropy alone
    assert with_z[1]["z_loss"] == pytest.approx(0.1 * math.log(257) ** 2, rel=0.05)
    assert with_z[6]["z_loss"] < with_z[1]["z_loss"]


def test_collection_is_by_steps_and_pythons_own_is_back_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    thawed: list[bool] = []
    monkeypatch.setattr(gc, "unfreeze", lambda: thawed.append(True))  # which conftest keeps from happening

    class Knot:
        pass

    with StepwiseCollection() as collection:
        assert not gc.isenabled()
        knot = Knot()
        knot.itself = knot  # type: ignore[attr-defined]
        del knot
        collection.after(COLLECT_EVERY - 1)
        assert any(isinstance(thing, Knot) for thing in gc.get_objects())
        collection.after(COLLECT_EVERY)
        assert not any(isinstance(thing, Knot) for thing in gc.get_objects())
        assert not thawed
    assert gc.isenabled()
    assert thawed
