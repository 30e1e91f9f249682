"""A run can start from weights: Hugging Face's, another run's, or an imported model's; and says so."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from argosy.checkpoint.hf.hf_import import import_hf
from argosy.checkpoint.source import inherited_start, open_source, opens_with, starting_weights
from argosy.checkpoint.store import latest
from argosy.config.resolve import resolve
from argosy.data.text.tokenizer import ByteTokenizer
from argosy.errors import ArgosyError
from argosy.infer.evaluate_run import evaluate_run
from argosy.infer.generate import sample
from argosy.measure.dry_run import dry_run
from argosy.model.build import build_model
from argosy.model.decoding import Sampling
from argosy.record.rundir import RunDir
from argosy.train.run import TrainOptions, train
from hf_models import save

Write = Callable[..., Path]


@pytest.fixture
def llama(tmp_path: Path) -> str:
    save("llama", tmp_path / "hf")
    return f"hf:{tmp_path / 'hf'}"


@pytest.fixture
def spec(write_spec: Write) -> Callable[..., Path]:
    """A run spec without a model."""

    def write(init_from: str, **sections: Any) -> Path:
        path = write_spec(
            init_from=init_from, train={"global_batch": 8, "steps": 1}, **{"optim": {"lr": 1e-9}} | sections
        )
        if "model" not in sections:
            text = path.read_text()
            start = text.index("model:")
            end = text.index("name:")
            path.write_text(text[:start] + text[end:])
        return path

    return write


def _run(path: Path, *overrides: str) -> RunDir:
    resolved = resolve(path, overrides)
    train(resolved, path, TrainOptions(quiet=True))
    return RunDir(Path(resolved.spec.runs_dir) / resolved.spec.name)


def _weights(run: RunDir) -> dict[str, torch.Tensor]:
    checkpoint = latest(run.checkpoints, report=lambda text: None)
    assert checkpoint is not None
    return checkpoint.weights()


def test_a_run_starts_from_hugging_face_weights_at_step_0(llama: str, spec: Write, tmp_path: Path) -> None:
    (tmp_path / "hf" / "tokenizer_config.json").write_text('{"add_bos_token": true}')
    run = _run(spec(llama))
    source = open_source(llama)
    for name, value in _weights(run).items():
        torch.testing.assert_close(value, source.read(name), rtol=0, atol=1e-6)  # one step of a learning rate of 1e-9
    stored = json.loads(run.resolved_file.read_text())
    assert stored["spec"]["init_from"] == llama
    assert stored["spec"]["model"]["hidden"] == 48
    assert stored["origins"]["model.hidden"] == "init_from"
    assert stored["start"] == {
        "from": llama, "step": 0, "vocab_size": 257, "token_ids": {"bos_token_id": 256, "eos_token_id": 256}
    }  # fmt: skip
    start = json.loads(run.events.read_text().splitlines()[0])
    assert (start["event"], start["step"], start["init_from"]["from"]) == ("start", 0, llama)
    # Its texts begin as those of that model, after training and while it trains.
    assert open_source(str(run.root)).opening(ByteTokenizer()) == [256]
    assert inherited_start(run.root) == 256
    assert opens_with(run.root, 256, ByteTokenizer())


def test_from_an_import_or_a_checkpoint_it_is_the_same_run(llama: str, spec: Write, tmp_path: Path) -> None:
    import_hf(llama, tmp_path / "imported")
    first = _run(spec(llama))
    second = _run(spec(str(tmp_path / "imported")), "name=second")
    assert all(torch.equal(_weights(second)[name], value) for name, value in _weights(first).items())
    third = _run(spec(str(first.checkpoints / "step-00000001")), "name=third")
    assert json.loads(third.resolved_file.read_text())["start"]["step"] == 1


def test_going_on_does_not_start_again(llama: str, spec: Write) -> None:
    run = _run(spec(llama, optim={"lr": 1e-2}))
    before = json.loads(run.resolved_file.read_text())["start"]
    run = _run(spec(llama, optim={"lr": 1e-2}), "train.steps=2")
    events = [json.loads(line) for line in run.events.read_text().splitlines()]
    assert [e["event"] for e in events if e["event"] in ("start", "resume")] == ["start", "resume"]
    assert json.loads(run.resolved_file.read_text())["start"] == before


def test_a_run_goes_on_when_what_it_started_from_is_gone(llama: str, spec: Write, tmp_path: Path) -> None:
    run = _run(spec(llama))
    (tmp_path / "hf").rename(tmp_path / "gone")
    _run(spec(llama), "train.steps=2")
    assert (run.checkpoints / "step-00000002").exists()
    with pytest.raises(ArgosyError, match="there is no directory") as refused:
        resolve(spec(llama), ["name=another"])
    assert refused.value.key == "init_from"


def test_a_larger_vocabulary_keeps_the_rows_and_begins_the_others_as_their_mean(llama: str, spec: Write) -> None:
    run = _run(spec(llama, model={"vocab_size": 320}))
    source = open_source(llama)
    for name in ("embed.tokens.weight", "head.weight"):
        rows, there = _weights(run)[name], source.read(name)
        assert rows.shape == (320, 48)
        torch.testing.assert_close(rows[:257], there, rtol=0, atol=1e-6)
        torch.testing.assert_close(rows[257:], there.mean(0).expand(63, 48), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("kind", "head"), [("gpt2", "embed.tokens.weight"), ("bert-untied", "output.weight")])
def test_rows_that_pad_the_vocabulary_do_not_outweigh_the_words_of_a_trained_model(
    kind: str, head: str, tmp_path: Path
) -> None:
    """Logits of a trained model are often all far below zero, as GPT-2's, which those of random rows are not."""
    save(kind, tmp_path / "hf")
    source = open_source(f"hf:{tmp_path / 'hf'}")
    bias = "norm.bias" if kind == "gpt2" else "head.norm.bias"
    low = torch.ones(48)
    added = {head: low, bias: -low}
    source = replace(source, read=lambda name, read=source.read: read(name) + added.get(name, 0.0))
    tokens = torch.randint(0, 257, (4, 24), generator=torch.Generator().manual_seed(0))
    loss = {}
    for rows in (257, 320):
        spec = source.model.model_copy(update={"vocab_size": rows})
        model = build_model(spec).eval()
        model.load_state_dict(dict(starting_weights(source, model, spec, seed=0)), strict=False)
        with torch.no_grad():
            assert float(model(tokens)[..., :257].max()) < -20
            loss[rows] = float(model(tokens, tokens).cross_entropy) / tokens.numel()
    assert loss[257] <= loss[320] <= loss[257] + math.log(320 / 257)


