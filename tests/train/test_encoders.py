"""BERT, T5 and retrieval train from a run spec: their samples follow the model, runs resume bit-equal, wrong keys are
refused."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from argosy.checkpoint.average import average
from argosy.config.batches import Batches
from argosy.config.resolve import resolve
from argosy.data.loader import Loader
from argosy.data.open import open_data
from argosy.data.samples.masks import IGNORED
from argosy.data.synthetic import synthetic_batch
from argosy.errors import ArgosyError
from argosy.infer import infill
from argosy.infer.evaluate_run import evaluate_run
from argosy.infer.generate import sample
from argosy.model import decoding
from argosy.model.build import build_model, initial_weights, initialise
from argosy.model.decoding import Sampling
from argosy.parallel.mesh import Mesh
from argosy.parallel.parallelize import parallelize
from argosy.parallel.single import SingleDevice
from argosy.parallel.transformer_blocks import DropoutSeeds
from argosy.record.jsonl import read_metrics
from argosy.train.run import TrainOptions, train

decoding_choose = decoding.choose  # a test puts another function in its place
Write = Callable[..., Path]
SIZES = {"layers": 2, "hidden": 32, "heads": 4, "vocab_size": 300}
SPECIAL = {"cls": 257, "sep": 258, "pad": 260}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bert": ({"family": "bert", **SIZES}, {"bert": SPECIAL | {"mask": 259}}),
    "sop": ({"family": "bert", "pair": "sop", **SIZES}, {"bert": SPECIAL | {"mask": 259, "max_ngram": 3}}),
    "no-pairs": ({"family": "bert", "pair": "none", **SIZES}, {"bert": SPECIAL | {"mask": 259}}),
    "t5": ({"family": "t5", **SIZES}, {"t5": {"sentinel": 299, "sentinels": 30, "eos": 257, "pad": 258}}),
    "ict": ({"family": "bert", "pair": "none", "retrieval": {}, **SIZES}, {"ict": SPECIAL | {"query_len": 16}}),
    "ict-shared": (
        {"family": "bert", "pair": "none", "retrieval": {"shared": True, "projection": 8}, **SIZES},
        {"ict": SPECIAL | {"query_len": 16}},
    ),
}


@pytest.fixture(params=KINDS)
def spec(request: pytest.FixtureRequest, write_spec: Write, corpus: Path) -> Path:
    return spec_of(request.param, write_spec, corpus)


def spec_of(kind: str, write_spec: Write, corpus: Path, **more: Any) -> Path:
    model, data = KINDS[kind]
    data = {"train": str(corpus), "seq_len": 32, "split": [90, 10, 0]} | data
    return write_spec(model=model, data=data, **more)


def losses(path: Path) -> dict[int, dict[str, Any]]:
    return read_metrics(path.parent / "runs" / "tiny" / "metrics.jsonl")


def test_an_interrupted_run_gives_the_bits_of_one_that_was_not(spec: Path) -> None:
    constant, anew = "optim.schedule=constant", TrainOptions(quiet=True, fresh=True, archive=True)
    assert train(resolve(spec, ["train.steps=4", constant]), spec, TrainOptions(quiet=True)) == 0
    assert train(resolve(spec, ["train.steps=6", constant]), spec, TrainOptions(quiet=True)) == 0
    parted = losses(spec)
    assert train(resolve(spec, ["train.steps=6", constant]), spec, anew) == 0
    whole = losses(spec)
    assert parted.keys() == whole.keys()
    for step in whole:
        assert [parted[step][key] for key in ("loss", "grad_norm")] == [
            whole[step][key] for key in ("loss", "grad_norm")
        ]
    assert parted[6]["validation_loss"] == whole[6]["validation_loss"]


def test_batches_read_ahead_are_the_streams_own(spec: Path) -> None:
    stream = open_data(resolve(spec).spec).training()
    with Loader(stream, batches=Batches(8), consumed_samples=16) as loader:
        for step in (2, 3):
            read, made = loader.next_batch(), stream.batch(8 * step, 8)
            assert np.array_equal(read.tokens, made.tokens)
            assert read.inputs.keys() == made.inputs.keys()
            assert all(np.array_equal(read.inputs[name], made.inputs[name]) for name in made.inputs)


def test_bert_reads_no_token_beyond_the_tokenizers_and_the_special_ones(write_spec: Write, corpus: Path) -> None:
    stream = open_data(resolve(spec_of("bert", write_spec, corpus), ["model.vocab_size=5000"]).spec).training()
    assert set(np.unique(stream.batch(0, 200).tokens)) - set(range(257)) == {257, 258, 259, 260}


def test_another_corpus_is_read_with_the_runs_special_tokens(spec: Path, corpus: Path) -> None:
    assert (
        train(resolve(spec, ["train.steps=3", "data.split=[1,0,0]", "eval=off"]), spec, TrainOptions(quiet=True)) == 0
    )
    run = str(spec.parent / "runs" / "tiny")
    own, other = (evaluate_run(run, split="train", batches=2, data=data)[0] for data in (None, str(corpus)))
    assert (other.loss, other.tokens, other.metrics) == (own.loss, own.tokens, own.metrics)


@pytest.mark.parametrize("kind", ["bert", "t5"])
def test_an_average_is_evaluated_and_sampled_as_the_run_it_is_of(kind: str, write_spec: Write, corpus: Path) -> None:
    path = spec_of(kind, write_spec, corpus)
    assert train(resolve(path), path, TrainOptions(quiet=True)) == 0
    run, mean = str(path.parent / "runs" / "tiny"), str(path.parent / "mean")
    average([f"{run}/checkpoints/step-00000006"] * 2, Path(mean))
    for data in (None, str(corpus)):
        of_run, of_mean = (evaluate_run(model, split="validation", batches=1, data=data)[0] for model in (run, mean))
        assert of_mean == of_run
    texts = [sample(model, "bac [MASK]de <extra_id_0>!", Sampling(tokens=4)) for model in (run, mean)]
    assert texts[0] == texts[1]


def test_made_up_batches_have_the_shape_of_real_ones(spec: Path) -> None:
    resolved = resolve(spec).spec
    real, made_up = open_data(resolved).training().batch(0, 8), synthetic_batch(resolved)
    assert made_up.tokens.shape == real.tokens.shape
    assert made_up.labels.shape == real.labels.shape
    assert made_up.read_tokens == real.read_tokens
    assert {name: (a.shape, a.dtype) for name, a in made_up.inputs.items()} == {
        name: (a.shape, a.dtype) for name, a in real.inputs.items()
    }


@pytest.mark.parametrize("kind", ["bert", "sop", "t5"])
def test_gradients_do_not_depend_on_the_micro_batch(kind: str, write_spec: Write, corpus: Path) -> None:
    resolved = resolve(spec_of(kind, write_spec, corpus), ["model.dropout=0"]).spec
    batch = open_data(resolved).training().batch(0, 8)
    found = []
    for micro_batch in (1, 2, 8):
        model = build_model(resolved.model)
        initialise(model, resolved.model, seed=1)
        engine = SingleDevice(model, DropoutSeeds(model, seed=1), micro_batch=micro_batch, device=torch.device("cpu"))
        result = engine.forward_backward(batch, step=1)
        assert result.tokens == int((batch.labels != IGNORED).sum())
        found.append([p.grad / result.tokens for p in model.parameters()])
    for other in found[1:]:
        for one, another in zip(found[0], other, strict=True):
            torch.testing.assert_close(one, another, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputing_changes_no_gradient(recompute: str, spec: Path) -> None:
    found = []
    for how in ("none", recompute):
        resolved = resolve(spec, [f"parallel.recompute={how}"]).spec
        engine = parallelize(
            resolved,
            Mesh(torch.device("cpu")),
            weights=lambda model, spec=resolved.model: initial_weights(model, spec, seed=1),
        )
        engine.forward_backward(open_data(resolved).training().batch(0, 8), step=1)
        found.append([p.grad for p in engine.model.parameters()])
    for one, another in zip(*found, strict=True):
        torch.testing.assert_close(one, another, rtol=1e-5, atol=1e-7)


def test_the_pair_counts_as_its_mean_over_samples(write_spec: Write, corpus: Path) -> None:
    """Twice as many hidden tokens do not make the pair weigh less."""
    path = spec_of("bert", write_spec, corpus)
    for rate in ("0.15", "0.6"):
        resolved = resolve(path, ["model.dropout=0", f"data.bert.mask_rate={rate}"]).spec
        batch = open_data(resolved).training().batch(0, 8)
        model = build_model(resolved.model)
        initialise(model, resolved.model, seed=1)
        engine = SingleDevice(model, DropoutSeeds(model, seed=1), micro_batch=4, device=torch.device("cpu"))
        result = engine.forward_backward(batch, step=1)
        assert float(result.metrics["nsp_loss"]) / result.tokens == pytest.approx(np.log(2), abs=0.05)
        assert 0 <= float(result.metrics["nsp_accuracy"]) / result.tokens <= 1


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("bert", {"nsp_loss", "nsp_accuracy"}),
        ("sop", {"sop_loss", "sop_accuracy"}),
        ("no-pairs", set()),
        ("t5", set()),
        ("ict", {"top1_accuracy", "top5_accuracy"}),
    ],
)
def test_what_a_model_reports_is_recorded(kind: str, names: set[str], write_spec: Write, corpus: Path) -> None:
    path = spec_of(kind, write_spec, corpus)
    assert train(resolve(path), path, TrainOptions(quiet=True)) == 0
    record = losses(path)[6]
    assert names | {f"validation_{name}" for name in names} <= record.keys()
    evaluation, step = evaluate_run(str(path.parent / "runs" / "tiny"), split="validation", batches=2)
    assert step == 6
    assert evaluation.loss == pytest.approx(record["validation_loss"], rel=1e-6)
    assert evaluation.metrics.keys() == names


def sampled(kind: str, prompt: str, write_spec: Write, corpus: Path, seed: int = 0) -> str:
    path = spec_of(kind, write_spec, corpus)
    run = path.parent / "runs" / "tiny"
    if not run.exists():
        train(resolve(path), path, TrainOptions(quiet=True))
    return sample(str(run), prompt, Sampling(tokens=12, temperature=1.0, seed=seed))


@pytest.mark.parametrize(("kind", "prompt", "rows"), [("bert", "ab[MASK]cd", 261), ("t5", "ab<extra_id_0>cd", 300)])
def test_padding_of_the_vocabulary_fills_nothing_in(
    kind: str, prompt: str, rows: int, write_spec: Write, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokenizer has 257 ids, the last special token of BERT is 260, and T5's first sentinel 299."""
    seen = set[int]()

    def choose(logits: torch.Tensor, *more: Any) -> list[int]:
        seen.add(logits.shape[1])
        return decoding_choose(logits, *more)

    for module in (decoding, infill):
        monkeypatch.setattr(module, "choose", choose)
    path = spec_of(kind, write_spec, corpus)
    train(resolve(path, ["model.vocab_size=400"]), path, TrainOptions(quiet=True))
    sample(str(path.parent / "runs" / "tiny"), prompt, Sampling(tokens=4))
    assert seen == {rows}


