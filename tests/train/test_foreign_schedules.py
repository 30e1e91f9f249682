"""The learning rates of other trainers, step by step: Megatron-LM's by megatron-core's own scheduler, Composer's and nanoGPT's by
their published formulas."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from megatron.core.num_microbatches_calculator import RampupBatchsizeNumMicroBatchesCalculator
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from argosy.config.foreign.draft import Draft
from argosy.config.foreign.foundry import from_foundry
from argosy.config.foreign.megatron import from_megatron
from argosy.config.lr_schedules import check_schedule
from argosy.config.resolve import resolve
from argosy.config.schema import OptimSpec, RunSpec, TrainSpec
from argosy.errors import ArgosyError
from argosy.train.schedule import make_schedule

MODEL = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --max-position-embeddings 8 --vocab-size 64 "
    "--hidden-dropout 0 --attention-dropout 0 --micro-batch-size 1 --data-path corpus --eval-iters 0 "
)
STYLES = [
    "--lr-decay-style linear",
    "--lr-decay-style cosine",
    "--lr-decay-style constant",
    "--lr-decay-style inverse-square-root",
    *(f"--lr-decay-style WSD --lr-wsd-decay-style {shape}" for shape in ("linear", "cosine", "exponential", "minus_sqrt")),
]  # fmt: skip
WARMUPS = [
    "",
    "--lr-warmup-{unit} {some}",
    "--lr-warmup-fraction 0.137",
    "--lr-warmup-fraction 0",
    "--lr-warmup-{unit} {some} --lr-warmup-init 1e-5",
]
ENDS = ["", "--min-lr 3e-5", "--min-lr 3e-5 --lr-decay-{unit} {less}", "--lr-decay-{unit} {more}"]


class Optimizer:
    """What the scheduler asks of an optimiser."""

    def __init__(self) -> None:
        self.param_groups: list[dict[str, Any]] = [{}]


def megatrons(words: str, steps: int) -> list[float]:
    """The rates of a run with these arguments: Megatron-LM's get_optimizer_param_scheduler and train_step in a few lines."""
    given: dict[str, list[str]] = {}
    for word in words.split():
        if word.startswith("--"):
            name = word[2:]
            given[name] = []
        else:
            given[name].append(word)
    value = {name: float(found[0]) for name, found in given.items() if len(found) == 1 and found[0][0] in "0123456789."}
    batch = int(value["global-batch-size"])
    unit, scale = ("iters", batch) if "train-iters" in value else ("samples", 1)
    length = int(value[f"train-{unit}"])
    end = int(value.get(f"lr-decay-{unit}", length)) * scale
    fraction, fall = value.get("lr-warmup-fraction"), value.get(f"lr-wsd-decay-{unit}")
    warmup = int(value.get(f"lr-warmup-{unit}", 0)) * scale if fraction is None else fraction * end
    optimizer = Optimizer()
    scheduler = OptimizerParamScheduler(
        optimizer,  # type: ignore[arg-type]
        init_lr=value.get("lr-warmup-init", 0.0), max_lr=value["lr"], min_lr=value.get("min-lr", 0.0), lr_warmup_steps=warmup,  # type: ignore[arg-type]
        lr_decay_steps=end, lr_decay_style=given["lr-decay-style"][0], start_wd=0.01, end_wd=0.01, wd_incr_steps=length * scale,
        wd_incr_style="constant", wsd_decay_steps=None if fall is None else int(fall) * scale,
        lr_wsd_decay_style=given.get("lr-wsd-decay-style", ["exponential"])[0],
    )  # fmt: skip
    ramp = None
    if "rampup-batch-size" in given:
        start, increment, samples = (int(word) for word in given["rampup-batch-size"])
        ramp = RampupBatchsizeNumMicroBatchesCalculator(batch, 1, 1, False, 1, start, increment, samples)
    rates, consumed = [], 0
    for _ in range(steps):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        if ramp is not None:
            ramp.update(consumed, consistency_check=True)
        size = batch if ramp is None else int(ramp.get_current_global_batch_size())
        scheduler.step(increment=size)
        consumed += size
    return rates


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> RunSpec:
    return spec_of(
        from_megatron(MODEL + "--train-iters 9 --global-batch-size 4 --lr 1"), tmp_path_factory.mktemp("spec")
    )


def spec_of(draft: Draft, tmp_path: Path) -> RunSpec:
    path = tmp_path / "run.yaml"
    path.write_text(draft.text("a test"))
    return resolve(path).spec


def ours(spec: RunSpec, steps: int) -> list[float]:
    known = spec.train.length.steps(spec.train.batches, seq_len=spec.data.seq_len)
    schedule = make_schedule(spec, steps=known or 0, epoch_samples=0)
    return [schedule.lr(step) for step in range(steps)]