@pytest.mark.parametrize(
    ("model", "key"),
    [
        ({"layers": 3}, "model.layers"),
        ({"vocab_size": 200}, "model.vocab_size"),
        ({"norm_eps": 1e-3}, "model.norm_eps"),
        ({"preset": "llama2-7b", "layers": 2}, "model.ffn"),
    ],
)
def test_a_model_that_does_not_agree_is_refused_with_the_key(llama: str, spec: Write, model: Any, key: str) -> None:
    with pytest.raises(ArgosyError) as refused:
        resolve(spec(llama, model=model))
    assert (refused.value.code, refused.value.key) == ("config.conflict", key)


def test_dropout_length_and_rotary_base_may_be_changed_on_purpose(llama: str, spec: Write) -> None:
    changes = {"dropout": 0.1, "max_seq_len": 128, "rope_theta": 1e6}
    model = resolve(spec(llama, model=changes)).spec.model
    assert (model.dropout, model.max_seq_len, model.rope_theta) == (0.1, 128, 1e6)


@pytest.mark.parametrize("retrieval", [{"projection": 8}, {"shared": True}])
def test_both_towers_of_a_retriever_begin_as_the_encoder_of_a_bert(
    tmp_path: Path, spec: Write, corpus: Path, retrieval: dict[str, Any]
) -> None:
    theirs = save("bert", tmp_path / "hf").state_dict()
    special = {"cls": 253, "sep": 254, "pad": 255, "query_len": 16}
    data = {"train": str(corpus), "seq_len": 32, "split": [90, 10, 0], "ict": special}
    path = spec(f"hf:{tmp_path / 'hf'}", model={"pair": "none", "retrieval": retrieval}, data=data)
    found = _weights(_run(path))
    towers = ["shared"] if retrieval.get("shared") else ["query", "block"]
    assert {name.split(".")[1] for name in found} == set(towers)
    for tower in towers:
        for ours, name in (
            ("embed.tokens", "embeddings.word_embeddings"),
            ("layers.1.mlp.up", "encoder.layer.1.intermediate.dense"),
        ):
            kept = found[f"towers.{tower}.encoder.{ours}.weight"]
            torch.testing.assert_close(kept, theirs[f"bert.{name}.weight"], rtol=0, atol=1e-6)
    with pytest.raises(ArgosyError) as refused:
        resolve(path, ["model.layers=3"])
    assert refused.value.key == "model.layers"


