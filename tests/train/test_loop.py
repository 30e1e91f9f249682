"""The loop as users meet it: starting, going on, being refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from argosy.checkpoint.store import latest, listed
from argosy.config.resolve import resolve
from argosy.data.open import open_data, set_names
from argosy.errors import EXIT_DONE, ArgosyError
from argosy.infer.evaluate_run import evaluate_run, unigram_entropy
from argosy.infer.generate import sample
from argosy.measure.dry_run import dry_run
from argosy.model.decoding import Sampling, choose
from argosy.record.jsonl import read_jsonl, read_metrics
from argosy.train import device
from argosy.train.run import TrainOptions, train
from data.corpora import write_corpus

Write = Callable[..., Path]
QUIET = TrainOptions(quiet=True)


def go(path: Path, *overrides: str, options: TrainOptions = QUIET) -> int:
    return train(resolve(path, overrides), path, options)


def test_a_run_leaves_a_complete_directory(write_spec: Write, tmp_path: Path) -> None:
    assert go(write_spec()) == EXIT_DONE
    run = tmp_path / "runs" / "tiny"
    names = {path.name for path in run.iterdir()}
    assert {"run.yaml", "resolved.json", "metrics.jsonl", "events.jsonl", "checkpoints", "tokenizer.json"} <= names
    metrics = read_metrics(run / "metrics.jsonl")
    assert list(metrics) == [1, 2, 3, 4, 5, 6]
    assert {step for step, record in metrics.items() if "validation_loss" in record} == {3, 6}
    assert metrics[6]["tokens"] == 6 * 8 * 32
    assert metrics[6]["loss"] < metrics[1]["loss"]
    assert [path.name for path in listed(run / "checkpoints")] == ["step-00000006", "step-00000004", "step-00000002"]
    events = [event["event"] for event in read_jsonl(run / "events.jsonl")]
    assert events[0] == "start"
    assert events[-1] == "done"


def test_a_finished_run_is_not_trained_again_but_can_be_lengthened(
    write_spec: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_spec()
    go(path)
    assert go(path, options=TrainOptions()) == EXIT_DONE
    assert "all 6 steps are done" in capsys.readouterr().out
    assert go(path) == EXIT_DONE
    assert capsys.readouterr() == ("", "")
    assert go(path, "train.steps=9") == EXIT_DONE
    assert max(read_metrics(tmp_path / "runs" / "tiny" / "metrics.jsonl")) == 9


def test_fresh_never_overwrites_silently(write_spec: Write, tmp_path: Path) -> None:
    path = write_spec()
    go(path)
    with pytest.raises(ArgosyError) as refusal:
        go(path, options=TrainOptions(fresh=True, quiet=True))
    assert refusal.value.code == "run.exists"
    assert go(path, options=TrainOptions(fresh=True, archive=True, quiet=True)) == EXIT_DONE
    assert (tmp_path / "runs" / "tiny.old-1" / "checkpoints" / "step-00000006").exists()
    assert next(e["event"] for e in read_jsonl(tmp_path / "runs" / "tiny" / "events.jsonl")) == "start"


def test_a_start_that_is_refused_leaves_the_earlier_run_where_it_is(write_spec: Write, tmp_path: Path) -> None:
    path = write_spec()
    go(path)
    go(path, "name=other")
    for checkpoint in listed(tmp_path / "runs" / "other" / "checkpoints"):
        (checkpoint / "weights.safetensors").write_bytes(b"damaged")
    bad, anew = f"init_from={tmp_path / 'runs' / 'other'}", TrainOptions(fresh=True, archive=True, quiet=True)
    for start in (lambda: go(path, bad, options=anew), lambda: dry_run(resolve(path, [bad]), anew)):
        with pytest.raises(ArgosyError):
            start()
    assert [run.name for run in sorted((tmp_path / "runs").iterdir())] == ["other", "tiny"]


def test_a_corrupt_newest_checkpoint_costs_one_interval_and_changes_nothing(write_spec: Write, tmp_path: Path) -> None:
    path = write_spec()
    go(path)
    go(path, "name=other")
    run = tmp_path / "runs" / "tiny"
    before = latest(run / "checkpoints", print)
    assert before is not None
    expected = {name: tensor.clone() for name, tensor in before.weights().items()}
    with (run / "checkpoints" / "step-00000006" / "weights.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x99")
    go(path)
    after = latest(run / "checkpoints", print)
    assert after is not None
    assert all(torch.equal(after.weights()[name], tensor) for name, tensor in expected.items())
    resumes = [e for e in read_jsonl(run / "events.jsonl") if e["event"] == "resume"]
    assert resumes[0]["step"] == 4
    assert "step-00000006" in resumes[0]["notes"][0]


def test_a_run_that_goes_on_with_other_threads_says_so(write_spec: Write, tmp_path: Path) -> None:
    path, threads = write_spec(), torch.get_num_threads()
    others = 1 if threads > 1 else 2
    change = f"machine.threads: {threads} -> {others}"
    go(path, "train.steps=4")
    try:
        torch.set_num_threads(others)
        assert any(change in line for line in dry_run(resolve(path), TrainOptions()))
        go(path)
    finally:
        torch.set_num_threads(threads)
    go(path, "train.steps=8")
    events = read_jsonl(tmp_path / "runs" / "tiny" / "events.jsonl")
    first, second = (e["changes"] for e in events if e["event"] == "resume")
    assert change in first
    assert f"machine.threads: {others} -> {threads}" in second


def test_what_computes_on_a_gpu_is_told_with_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "name_of", lambda _: "NVIDIA H200")
    usual = device.machine_facts(torch.device("cuda"), "auto")
    assert (usual["device"], usual["torch"]) == ("NVIDIA H200", torch.__version__)
    monkeypatch.setenv("ARGOSY_KERNELS", "torch")
    other = device.machine_facts(torch.device("cuda"), "auto")
    assert {key for key in usual if usual[key] != other[key]} == {"kernels"}


def test_micro_batches_do_not_change_the_run(write_spec: Write, tmp_path: Path) -> None:
    for name, micro in (("one", 8), ("many", 1)):
        go(write_spec(), f"name={name}", f"parallel.micro_batch={micro}")
    one, many = (read_metrics(tmp_path / "runs" / name / "metrics.jsonl") for name in ("one", "many"))
    for step in one:
        assert many[step]["loss"] == pytest.approx(one[step]["loss"], rel=1e-5)
        assert many[step]["grad_norm"] == pytest.approx(one[step]["grad_norm"], rel=1e-4)


def test_lengths_in_tokens_samples_and_epochs(write_spec: Write, tmp_path: Path) -> None:
    path = write_spec(optim={"lr": 1e-3})
    for name, length, steps in (
        ("t", "train.tokens=1K", 4),
        ("s", "train.samples=20", 3),
        ("e", "train.epochs=0.01", 1),
    ):
        go(path, f"name={name}", length)
        assert max(read_metrics(tmp_path / "runs" / name / "metrics.jsonl")) == steps


def test_refusals_come_before_the_run_directory_is_touched(write_spec: Write, tmp_path: Path) -> None:
    for overrides, code in (
        (["model.vocab_size=200"], "tokenizer.vocabulary"),
        (["data.train=nowhere/at/all"], "data.not-found"),
        (["data.seq_len=4000", "model.max_seq_len=4000"], "data.empty-split"),
        (["train.device=cuda"], "device.unavailable"),
        (["parallel.tp=2"], "launch.world-size"),
        (["parallel.dp_shard=2"], "launch.world-size"),
        (["optim.no_decay=[zzz]"], "config.bad-value"),
        (["optim.warmup=1000", "train.epochs=0.5"], "config.arithmetic"),
    ):
        if code == "device.unavailable" and torch.cuda.is_available():
            continue
        with pytest.raises(ArgosyError) as refusal:
            go(write_spec(), *overrides)
        assert refusal.value.code == code
    assert not (tmp_path / "runs").exists()


def test_a_loss_that_is_not_a_number_stops_the_run_before_it_is_saved(write_spec: Write, tmp_path: Path) -> None:
    path = write_spec(optim={"lr": 1e30, "clip": None}, checkpoint={"every": 100})
    with pytest.raises(ArgosyError) as refusal:
        go(path, "train.steps=30")
    assert refusal.value.code == "train.non-finite"
    assert "samples" in refusal.value.cause
    assert listed(tmp_path / "runs" / "tiny" / "checkpoints") == []


def test_a_run_whose_first_start_was_refused_can_be_corrected(write_spec: Write, tmp_path: Path) -> None:
    path = write_spec(optim={"lr": 1e30, "clip": None}, checkpoint={"every": 100})
    with pytest.raises(ArgosyError):
        go(path, "train.steps=30")  # dies before its first checkpoint
    assert go(path, "optim.lr=1e-3", "model.layers=1", "train.steps=3") == EXIT_DONE


def test_other_data_under_the_same_path_is_noticed(write_spec: Write, tmp_path: Path, corpus: Path) -> None:
    shutil.copytree(corpus, tmp_path / "copy")
    path = write_spec(data={"train": str(tmp_path / "copy"), "seq_len": 32, "split": [90, 10, 0]})
    go(path)
    shutil.move(tmp_path / "copy", tmp_path / "moved")
    assert go(path, f"data.train={tmp_path / 'moved'}", "train.steps=8") == EXIT_DONE  # the same data elsewhere
    from argosy.data.prepare.job import prepare
    from argosy.data.prepare.work import PrepareOptions
    from argosy.data.text.tokenizer import ByteTokenizer

    (tmp_path / "x.jsonl").write_text('{"text": "other text altogether, and long enough for a sample or two"}\n' * 60)
    prepare([str(tmp_path / "x.jsonl")], ByteTokenizer(), tmp_path / "copy", PrepareOptions())
    with pytest.raises(ArgosyError) as refusal:
        go(path, "train.steps=10")
    assert refusal.value.code == "run.changed"


def test_a_running_run_is_not_archived_from_under_its_trainer(write_spec: Write, tmp_path: Path) -> None:
    path = write_spec()
    go(path)
    from argosy.record.rundir import RunDir

    holder = RunDir(tmp_path / "runs" / "tiny")
    holder.open_for_training()
    with pytest.raises(ArgosyError) as refusal:
        go(path, options=TrainOptions(fresh=True, archive=True, quiet=True))
    assert refusal.value.code == "run.busy"
    holder.close()
    with pytest.raises(ArgosyError):
        go(path, options=TrainOptions(archive=True))  # archive means nothing without fresh


def test_damaged_tokens_are_refused_when_they_are_read(write_spec: Write, tmp_path: Path, corpus: Path) -> None:
    shutil.copytree(corpus, tmp_path / "copy")
    with (tmp_path / "copy" / "shard-00000.bin").open("r+b") as file:
        file.write(b"\xff\xff" * 4000)
    path = write_spec(data={"train": str(tmp_path / "copy"), "seq_len": 32, "split": [90, 10, 0]})
    with pytest.raises(ArgosyError) as refusal:
        go(path, "train.steps=60")
    assert refusal.value.code == "tokenizer.vocabulary"
    assert "65,535" in refusal.value.cause


def test_evaluation_counts_every_window_once_whatever_the_weights(write_spec: Write, corpus: Path) -> None:
    sources = [{"path": str(corpus), "weight": 0.9}, {"path": str(corpus), "weight": 0.1}]
    whole = open_data(resolve(write_spec(data={"train": sources, "seq_len": 32, "split": [90, 10, 0]})).spec).whole(
        "validation"
    )
    places = list(zip(*whole.locate(np.arange(whole.epoch_samples)), strict=True))
    assert len(set(places)) == whole.epoch_samples == 2 * whole.sets[0].count


def test_another_corpus_is_read_in_samples_made_as_the_runs_are(
    write_spec: Write, tmp_path: Path, corpus: Path
) -> None:
    made = {"seq_len": 32, "document_mask": True, "reset_positions": True, "mask_eod": True}
    go(write_spec(data={"train": str(corpus), "split": [1, 0, 0]} | made, eval=False), "model.max_seq_len=64")
    run = str(tmp_path / "runs" / "tiny")
    for suffix in ("bin", "idx"):  # which says nothing of its tokenizer
        shutil.copyfile(corpus / f"shard-00000.{suffix}", tmp_path / f"pair.{suffix}")
    own = evaluate_run(run, split="train", batches=None)[0]
    for data in (corpus, tmp_path / "pair"):
        other = evaluate_run(run, split="train", batches=None, data=str(data))[0]
        assert (other.loss, other.tokens) == (own.loss, own.tokens)


def test_a_dry_run_checks_everything_and_writes_nothing(write_spec: Write, tmp_path: Path, corpus: Path) -> None:
    text = "\n".join(dry_run(resolve(write_spec()), TrainOptions()))
    assert "steps 1 to 6" in text
    assert not (tmp_path / "runs").exists()
    (tmp_path / "file").touch()
    for bad in (
        "model.vocab_size=200",
        "optim.no_decay=[zzz]",
        f"runs_dir={tmp_path / 'file' / 'x'}",
        "runs_dir=/proc/runs",
        "parallel.pp=64",
        "parallel.dp_shard=2",
        *([] if torch.cuda.is_available() else ["train.device=cuda"]),
    ):
        with pytest.raises(ArgosyError):
            dry_run(resolve(write_spec(), [bad]), TrainOptions())
    with pytest.raises(ArgosyError):
        dry_run(resolve(write_spec()), TrainOptions(profile="90:95"))
    assert not any(path.name.startswith(".argosy") for path in tmp_path.iterdir())
    both = [f"data.validation={corpus}"]
    assert "holds 10.00% of data.train back" in "\n".join(dry_run(resolve(write_spec(), both), TrainOptions()))
    go(write_spec())
    assert "nothing: all 6 steps" in "\n".join(dry_run(resolve(write_spec()), TrainOptions()))
    assert "starts at step 0" in "\n".join(dry_run(resolve(write_spec()), TrainOptions(fresh=True, archive=True)))


def test_evaluation_of_a_run_covers_the_whole_split_once(write_spec: Write, tmp_path: Path) -> None:
    path = write_spec()
    go(path)
    result, step = evaluate_run(str(tmp_path / "runs" / "tiny"), split="validation", batches=None)
    again, _ = evaluate_run(str(tmp_path / "runs" / "tiny"), split="validation", batches=None)
    assert (step, result) == (6, again)
    whole = open_data(resolve(path).spec).whole("validation")
    assert (result.samples, result.tokens) == (whole.epoch_samples, whole.epoch_samples * 32)
    training, _ = evaluate_run(str(tmp_path / "runs" / "tiny"), split="train", batches=1)
    assert training.samples == 8
    with pytest.raises(ArgosyError) as refusal:
        evaluate_run(str(tmp_path / "runs" / "tiny"), split="test", batches=None)
    assert refusal.value.code == "data.empty-split"


def test_each_source_has_a_validation_loss_and_the_total_is_one_division(write_spec: Write, tmp_path: Path) -> None:
    sources = []
    for directory, letters in (("a/news", "xyz"), ("b/news", "abcdefgh"), ("c/code", "01")):
        documents = [[[*(letters * n).encode(), 256]] for n in range(20, 40)]
        sources.append({"path": str(write_corpus(tmp_path / directory, [documents]))})
    sources[0]["path"] += "/"
    path = write_spec(data={"train": sources, "seq_len": 32, "split": [80, 20, 0]})
    go(path, "eval.batches=100")
    record = read_metrics(tmp_path / "runs" / "tiny" / "metrics.jsonl")[6]
    assert {key for key in record if key.startswith("validation_loss/")} == {
        f"validation_loss/{name}" for name in ("news", "news-2", "code")
    }
    result, _ = evaluate_run(str(tmp_path / "runs" / "tiny"), split="validation", batches=None)
    assert record["validation_loss"] == pytest.approx(result.loss, rel=1e-6)
    for name, one in result.sets.items():
        assert record[f"validation_loss/{name}"] == pytest.approx(one.loss, rel=1e-6)
        alone = write_spec(
            data={"train": [sources[list(result.sets).index(name)]], "seq_len": 32, "split": [80, 20, 0]}
        )
        assert one.tokens == open_data(resolve(alone).spec).whole("validation").epoch_samples * 32
    assert result.tokens == sum(one.tokens for one in result.sets.values()) == record["validation_tokens"]
    assert result.loss == pytest.approx(sum(one.loss * one.tokens for one in result.sets.values()) / result.tokens)
    assert len({round(one.loss, 3) for one in result.sets.values()}) == 3
    few, _ = evaluate_run(str(tmp_path / "runs" / "tiny"), split="validation", batches=1)
    assert sorted(few.sets) == ["code", "news", "news-2"]
    assert all(one.samples >= 1 for one in few.sets.values())


def test_a_validation_corpus_of_its_own_is_evaluated_whole_and_all_of_the_others_is_trained_on(
    write_spec: Write, tmp_path: Path, corpus: Path
) -> None:
    own = str(write_corpus(tmp_path / "own", [[[list(range(97, 122))]] * 12]))
    data = {"train": str(corpus), "seq_len": 32}
    path = write_spec(data={**data, "validation": own}, eval={"every": 3, "batches": 10_000})
    assert resolve(path).spec.data.split == (1.0, 0.0, 0.0)
    assert go(path) == EXIT_DONE
    metrics = read_metrics(tmp_path / "runs" / "tiny" / "metrics.jsonl")
    whole = open_data(resolve(write_spec(data={**data, "train": own, "split": [1, 0, 0]}, eval="off")).spec).training()
    assert metrics[6]["validation_tokens"] == whole.epoch_samples * 32
    result, _ = evaluate_run(str(tmp_path / "runs" / "tiny"), split="validation", batches=None)
    assert result.loss == pytest.approx(metrics[6]["validation_loss"], rel=1e-6)
    # Another validation corpus, or none, changes no step, and a run may go on with it.
    weights = latest(tmp_path / "runs" / "tiny" / "checkpoints", print).weights()
    again = write_spec(name="again", data={**data, "split": [1, 0, 0]}, eval="off")
    assert go(again) == EXIT_DONE
    other = latest(tmp_path / "runs" / "again" / "checkpoints", print).weights()
    assert all(torch.equal(weights[name], other[name]) for name in weights.infos)
    later = write_spec(name="again", data={**data, "validation": own}, train={"global_batch": 8, "steps": 7})
    assert go(later) == EXIT_DONE


def test_a_validation_corpus_has_no_weight(write_spec: Write, corpus: Path) -> None:
    data = {"train": str(corpus), "seq_len": 32, "validation": [{"path": str(corpus), "weight": 2}]}
    with pytest.raises(ArgosyError, match="weights are for the blend") as refused:
        resolve(write_spec(data=data))
    assert refused.value.key == "data.validation.0.weight"


def test_names_of_sets_are_short_and_differ() -> None:
    paths = ["s3://bucket/c4/", "corpora/c4", "c4-2", "x/c4", "pairs/web.bin", "s3://bucket"]
    assert set_names(paths) == ["c4", "c4-2", "c4-2-2", "c4-3", "web", "bucket"]


def test_the_unigram_entropy_is_that_of_the_labels(write_spec: Write) -> None:
    stream = open_data(resolve(write_spec()).spec).whole("validation")
    labels = stream.batch(0, stream.epoch_samples).labels.ravel().tolist()
    shares = torch.tensor([labels.count(t) / len(labels) for t in sorted(set(labels))], dtype=torch.float64)
    assert unigram_entropy(stream, 257) == pytest.approx(float(-(shares * shares.log()).sum()))


def test_samples_repeat_with_their_seed(write_spec: Write, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    go(write_spec())
    run = tmp_path / "runs" / "tiny"
    first = sample(str(run), "abc", Sampling(tokens=12, seed=1))
    assert first.startswith("abc")
    assert first == sample(str(run), "abc", Sampling(tokens=12, seed=1))
    assert sample(str(run), "", Sampling(tokens=5, temperature=0)) == sample(
        str(run), "", Sampling(tokens=5, temperature=0, seed=9)
    )
    caplog.set_level("INFO")
    assert sample(str(run), "a" * 100, Sampling(tokens=3)).startswith("a" * 100)  # longer than the model's positions
    assert "of the prompt's 100 tokens the model reads the last 32" in caplog.text


def test_sampling_respects_its_options() -> None:
    logits = torch.tensor([[0.0, 5.0, 4.9, -3.0]])

    def draws(count: int, **options: float) -> set[int]:
        seeded = (torch.Generator().manual_seed(seed) for seed in range(count))
        return {token for one in seeded for token in choose(logits, Sampling(**options), [one])}

    assert draws(60, top_k=2, temperature=5.0) == {1, 2}
    assert draws(300, top_k=0, temperature=9.0) == {0, 1, 2, 3}
    assert draws(60, top_k=0, temperature=1.0, top_p=0.6) == {1, 2}
    assert draws(1, temperature=0) == {1}


def test_a_run_remembers_the_token_that_ends_a_document(write_spec: Write, tmp_path: Path) -> None:
    go(write_spec())
    from argosy.record.rundir import RunDir

    assert RunDir(tmp_path / "runs" / "tiny").data_facts()["eod_id"] == 256
    with pytest.raises(ArgosyError) as refusal:
        sample(str(tmp_path / "runs" / "tiny"), "x", Sampling(), device="tpu")
    assert (refusal.value.code, refusal.value.key) == ("device.unavailable", "--device")
    with pytest.raises(ArgosyError):
        sample(str(tmp_path / "runs" / "tiny"), "\udcff", Sampling())


def test_a_run_without_a_checkpoint_cannot_be_sampled(write_spec: Write, tmp_path: Path) -> None:
    with pytest.raises(ArgosyError) as refusal:
        sample(str(tmp_path / "runs" / "none"), "x", Sampling())
    assert refusal.value.code == "run.not-found"
