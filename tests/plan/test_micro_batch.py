"""The micro-batch that a run leaves open is chosen from predicted memory and step time, and a resumed run keeps its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from benchmarks.planner.rows import Row, read_rows

from argosy.config.default_micro_batch import FINAL, UNTIL_START
from argosy.config.resolve import Resolved, resolve
from argosy.plan.advise import STACK, Advice, Question, answer
from argosy.plan.auto import KEPT, ORIGIN, settle_micro_batch
from argosy.plan.calibration import calibration
from argosy.plan.hardware import gpu_of_device, parse_cluster
from argosy.plan.search import MARGIN, micro_batches
from argosy.train import run
from argosy.train.run import TrainOptions, settle, train

KEYS = ["data.train=corpus", "train.steps=10", "optim.lr=1e-4"]
# Works, and their steps in ms by micro-batch on an H200: with its memory, and with that of an 80 GB GPU (`benchmarks/micro_batch.py`).
WORKS: list[tuple[list[str], dict[str, dict[int, float]]]] = [
    (
        ["model=gpt2", "train.global_batch=64"],
        {"1xH200": {64: 103.0, 32: 106.8, 16: 114.5}, "1xH100": {64: 103.7, 32: 106.3}},
    ),
    (
        ["model=gpt2-large", "train.global_batch=32"],
        {"1xH200": {32: 301.5, 16: 314.4, 8: 342.5}, "1xH100": {32: 298.1, 16: 312.8, 8: 342.4}},
    ),
    (
        ["model=llama3-1b", "train.global_batch=4", "data.seq_len=8192"],
        {"1xH200": {4: 524.0, 2: 534.4, 1: 543.7}, "1xH100": {4: 522.6, 2: 531.6, 1: 547.9}},
    ),
    (
        ["model=llama3-8b", "model.layers=8", "train.global_batch=2", "data.seq_len=8192"],
        {"1xH200": {2: 427.3, 1: 441.1}, "1xH100": {2: 425.7, 1: 442.8}},
    ),
    (
        ["model=moe-3.5b-a1.1b", "train.global_batch=8", "data.seq_len=4096"],
        {"1xH200": {8: 472.0, 4: 502.3, 2: 537.5}, "1xH100": {2: 543.7, 1: 630.3}},
    ),
]  # fmt: skip


def chosen(cluster: str | None, *keys: str, kept: int | None = None) -> tuple[int, str]:
    planned_on = None if cluster is None else parse_cluster(cluster)
    found = settle_micro_batch(resolve(None, [*KEYS, *keys]), planned_on, kept)
    return found.spec.parallel.micro_batch, found.origins["parallel.micro_batch"]


def planned(cluster: str, *keys: str, **asked: object) -> Advice:
    nothing = dict.fromkeys(("global_batch", "seq_len", "tokens", "precision", "what_if", "price", "hardware"))
    return answer(Question.read({}, [*KEYS, *keys], cluster=cluster, **nothing | asked), top=1)  # type: ignore[arg-type]


def measured() -> dict[str, list[Row]]:
    """Return our own measurements of models without recompute and in bf16, as a run of the largest batch would take them."""
    rows, _ = read_rows(Path(__file__).parents[2] / "benchmarks" / "planner" / "own.csv")
    models: dict[str, list[Row]] = {}
    for row in rows:
        if row.layout.recompute == "none" and row.work.precision == "bf16" and row.work.replayed:
            models.setdefault(f"{row.work.model.hidden}, {row.work.seq_len}", []).append(row)
    return {name: rows for name, rows in models.items() if len(rows) > 1}


@pytest.mark.parametrize("cluster", ["1xH200", "1xH100"])
@pytest.mark.parametrize("model", measured())
def test_the_choice_is_as_fast_as_the_best_by_hand_and_fits(model: str, cluster: str) -> None:
    rows, nodes, known = measured()[model], parse_cluster(cluster), calibration()
    largest = max(rows, key=lambda row: row.work.global_batch)
    found = micro_batches(largest.work, largest.layout, nodes, known.stacks[STACK], known)[0]
    assert found.fullest.device <= MARGIN * nodes.gpu.memory
    by_size = {row.layout.micro_batch: row for row in rows}
    fitting = [row for row in rows if row.memory is not None and row.memory < 0.9 * nodes.gpu.memory]
    per_sample = {row.layout.micro_batch: (row.step_s or 0) / row.layout.micro_batch for row in fitting}
    assert found.layout.micro_batch in by_size
    if cluster == "1xH200":
        assert per_sample[found.layout.micro_batch] <= 1.03 * min(per_sample.values())


@pytest.mark.parametrize("cluster", ["1xH200", "1xH100"])
@pytest.mark.parametrize(("keys", "ms"), WORKS, ids=[keys[0].removeprefix("model=") for keys, _ in WORKS])
def test_presets_as_shipped_take_a_size_that_measured_within_3_percent_of_the_best(
    keys: list[str], ms: dict[str, dict[int, float]], cluster: str
) -> None:
    size, origin = chosen(cluster, *keys)
    assert ms[cluster][size] <= 1.03 * min(ms[cluster].values())
    assert origin == ORIGIN


def test_a_smaller_one_that_leaves_memory_free_is_chosen_if_it_is_planned_as_fast() -> None:
    llama = ["model=llama3-1b", "train.global_batch=4", "data.seq_len=8192"]
    assert chosen("1xH100", *llama)[0] == 2


def test_a_small_gpu_gets_a_smaller_one_and_every_batch_of_a_ramp_is_divided() -> None:
    llama = ["model=llama3-1b", "train.global_batch=48", "data.seq_len=8192"]
    large, small = chosen("1xH200", *llama)[0], chosen("1xA100-40", *llama)[0]
    assert 48 % large == 48 % small == 0
    assert large > small == 1
    ramp = ["model=gpt2", "train.global_batch=64", "train.batch_rampup={start: 8, increment: 4, samples: 1000}"]
    assert chosen("1xH200", *ramp)[0] == 4


def test_what_is_given_kept_unknown_or_no_decoder_is_not_chosen() -> None:
    gpt2 = ["model=gpt2", "train.global_batch=64"]
    assert chosen("1xH200", *gpt2, "parallel.micro_batch=2", kept=8) == (2, "command line")
    assert chosen("1xH200", *gpt2, kept=8) == (8, KEPT)
    # 24 does not divide 64.
    assert chosen("1xH200", *gpt2, kept=24) == (64, ORIGIN)
    assert chosen(None, *gpt2) == (16, UNTIL_START)
    for model in ("ict-base", "t5-small"):
        assert chosen("1xH200", f"model={model}", "train.global_batch=256")[1] == FINAL
    assert gpu_of_device("NVIDIA H100 80GB HBM3 MIG 1g.10gb") is None


@pytest.mark.parametrize(
    ("cluster", "keys"),
    [
        ("1xH100", ["model=gpt2", "train.global_batch=480"]),
        ("1xH100", ["model=gpt2", "train.global_batch=61"]),
        ("1xL4", ["model=gpt2", "train.global_batch=512"]),
        ("1xH100", ["model=gpt2", "train.global_batch=512", "model.dropout=0.1"]),
        ("1xH100", ["model=gpt2", "train.global_batch=512", "train.precision=fp32"]),
        ("1xH100", ["model=gpt2", "train.global_batch=18", "data.seq_len=1000", "train.precision=fp8"]),
        ("1xH100", ["model=mpt-1b", "train.global_batch=96", "data.seq_len=2048"]),
        (
            "1xH100",
            ["model=gpt2", "train.global_batch=64", "train.batch_rampup={start: 8, increment: 4, samples: 1000}"],
        ),
        ("8xH100", ["model=gpt2", "train.global_batch=480", "parallel.dp_replicate=8"]),
    ],
)
def test_a_plan_names_the_micro_batch_that_a_run_takes(cluster: str, keys: list[str]) -> None:
    advice, (taken, origin) = planned(cluster, *keys), chosen(cluster, *keys)
    assert origin == ORIGIN
    assert advice.asked is not None
    assert advice.asked.layout.micro_batch == taken
    assert advice.shown[0].layout == advice.asked.layout
    assert any("the micro-batch that a run chooses" in line for line in advice.lines())


def test_a_plan_keeps_a_micro_batch_that_the_spec_has_and_that_of_a_model_that_is_no_decoder() -> None:
    given = planned("1xH100", "model=gpt2", "train.global_batch=480", "parallel.micro_batch=4").asked
    assert given is not None
    assert given.layout.micro_batch == 4
    bert = ["model=bert-large", "train.global_batch=480"]
    own = planned("1xH100", *bert).asked
    assert own is not None
    assert own.layout.micro_batch == chosen("1xH100", *bert)[0] == 32


def test_the_micro_batch_of_a_plan_divides_the_batch_that_is_asked_about() -> None:
    other = planned("1xH100", "model=gpt2", "train.global_batch=480", global_batch=61).asked
    assert other is not None
    assert other.layout.micro_batch == 61


@pytest.mark.parametrize(
    "keys",
    [
        # 18 and 9 micro-batches cannot be interleaved on 4 ranks.
        ["train.global_batch=18"],
        # Of the batches 8, 12, … 64, those of 8 samples have to be interleaved too.
        ["train.global_batch=64", "train.batch_rampup={start: 8, increment: 4, samples: 1000}"],
    ],
)
def test_a_plan_of_a_pipeline_names_a_micro_batch_that_the_run_accepts(keys: list[str]) -> None:
    keys = ["model=gpt2", "parallel.pp=4", "parallel.schedule=interleaved-1f1b", *keys]
    asked, (taken, origin) = planned("4xH100", *keys).asked, chosen("4xH100", *keys)
    assert asked is not None
    assert (asked.layout.micro_batch, origin) == (taken, ORIGIN)
    resolve(None, [*KEYS, *keys, f"parallel.micro_batch={taken}"])


def test_a_layout_that_no_run_can_have_is_refused_and_not_timed() -> None:
    keys = ["model=gpt2", "train.global_batch=64", "parallel.dp_replicate=8"]
    advice = planned("8xH100", *keys, global_batch=61)
    assert advice.asked is None
    [line] = [line for line in advice.lines() if "the run spec's own layout" in line]
    assert line == (
        "the run spec's own layout cannot run: train.global_batch 61 is not a multiple of 8 data-parallel ranks (61 / 8 = 7.62)"
    )
    assert advice.as_dict()["asked_refusal"] in line
    assert planned("8xH100", *keys).as_dict()["asked_refusal"] is None


def test_rows_of_one_mesh_are_the_chosen_size_and_the_others_by_time() -> None:
    nothing = dict.fromkeys(("tokens", "precision", "what_if", "price", "hardware"))
    question = Question.read("llama3-1b", [], cluster="1xH100", global_batch=64, seq_len=8192, **nothing)  # type: ignore[arg-type]
    advice = answer(question, top=3)
    lines = advice.lines()
    heading = next(number for number, line in enumerate(lines) if "tok/s/GPU" in line)
    first, second, *rest = [line.split() for line in lines[heading + 1 : heading + 4]]
    # The second row is faster by less than 1%, and needs more memory.
    assert (first[1], second[1]) == ("micro_batch=2", "micro_batch=4")
    seconds = [float(cells[cells.index("s") - 1]) for cells in (second, *rest)]
    assert seconds == sorted(seconds)
    assert seconds[0] < float(first[2])
    [why, *others] = advice.lost()
    assert why.startswith("micro_batch=4: as fast within 1%, needs ")
    assert why.endswith(" GiB more memory")
    assert all(": +" in other for other in others)


def test_a_layout_that_the_planner_chose_is_the_same_as_the_first() -> None:
    assert "  micro_batch=64: the same as the first" in planned("1xH200", "model=gpt2", "train.global_batch=64").lines()


def test_a_resumed_run_keeps_its_micro_batch_on_another_gpu(
    write_spec: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_spec(parallel={}, eval="off", train={"global_batch": 8, "steps": 2}, optim={"lr": 1e-3, "warmup": 1})

    def settled(gpu: str | None, *overrides: str, fresh: bool = False) -> Resolved:
        monkeypatch.setattr(run, "_gpu_name", lambda spec: gpu)
        return settle(resolve(path, overrides), path, overrides, 1, fresh=fresh)

    # Nothing is saved yet, and the CPU has no planner.
    assert settled(None).origins["parallel.micro_batch"] == UNTIL_START
    assert train(resolve(path, ["parallel.micro_batch=2"]), path, TrainOptions(quiet=True)) == 0
    for gpu in (None, "NVIDIA H200"):
        assert settled(gpu).spec.parallel.micro_batch == 2
    assert settled("NVIDIA H200", fresh=True).spec.parallel.micro_batch == 8
    assert settled("NVIDIA H200", "name=other").origins["parallel.micro_batch"] == ORIGIN