def test_one_key_of_the_experts_is_changed_and_the_others_are_kept(tmp_path: Path, spec: Write) -> None:
    save("mixtral", tmp_path / "hf")
    path = spec(f"hf:{tmp_path / 'hf'}", model={"moe": {"balance_loss": 0.5}})
    for overrides, z_loss in (([], 0.0), (["model.moe.z_loss=0.1"], 0.1)):
        moe = resolve(path, overrides).spec.model.moe
        assert moe is not None
        assert (moe.experts, moe.top_k, moe.ffn, moe.balance_loss, moe.z_loss) == (4, 2, 24, 0.5, z_loss)
    with pytest.raises(ArgosyError) as refused:
        resolve(path, ["model.moe.top_k=1"])
    assert refused.value.key == "model.moe.top_k"


def test_experts_that_had_no_biases_get_some_and_those_that_have_keep_them(tmp_path: Path, spec: Write) -> None:
    save("mixtral", tmp_path / "hf")
    start = f"hf:{tmp_path / 'hf'}"
    run = _run(spec(start), "model.moe.bias_rate=0.25", "name=levelled")
    assert {abs(float(b)) for b in _weights(run)["layers.1.mlp.router.bias"]} <= {0.0, 0.25}  # one step from zero
    source = open_source(start)
    torch.testing.assert_close(
        _weights(run)["layers.1.mlp.router.weight"], source.read("layers.1.mlp.router.weight"), rtol=0, atol=1e-6
    )
    again = spec(str(run.root))
    resolve(again, ["model.moe.bias_rate=0.5"])
    with pytest.raises(ArgosyError) as refused:  # without its biases it would choose other experts
        resolve(again, ["model.moe.bias_rate=null"])
    assert (refused.value.code, refused.value.key) == ("config.conflict", "model.moe.bias_rate")


def test_a_dry_run_says_what_it_starts_from(llama: str, spec: Write) -> None:
    assert any(llama in line for line in dry_run(resolve(spec(llama)), TrainOptions()))


def test_nothing_to_start_from_is_refused_before_the_run_directory_is_made(spec: Write, tmp_path: Path) -> None:
    for where in ("hf:nowhere", str(tmp_path / "runs" / "nowhere")):
        with pytest.raises(ArgosyError, match="nowhere"):
            resolve(spec(where))


def test_an_imported_model_is_not_trained_in_place(llama: str, spec: Write, tmp_path: Path) -> None:
    import_hf(llama, tmp_path / "runs" / "tiny")
    with pytest.raises(ArgosyError, match="imported model") as refused:
        _run(spec(llama))
    assert refused.value.code == "run.exists"


def test_an_imported_model_is_evaluated_on_a_corpus_it_is_given(llama: str, corpus: Path, tmp_path: Path) -> None:
    import_hf(llama, tmp_path / "imported")
    result, step = evaluate_run(str(tmp_path / "imported"), split="validation", batches=1, data=str(corpus))
    assert (step, result.split) == (0, str(corpus))
    with pytest.raises(ArgosyError, match="no data of its own"):
        evaluate_run(str(tmp_path / "imported"), split="validation", batches=1)


