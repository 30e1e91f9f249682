"""Steps with bad numbers are skipped, then rewound past, then stop the run; a healthy run does not notice the guard."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy.checkpoint.store import latest
from argosy.config.resolve import resolve
from argosy.config.survival import GuardSpec
from argosy.errors import EXIT_DONE, ArgosyError
from argosy.record.jsonl import read_jsonl, read_metrics
from argosy.train import loop
from argosy.train.guard import Guard
from argosy.train.run import TrainOptions, train

Write = Callable[..., Path]
CPU = torch.device("cpu")
values = st.lists(
    st.tuples(
        st.floats(0.125, 100, width=32) | st.sampled_from([math.nan, math.inf, 1e30]),
        st.floats(0.125, 16, width=32) | st.sampled_from([math.nan, math.inf]),
        st.booleans(),
    ),
    max_size=40,
)


def judge(guard: Guard, step: int, loss: float, norm: float, excused: bool = False) -> bool:
    return bool(guard.judge(step, torch.tensor(loss), torch.tensor(norm), torch.tensor(excused)))


def test_what_is_no_number_is_skipped_from_the_first_step_on_and_spikes_once_the_usual_is_known() -> None:
    guard = Guard(GuardSpec(window=8), CPU)
    assert judge(guard, 1, math.nan, 1.0)
    assert judge(guard, 2, 3.0, math.inf)
    for step in range(3, 11):
        assert not judge(guard, step, 3.0 + step % 2 / 10, 1.0)
    assert not judge(guard, 11, 3.2, 1.05)
    assert judge(guard, 12, 30.0, 1.0)
    assert judge(guard, 13, 3.0, 40.0)
    assert not judge(guard, 14, 0.1, 0.01), "what is lower than usual is no spike"
    skipped, streak = guard.report()
    assert [(one.step, one.reason) for one in skipped] == [
        (1, "non-finite"), (2, "non-finite"), (12, "spike"), (13, "spike"),
    ]  # fmt: skip
    assert (streak, guard.skipped) == (0, 4)
    assert guard.report() == ([], 0), "each is reported once"


def test_one_spike_does_not_blind_the_guard_and_a_new_level_is_accepted_after_a_few() -> None:
    guard = Guard(GuardSpec(window=32), CPU)
    for step in range(32):
        judge(guard, step, 2.0 + step % 3 / 50, 1.0)
    assert judge(guard, 32, 1e9, 1.0)
    assert judge(guard, 33, 5.0, 1.0), "the spike before did not raise the limit to its own height"
    rejected = [judge(guard, step, 2.6, 1.0) for step in range(34, 70)]
    assert rejected[-1] is False


@given(values, st.integers(0, 40))
@settings(max_examples=40, deadline=None)
def test_a_guard_that_was_saved_and_loaded_decides_as_one_that_was_not(
    steps: list[tuple[float, float, bool]], cut: int
) -> None:
    one, two = Guard(GuardSpec(window=4), CPU), Guard(GuardSpec(window=4), CPU)
    for step, (loss, norm, excused) in enumerate(steps):
        if step == cut:
            fresh = Guard(GuardSpec(window=4), CPU)
            fresh.load(two.numbers())
            two = fresh
        assert judge(one, step, loss, norm, excused) == judge(two, step, loss, norm, excused)
    assert one.numbers() == two.numbers()


def go(path: Path, *overrides: str) -> int:
    return train(resolve(path, list(overrides)), path, TrainOptions(quiet=True))


def poison(monkeypatch: pytest.MonkeyPatch, *batches: int) -> None:
    """Whoever computes the gradients of these samples (global batches of 8, counted from 0) gets no numbers."""
    take_step = loop.take_step

    def poisoned(engine: Any, optimizer: Any, batch: Any, **options: Any) -> Any:
        forward_backward = engine.forward_backward

        def hurt(*arguments: Any) -> Any:
            result = forward_backward(*arguments)
            stream = hurt.trainer.stream  # type: ignore[attr-defined]
            if any((stream.batch(8 * n, 8).tokens == batch.tokens).all() for n in batches):
                next(engine.model.parameters()).grad.fill_(math.nan)
            return result

        hurt.trainer = current[-1]  # type: ignore[attr-defined]
        engine.forward_backward = hurt
        try:
            return take_step(engine, optimizer, batch, **options)
        finally:
            engine.forward_backward = forward_backward

    current: list[Any] = []
    fit = loop.Trainer.fit

    def remembered(self: Any, *arguments: Any) -> int:
        current.append(self)
        return fit(self, *arguments)

    monkeypatch.setattr(loop.Trainer, "fit", remembered)
    monkeypatch.setattr(loop, "take_step", poisoned)


def result(run: Path) -> tuple[list[Any], dict[str, bytes]]:
    checkpoint = latest(run / "checkpoints", print)
    assert checkpoint is not None
    losses = [record.get("loss") for record in read_metrics(run / "metrics.jsonl").values()]
    return losses, {name: tensor.numpy().tobytes() for name, tensor in checkpoint.weights().items()}


def test_a_healthy_run_is_the_same_bit_for_bit_with_and_without_a_guard(write_spec: Write, tmp_path: Path) -> None:
    for name, guard in (("with", "guard.window=3"), ("without", "guard=off")):
        assert (
            go(write_spec(), f"name={name}", guard, "guard.sigma=1000" if name == "with" else "log.every=1")
            == EXIT_DONE
        )
    assert result(tmp_path / "runs" / "with") == result(tmp_path / "runs" / "without")


def test_a_bad_batch_is_skipped_recorded_with_its_samples_and_leaves_the_weights_alone(
    write_spec: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, 2)
    assert go(write_spec(log={"every": 4})) == EXIT_DONE  # the host learns of it a step later
    events = [e for e in read_jsonl(tmp_path / "runs" / "tiny" / "events.jsonl") if e["event"] == "skip"]
    assert [(e["step"], e["samples"], e["reason"], e["grad_norm"]) for e in events] == [
        (3, [16, 23], "non-finite", "nan")
    ]
    metrics = read_metrics(tmp_path / "runs" / "tiny" / "metrics.jsonl")
    assert metrics[4]["skipped"] == 1
    assert all(
        math.isfinite(float(torch.frombuffer(bytearray(w), dtype=torch.float32).sum()))
        for w in result(tmp_path / "runs" / "tiny")[1].values()
    )


def test_bad_batches_in_a_row_are_passed_over_after_a_rewind_and_the_rest_of_the_steps_are_taken(
    write_spec: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, 3, 4, 5)
    path = write_spec(train={"global_batch": 8, "steps": 10}, guard={"skips": 2}, checkpoint={"every": 2})
    assert go(path) == EXIT_DONE
    run = tmp_path / "runs" / "tiny"
    events = [e for e in read_jsonl(run / "events.jsonl") if e["event"] in ("skip", "rewind")]
    assert [(e["event"], e["step"]) for e in events] == [
        ("skip", 4), ("skip", 5), ("rewind", 5), ("skip", 4),
    ]  # fmt: skip
    assert (events[2]["to"], events[2]["passed"]) == (2, [[24, 16]])
    assert events[3]["samples"] == [40, 47], "step 4 now reads the batch after those that were passed over"
    metrics = read_metrics(run / "metrics.jsonl")
    assert list(metrics) == list(range(1, 11))
    # A run that is resumed later keeps to the position.
    state = latest(run / "checkpoints", print)
    assert state is not None
    assert state.progress.optimizer["guard/passed/0/count"] == 16


def test_a_run_that_rewinding_does_not_cure_stops_with_its_history(
    write_spec: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, *range(2, 40))
    path = write_spec(train={"global_batch": 8, "steps": 30}, guard={"skips": 2, "rewinds": 1}, eval="off")
    with pytest.raises(ArgosyError) as refusal:
        go(path)
    assert refusal.value.code == "train.non-finite"
    assert "after 1 rewinds" in refusal.value.cause
    events = [e["event"] for e in read_jsonl(tmp_path / "runs" / "tiny" / "events.jsonl")]
    assert events.count("rewind") == 1
    assert latest(tmp_path / "runs" / "tiny" / "checkpoints", print).progress.step == 2  # type: ignore[union-attr]