def test_bert_fills_in_its_masks_and_nothing_else(write_spec: Write, corpus: Path) -> None:
    text = sampled("bert", "ab[MASK]cd[MASK]", write_spec, corpus)
    assert re.fullmatch(r"ab.?cd.?", text, re.DOTALL)
    assert text == sampled("bert", "ab[MASK]cd[MASK]", write_spec, corpus)
    for prompt, code in (("no mask", "config.bad-value"), ("[MASK]" * 40, "config.arithmetic")):
        with pytest.raises(ArgosyError) as refusal:
            sampled("bert", prompt, write_spec, corpus)
        assert (refusal.value.code, refusal.value.key) == (code, "--prompt")


def test_t5_writes_for_a_prompt_with_sentinels_and_names_those_it_writes(write_spec: Write, corpus: Path) -> None:
    texts = {sampled("t5", "some<extra_id_0>words", write_spec, corpus, seed) for seed in range(8)}
    assert len(texts) == 8
    assert any(re.search(r"<extra_id_\d+>", text) for text in texts)


def test_a_retriever_writes_no_text(write_spec: Write, corpus: Path) -> None:
    with pytest.raises(ArgosyError) as refusal:
        sampled("ict", "words", write_spec, corpus)
    assert refusal.value.code == "model.no-text"


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("bert", ["eval", "sample", "dash", "ckpt"]),
        ("t5", ["eval", "sample", "dash", "ckpt"]),
        ("ict", ["eval", "dash"]),
        ("llama", ["eval", "sample", "dash", "ckpt"]),
        ("bare pair", ["dash", "ckpt"]),
    ],
)
def test_the_commands_named_at_the_end_of_a_run_work(
    kind: str, names: list[str], write_spec: Write, corpus: Path, tmp_path: Path, argosy: Callable[..., Any]
) -> None:
    if kind in KINDS:
        path = spec_of(kind, write_spec, corpus)
    else:
        where = corpus if kind == "llama" else Path(shutil.copytree(corpus, tmp_path / "bare")) / "shard-00000"
        if where != corpus:
            (where.parent / "manifest.json").unlink()
        data = {"train": str(where), "seq_len": 32, "split": [90, 10, 0]}
        path = write_spec(model={"family": "llama", **SIZES}, data=data, **({} if kind == "llama" else {"eval": "off"}))
    ended = argosy("train", path)
    assert ended.returncode == 0, ended.stderr
    said = re.split("^next: ", ended.stdout + ended.stderr, flags=re.MULTILINE)[1]
    commands = [shlex.split(line) for line in said.splitlines()]
    assert [words[1] for words in commands] == names
    for words in commands:
        # The dashboard would serve until it is stopped.
        if words[1] != "dash":
            done = argosy(*words[1:])
            assert done.returncode == 0, done.stderr