def assert_equal_rates(words: str, steps: int, base: RunSpec) -> None:
    """`base` with the batch, the length and the rates that these words say; its file is not written and read each time."""
    draft = from_megatron(MODEL + words)
    assert draft.left == []
    optim, train = OptimSpec.model_validate(draft.tree["optim"]), TrainSpec.model_validate(draft.tree["train"])
    spec = base.model_copy(update={"optim": optim, "train": train})
    check_schedule(spec, {})
    assert ours(spec, steps) == pytest.approx(megatrons(words, steps), rel=1e-12, abs=0.0), words


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("unit", ["iters", "samples"])
def test_from_megatron_gives_megatrons_rate_at_every_step(style: str, unit: str, base: RunSpec) -> None:
    """Phases in samples do not end with a step of 6 samples."""
    run, some, less, more, fall = (60, 7, 41, 95, 13) if unit == "iters" else (360, 45, 247, 571, 80)
    for warmup, end in itertools.product(WARMUPS, ENDS):
        words = f"{style} --train-{unit} {run} --global-batch-size 6 --lr 3e-4 {warmup} {end}"
        if "WSD" in style:
            words += f" --lr-wsd-decay-{unit} {fall}"
        assert_equal_rates(words.format(unit=unit, some=some, less=less, more=more), 60, base)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("warmup", ["", "--lr-warmup-samples 50", "--lr-warmup-fraction .1"])
def test_while_megatrons_batch_grows_the_rate_is_megatrons(style: str, warmup: str, base: RunSpec) -> None:
    words = f"{style} {warmup} --train-samples 600 --global-batch-size 16 --rampup-batch-size 4 4 100 --lr 1e-3 --min-lr 1e-4"
    words += " --lr-wsd-decay-samples 150" * ("WSD" in style)
    assert_equal_rates(words, 46, base)
    assert_equal_rates(f"{words} --lr-decay-samples 333", 46, base)


def test_a_warm_up_longer_than_the_run_is_megatrons_too(base: RunSpec) -> None:
    words = "--lr-decay-style cosine --train-iters 10 --lr-decay-iters 4000 --lr-warmup-fraction .01 --global-batch-size 8 --lr 1"
    assert_equal_rates(words, 10, base)


@pytest.mark.parametrize(
    ("words", "samples"),
    [
        ("--train-samples 100 --global-batch-size 16", 96),
        ("--train-samples 96 --global-batch-size 16", 96),
        ("--train-samples 110 --global-batch-size 16 --rampup-batch-size 4 4 60", 100),
        ("--train-samples 10 --global-batch-size 16 --rampup-batch-size 4 4 60", 12),
    ],
)
def test_a_length_in_samples_has_megatrons_steps(words: str, samples: int, tmp_path: Path) -> None:
    """Megatron's update_train_iters leaves a last batch out where it is not whole, but takes the steps of a ramp whole."""
    spec = spec_of(from_megatron(MODEL + words + " --lr 1"), tmp_path)
    assert spec.train.samples == samples
    assert spec.train.batches.samples(spec.train.batches.steps(samples)) == samples


def test_a_ramp_that_megatrons_floating_point_delays_is_said() -> None:
    ramp = RampupBatchsizeNumMicroBatchesCalculator(32, 1, 1, False, 1, 4, 4, 928)
    ramp.update(928, consistency_check=True)
    assert ramp.get_current_global_batch_size() == 28  # 928 / (928 / 7) is a little below 7
    words = MODEL + "--train-samples 4000 --global-batch-size 32 --lr 1 --rampup-batch-size 4 4 "
    assert any("after 928 samples a step has 32" in item for item in from_megatron(words + "928").left)
    assert not any("rampup" in item for item in from_megatron(words + "840").left)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--train-iters 9 --lr-warmup-samples 4", "--lr-warmup-samples 4"),
        ("--train-samples 9 --lr-decay-iters 4", "--lr-decay-iters 4"),
        ("--train-iters 9 --lr-warmup-iters 2 --lr-warmup-fraction .1", "--lr-warmup-iters 2"),
        ("--lr-warmup-fraction .1", "--lr-warmup-fraction 0.1"),
        ("--train-iters 9 --lr-decay-style other", "--lr-decay-style other"),
        ("--train-iters 9 --lr-decay-style WSD --lr-wsd-decay-style other", "--lr-wsd-decay-style other"),
        ("--train-iters 9 --start-weight-decay .01 --end-weight-decay .1 --weight-decay-incr-style cosine", "--start-weight-decay .01"),
        ("--train-iters 9 --start-weight-decay .01 --end-weight-decay .1 --weight-decay-incr-style cosine", "--end-weight-decay .1"),
        ("--train-iters 9 --start-weight-decay .01 --end-weight-decay .1 --weight-decay-incr-style cosine", "--weight-decay-incr-style"),
        ("--train-iters 9 --decoupled-lr 1e-3", "--decoupled-lr 1e-3"),
    ],
)  # fmt: skip
def test_what_is_not_taken_over_is_listed_by_its_name(words: str, named: str) -> None:
    assert any(item.startswith(named) for item in from_megatron(f"{MODEL} --global-batch-size 6 --lr 1 {words}").left)