def test_a_model_for_very_long_texts_is_evaluated_in_samples_that_a_corpus_has(
    llama: str, corpus: Path, tmp_path: Path
) -> None:
    config = tmp_path / "hf" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 131_072}))
    found = {n: evaluate_run(llama, split="", batches=1, data=str(corpus), seq_len=n)[0] for n in (None, 48)}
    assert (found[None].tokens % 4096, found[48].tokens) == (0, 8 * 48)
    with pytest.raises(ArgosyError) as refused:
        evaluate_run(llama, split="validation", batches=1, seq_len=48)
    assert (refused.value.code, refused.value.key) == ("config.conflict", "--seq-len")
    with pytest.raises(ArgosyError) as refused:
        evaluate_run(llama, split="", batches=1, data=str(corpus), seq_len=131_073)
    assert (refused.value.code, refused.value.key) == ("config.arithmetic", "--seq-len")


def test_a_tokenizer_that_lies_there_in_two_forms_is_known_in_both(llama: str, tmp_path: Path) -> None:
    import io

    from argosy.data.text.tokenizer import load_tokenizer, train_bpe

    sentencepiece = pytest.importorskip("sentencepiece")
    for name in ("hf/tokenizer.model", "another.model"):
        words, model = iter([f"words of {name} and more of them"] * 50), io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=words, model_writer=model, vocab_size=25, minloglevel=2
        )
        (tmp_path / name).write_bytes(model.getvalue())
    (tmp_path / "hf" / "tokenizer.json").write_text(train_bpe(["some words"], 257))
    source = open_source(llama)
    assert source.reads(load_tokenizer(str(tmp_path / "hf" / "tokenizer.json")))
    assert source.reads(load_tokenizer(str(tmp_path / "hf" / "tokenizer.model")))
    assert not source.reads(load_tokenizer(str(tmp_path / "another.model")))


@pytest.mark.parametrize(
    ("template", "asked"), [("<s> $A", None), ("$A </s>", None), (None, None), ("<s> $A", False), (None, True)]
)
def test_an_imported_model_is_sampled_with_what_its_tokenizer_puts_in_front(
    template: str | None, asked: bool | None, llama: str, tmp_path: Path
) -> None:
    from tokenizers import Tokenizer, models, processors
    from transformers import LlamaForCausalLM

    engine = Tokenizer(models.BPE(vocab={chr(32 + n): n for n in range(90)} | {"<s>": 256, "</s>": 255}, merges=[]))
    engine.add_special_tokens(["<s>", "</s>"])
    if template is not None:
        engine.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[("<s>", 256), ("</s>", 255)]
        )
    engine.save(str(tmp_path / "hf" / "tokenizer.json"))
    if asked is not None:
        (tmp_path / "hf" / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": asked}))
    import_hf(llama, tmp_path / "imported")
    opening = [256] if asked or (asked is None and template == "<s> $A") else []
    ids = torch.tensor([opening + engine.encode("once", add_special_tokens=False).ids])
    theirs = LlamaForCausalLM.from_pretrained(tmp_path / "hf")
    written = theirs.generate(ids, max_new_tokens=9, do_sample=False)[0].tolist()
    found = sample(str(tmp_path / "imported"), "once", Sampling(tokens=9, temperature=0.0))
    assert found == engine.decode(written[len(opening) :])


def test_an_evaluation_on_another_tokenizers_data_says_so(
    llama: str, corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from tokenizers import Tokenizer, models

    Tokenizer(models.BPE(vocab={chr(97 + n): n for n in range(20)}, merges=[])).save(
        str(tmp_path / "hf" / "tokenizer.json")
    )
    with caplog.at_level("INFO", logger="argosy"):
        evaluate_run(llama, split="validation", batches=1, data=str(corpus))
    assert "not made with the tokenizer of" in caplog.text