def test_two_corpora_are_mixed_into_one_batch(write_spec: Write, corpus: Path) -> None:
    for kind in ("bert", "t5", "ict"):
        path = spec_of(kind, write_spec, corpus)
        sources = f"data.train=[{{path: {corpus}, weight: 3}}, {{path: {corpus}, weight: 1}}]"
        stream = open_data(resolve(path, [sources]).spec).training()
        whole = stream.batch(0, 16)
        assert np.bincount(stream.locate(np.arange(16))[0]).tolist() == [12, 4]
        parts = [stream.batch(first, 1) for first in range(16)]
        assert np.array_equal(whole.tokens, np.concatenate([part.tokens for part in parts]))
        for name, array in whole.inputs.items():
            assert np.array_equal(array, np.concatenate([part.inputs[name] for part in parts]))


@pytest.mark.parametrize(
    ("kind", "changes", "code", "key"),
    [
        ("bert", ["data.bert.mask='[MASK]'"], "tokenizer.vocabulary", "data.bert.mask"),
        ("bert", ["data.bert.mask=300"], "tokenizer.vocabulary", "data.bert.mask"),
        ("bert", ["data.bert.mask=258"], "tokenizer.vocabulary", None),
        ("bert", ["data.t5={}"], "config.conflict", "data.t5"),
        ("bert", ["data.mask_eod=true"], "config.conflict", "data.mask_eod"),
        ("bert", ["data.order=megatron"], "config.conflict", "data.order"),
        ("bert", ["data.bert.mask_rate=0"], "config.bad-value", "data.bert.mask_rate"),
        ("t5", ["data.t5.sentinel=<extra_id_0>"], "tokenizer.vocabulary", "data.t5.sentinel"),
        ("t5", ["data.t5.sentinel=257", "data.t5.eos=290"], "config.arithmetic", "data.seq_len"),
        ("t5", ["data.t5.sentinels=1"], "config.arithmetic", "data.seq_len"),
        ("t5", ["data.document_mask=true"], "config.conflict", "data.document_mask"),
        ("ict", ["parallel.micro_batch=1"], "config.arithmetic", "parallel.micro_batch"),
        ("ict", ["data.ict.query_len=64"], "config.arithmetic", "data.ict.query_len"),
        ("ict", ["data.ict.query_len=2"], "config.arithmetic", "data.ict.query_len"),
        ("ict", ["model.pair=nsp"], "config.arithmetic", "model.retrieval"),
        ("ict", ["model.tied=false"], "config.arithmetic", "model.tied"),
        ("ict", ["train.z_loss=1e-4"], "config.conflict", "train.z_loss"),
        ("bert", ["model.rope_theta=500000"], "config.arithmetic", "model.rope_theta"),
    ],
)
def test_what_cannot_work_is_refused(
    kind: str, changes: list[str], code: str, key: str | None, write_spec: Write, corpus: Path
) -> None:
    path = spec_of(kind, write_spec, corpus)
    with pytest.raises(ArgosyError) as refusal:
        open_data(resolve(path, changes).spec).training()
    assert refusal.value.code == code
    assert refusal.value.key == key or key is None
