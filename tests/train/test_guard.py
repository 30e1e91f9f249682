"""Steps with bad numbers are skipped, then rewound past, then stop the run; a healthy run does not notice the guard."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
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


def judge(guard: Guard, step: int, loss: float, norm: float, excused: bool = False, samples: int = 8) -> bool:
    return bool(guard.judge(step, torch.tensor(loss), torch.tensor(norm), torch.tensor(excused), samples))


def usual(guard: Guard, losses: Sequence[float], norms: Sequence[float], samples: int = 8) -> int:
    """How many of these steps the guard skips."""
    return sum(
        judge(guard, n, float(loss), float(norm), samples=samples)
        for n, (loss, norm) in enumerate(zip(losses, norms, strict=True))
    )


def test_what_is_no_number_is_skipped_from_the_first_step_on_and_with_sigma_spikes_once_the_usual_is_known() -> None:
    guard = Guard(GuardSpec(window=8, sigma=6), CPU)
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


def test_with_sigma_one_spike_does_not_blind_the_guard_and_a_new_level_is_accepted_after_a_few() -> None:
    guard = Guard(GuardSpec(window=32, sigma=6), CPU)
    for step in range(32):
        judge(guard, step, 2.0 + step % 3 / 50, 1.0)
    assert judge(guard, 32, 1e9, 1.0)
    assert judge(guard, 33, 5.0, 1.0), "the spike before did not raise the limit to its own height"
    rejected = [judge(guard, step, 2.6, 1.0) for step in range(34, 70)]
    assert rejected[-1] is False


def spread(rng: np.random.Generator, kind: str, steps: int) -> np.ndarray[Any, Any]:
    """Norms of a healthy run: heavy tails, slow trends, levels that change."""
    noise = rng.lognormal(0, 0.5, steps)
    position = np.arange(steps) / steps
    return {
        "log-normal": rng.lognormal(0, 1.2, steps),
        "pareto": 1 + rng.pareto(2.0, steps),
        "grows": noise * np.exp(8 * position),
        "falls": noise * np.exp(-8 * position),
        "warm-up, then a step": noise * np.where(position < 0.5, 0.01, 1.0),
        "batch ramp-up": noise / np.sqrt(1 + 31 * position),
        "another level after a restart": noise * np.where(position < 0.5, 1.0, 30.0),
    }[kind]


@pytest.mark.parametrize(
    "kind",
    [
        "log-normal",
        "pareto",
        "grows",
        "falls",
        "warm-up, then a step",
        "batch ramp-up",
        "another level after a restart",
    ],
)
@pytest.mark.parametrize("samples", [1, 64])
def test_no_step_of_a_healthy_run_is_skipped(kind: str, samples: int) -> None:
    """With a window of 16 steps, which makes spikes of what 128 would hold."""
    rng = np.random.default_rng(samples)
    norms = spread(rng, kind, 600)
    falling = 2 + 3.5 * np.exp(-np.arange(600) / 100)
    losses = falling + rng.lognormal(-2, 1, 600) / np.sqrt(samples)
    guard = Guard(GuardSpec(window=16), CPU, guessing=5.5)
    assert usual(guard, losses.tolist(), norms.tolist(), samples) == 0
    strict = Guard(GuardSpec(window=16, sigma=6), CPU)
    assert kind not in ("pareto", "log-normal") or usual(strict, losses.tolist(), norms.tolist()) > 0


def test_a_rare_document_in_a_small_batch_is_no_fault_and_a_batch_worse_than_guessing_is() -> None:
    """The numbers of a run on Python sources with 3 foreign documents in 1,000: loss 8.26 and norm 84 against 9 in the window."""
    for samples, skipped in ((1, False), (7, False), (8, True), (1024, True)):
        guard = Guard(GuardSpec(window=4), CPU, guessing=5.7)
        assert usual(guard, [5.71, 4.0, 3.0, 2.3], [2.3, 9.0, 2.0, 2.1], samples) == 0
        assert judge(guard, 5, 8.26, 84.4, samples=samples) is skipped
        assert not judge(guard, 6, 7.0, 84.4, samples=samples), "the loss has to agree"
        assert not judge(guard, 7, 8.26, 160.0, samples=samples), "the norm has to agree: it has been at 84 by now"


def test_an_absurd_norm_is_a_fault_by_itself_and_a_spike_does_not_raise_the_limits() -> None:
    guard = Guard(GuardSpec(window=4), CPU, guessing=5.7)
    assert usual(guard, [5.0] * 4, [1.0, 3.0, 1.0, 1.0], samples=1) == 0
    assert not judge(guard, 5, 5.0, 2999.0, samples=1)
    guard = Guard(GuardSpec(window=4), CPU, guessing=5.7)
    usual(guard, [5.0] * 4, [1.0, 3.0, 1.0, 1.0], samples=1)
    assert [judge(guard, step, 5.0, 3001.0, samples=1) for step in range(5, 9)] == [True] * 4
    skipped, streak = guard.report()
    assert (streak, skipped[0].norm_limit, skipped[0].reason) == (4, 3000.0, "spike")
    assert skipped[0].cause == "gradient norm 3001 is above the limit 3000 and loss is 5"


def test_steps_without_a_gradient_say_nothing_about_what_is_usual() -> None:
    guard = Guard(GuardSpec(window=4), CPU)
    assert usual(guard, [0.0] * 5 + [6.0] * 3, [0.0] * 5 + [2.0] * 3) == 0


@given(values, st.integers(0, 40), st.sampled_from([None, 6.0]))
@settings(max_examples=40, deadline=None)
def test_a_guard_that_was_saved_and_loaded_decides_as_one_that_was_not(
    steps: list[tuple[float, float, bool]], cut: int, sigma: float | None
) -> None:
    one, two = (Guard(GuardSpec(window=4, sigma=sigma), CPU) for _ in range(2))
    for step, (loss, norm, excused) in enumerate(steps):
        if step == cut:
            fresh = Guard(GuardSpec(window=4, sigma=sigma), CPU)
            fresh.load(two.numbers())
            two = fresh
        assert judge(one, step, loss, norm, excused) == judge(two, step, loss, norm, excused)
    assert one.numbers() == two.numbers()


def test_the_state_of_a_checkpoint_without_extremes_is_that_of_its_window() -> None:
    guard = Guard(GuardSpec(window=4), CPU)
    usual(guard, [5.0, 4.0, 3.0, 2.0, 2.5], [9.0, 1.0, 3.0, 1.0, 2.0])
    older = {name: value for name, value in guard.numbers().items() if "highest" not in name}
    loaded = Guard(GuardSpec(window=4), CPU)
    loaded.load(older)
    assert [loaded.numbers()[f"guard/highest/{kind}"] for kind in ("loss", "norm")] == [4.0, 3.0]
    assert loaded.numbers()["guard/entered"] == 5


def go(path: Path, *overrides: str) -> int:
    return train(resolve(path, list(overrides)), path, TrainOptions(quiet=True))


def poison(monkeypatch: pytest.MonkeyPatch, *batches: int) -> None:
    """Whoever computes the gradients of these samples (global batches of 8, counted from 0) gets no numbers."""
    take_step = loop.take_step

    def poisoned(engine: Any, optimizer: Any, batch: Any, **options: Any) -> Any:
        forward_backward = engine.forward_backward

        def hurt(*arguments: Any) -> Any:
            result = forward_backward(*arguments)
            stream = hurt.trainer.session.stream  # type: ignore[attr-defined]
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

    def remembered(self: Any, *arguments: Any, **options: Any) -> int:
        current.append(self)
        return fit(self, *arguments, **options)

    monkeypatch.setattr(loop.Trainer, "fit", remembered)
    monkeypatch.setattr(loop, "take_step", poisoned)


def result(run: Path) -> tuple[list[Any], dict[str, bytes]]:
    checkpoint = latest(run / "checkpoints", print)
    assert checkpoint is not None
    losses = [record.get("loss") for record in read_metrics(run / "metrics.jsonl").values()]
    return losses, {name: tensor.numpy().tobytes() for name, tensor in checkpoint.weights().items()}


def test_a_healthy_run_is_the_same_bit_for_bit_with_and_without_a_guard(write_spec: Write, tmp_path: Path) -> None:
    """The default, but for a window that is full before the run ends."""
    for name, guard in (("with", "guard.window=3"), ("without", "guard=off")):
        assert (
            go(write_spec(), f"name={name}", guard, "train.global_batch=1", "parallel.micro_batch=1", "train.steps=12")
            == EXIT_DONE
        )
    assert result(tmp_path / "runs" / "with") == result(tmp_path / "runs" / "without")


def test_a_bad_batch_is_skipped_recorded_with_its_samples_and_leaves_the_weights_alone(
    write_spec: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    poison(monkeypatch, 2)
    path = write_spec(log={"every": 4})  # the host learns of it a step later
    assert train(resolve(path, []), path, TrainOptions()) == EXIT_DONE
    said = capsys.readouterr().out
    assert "warning: step 3 skipped, weights unchanged: the loss is" in said
    assert "and the gradient norm nan. Look at samples 16 to 23" in said
    assert "the guard skipped 1 of 6 steps; events.jsonl has" in said
    assert " | 1 skipped | " in said
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
    # A run that is resumed later keeps to the position, and knows of the steps that were skipped before the rewind.
    state = latest(run / "checkpoints", print)
    assert state is not None
    assert state.progress.optimizer["guard/passed/0/count"] == 16
    assert state.progress.optimizer["guard/skipped"] == 3


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