def test_weight_decay_is_megatrons_where_it_stays_the_same(tmp_path: Path) -> None:
    for words, expected in (
        ("", 0.01),
        ("--weight-decay 0.2 --weight-decay-incr-style constant", 0.2),
        ("--weight-decay 0.2 --start-weight-decay 0 --end-weight-decay 0.3 --weight-decay-incr-style linear", 0.3),
    ):
        draft = from_megatron(f"{MODEL} --global-batch-size 6 --lr 1 --train-iters 9 {words}")
        assert spec_of(draft, tmp_path).optim.weight_decay == expected
        assert any("constant in Argosy" in item for item in draft.left) == ("linear" in words)


FOUNDRY = {
    "model": {"name": "mpt_causal_lm", "d_model": 16, "n_heads": 2, "n_layers": 2, "max_seq_len": 8, "vocab_size": 64},
    "train_loader": {"dataset": {"local": "mds", "max_seq_len": 8}},
    "optimizer": {"name": "decoupled_adamw", "lr": 6.0e-4},
    "global_train_batch_size": 6,
    "device_train_microbatch_size": 1,
}


def composers(kind: str, done: float, warmup: float, end: float, alpha_f: float) -> float:
    """Composer's multiplier after `done`: its CosineAnnealingWithWarmup-, LinearWithWarmup- and ConstantWithWarmupScheduler."""
    if done < warmup:
        return done / warmup
    share = min(1.0, (done - warmup) / (end - warmup))
    if kind == "constant_with_warmup":
        return 1.0
    if kind == "linear_decay_with_warmup":
        return 1.0 + share * (alpha_f - 1.0)
    return alpha_f + (1 - alpha_f) * (1 + math.cos(share * math.pi)) / 2


@pytest.mark.parametrize("kind", ["cosine_with_warmup", "linear_decay_with_warmup", "constant_with_warmup"])
@pytest.mark.parametrize(
    ("duration", "warmup", "end", "unit", "numbers"),
    [
        ("50ba", "7ba", None, 1, (7, 50)),
        ("50ba", "0.137dur", None, 1, (6, 50)),
        ("2400tok", "333tok", None, 48, (333, 2400)),
        ("300sp", "31sp", "377sp", 6, (31, 377)),
        ("50ba", "0ba", None, 1, (0, 50)),
    ],
)
def test_from_foundry_gives_composers_rate_at_every_step(
    kind: str, duration: str, warmup: str, end: str | None, unit: int, numbers: tuple[int, int], tmp_path: Path
) -> None:
    scheduler = {"name": kind, "t_warmup": warmup} | ({} if end is None else {"t_max": end})
    if kind != "constant_with_warmup":
        scheduler["alpha_f"] = 0.1  # type: ignore[assignment]
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(FOUNDRY | {"scheduler": scheduler, "max_duration": duration}))
    found = ours(spec_of(from_foundry(tmp_path / "train.yaml"), tmp_path), 50)
    theirs = [6.0e-4 * composers(kind, step * unit, *numbers, 0.1) for step in range(50)]
    assert found == pytest.approx(theirs, rel=1e-12, abs=0.0)


def nanogpts(step: int, *, lr: float, warmup: int, end: int, least: float) -> float:
    """get_lr of nanoGPT's train.py."""
    if step < warmup:
        return lr * (step + 1) / (warmup + 1)
    if step > end:
        return least
    share = (step - warmup) / (end - warmup)
    return least + 0.5 * (1.0 + math.cos(math.pi * share)) * (lr - least)


@pytest.mark.parametrize("end", [40, 60, 90])
def test_nanogpts_rates_can_be_written(end: int, write_spec: Any) -> None:
    optim = {"lr": 6e-4, "min_lr": 6e-5, "warmup": 9, "warmup_init": 6e-4 / 10, "decay_end": end}
    spec = resolve(write_spec(train={"global_batch": 8, "steps": 60}, optim=optim)).spec
    theirs = [nanogpts(step, lr=6e-4, warmup=9, end=end, least=6e-5) for step in range(60)]
    assert ours(spec, 60) == pytest.approx(theirs, rel=1e-12)


def test_a_schedule_with_an_end_of_its_own_does_not_move_with_the_runs_length(write_spec: Any) -> None:
    path = write_spec(optim={"lr": 1e-3, "warmup": 4, "warmup_init": 0, "decay_end": "160sp"})
    short, long = (ours(resolve(path, [f"train.steps={steps}"]).spec, 30) for steps in (30, 90))
    assert short == long
    assert ours(resolve(path, ["train.steps=90"]).spec, 90)[-1] == 1e-4


@pytest.mark.parametrize(
    ("optim", "key"),
    [
        ({"warmup_init": 1e-4}, "optim.warmup_init"),
        ({"warmup": 2, "warmup_init": 2e-3}, "optim.warmup_init"),
        ({"schedule": "constant", "decay_end": 4}, "optim.decay_end"),
        ({"decay_end": "4min"}, "optim.decay_end"),
        ({"warmup": 3, "decay_end": 3}, "optim.warmup"),
        ({"schedule": "wsd", "warmup": 2, "decay": 3, "decay_end": 4}, "optim.decay"),
    ],
)
def test_ends_that_cannot_be_are_refused(optim: dict[str, Any], key: str, write_spec: Any) -> None:
    with pytest.raises(ArgosyError) as refusal:
        resolve(write_spec(optim={"lr": 1e-3} | optim))
    assert refusal.value.key == key
