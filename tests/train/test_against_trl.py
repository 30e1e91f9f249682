"""Fine-tuning computes what TRL computes from the same conversations and weights: masks, losses and gradients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers as T
from torch import Tensor
from torch.nn import functional as F

from argosy.checkpoint.hf.hf_adapter import export_adapter
from argosy.checkpoint.hf.hf_convert import entries, to_theirs
from argosy.checkpoint.hf.hf_export import ExportOptions, export_hf
from argosy.checkpoint.source import open_source, starting_weights
from argosy.config.model import ModelSpec
from argosy.config.resolve import resolve
from argosy.config.schema import RunSpec
from argosy.data.chat.chat_template import chat_format
from argosy.data.corpus.corpus import open_corpus
from argosy.data.open import open_data
from argosy.data.prepare.job import prepare
from argosy.data.prepare.work import PrepareOptions
from argosy.data.samples.conversations import read_conversation
from argosy.data.text.tokenizer import load_tokenizer
from argosy.errors import ArgosyError
from argosy.infer.loading import load_model
from argosy.infer.reference_answers import write_references
from argosy.model.build import build_model
from argosy.parallel.engine import Engine
from argosy.parallel.mesh import Mesh
from argosy.parallel.parallelize import parallelize
from argosy.tasks.task_registry import task_of
from argosy.train.run import TrainOptions, train
from chat_files import CHATML, MARKED, messages, write_tokenizer

SEQ, COUNT = 128, 6


class Base(NamedTuple):
    """A small Llama with a chat model's tokenizer, in a directory."""

    directory: Path
    chats: list[dict[str, Any]]

    def model(self) -> Any:
        return T.LlamaForCausalLM.from_pretrained(self.directory, dtype=torch.float32)

    def tokenizer(self) -> Any:
        return T.PreTrainedTokenizerFast.from_pretrained(self.directory)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    root = tmp_path_factory.mktemp("trl")
    torch.manual_seed(0)
    config = T.LlamaConfig(
        num_hidden_layers=2, hidden_size=48, vocab_size=302, max_position_embeddings=SEQ, num_attention_heads=6,
        num_key_value_heads=2, intermediate_size=80,
    )  # fmt: skip
    T.LlamaForCausalLM(config).save_pretrained(root / "base")
    write_tokenizer(root / "base", MARKED)
    return Base(root / "base", [{"messages": messages(n, 1 + n % 3)} for n in range(COUNT)])


def prepared(base: Base, output: Path, records: list[dict[str, Any]], *, pairs: bool = False) -> Path:
    source = output.with_suffix(".jsonl")
    source.write_text("".join(json.dumps(record) + "\n" for record in records))
    options = PrepareOptions(chat=chat_format(str(base.directory), pairs=pairs), workers=1)
    prepare([str(source)], load_tokenizer(str(base.directory), special_in_text=True), output, options)
    return output


def ours(base: Base, corpus: Path, *keys: str, policy: Path | None = None) -> tuple[RunSpec, Engine]:
    """Return a run that starts from the base, and its engine with the weights of `policy`, or of the base itself."""
    spec = resolve(
        None,
        [
            f"init_from=hf:{base.directory}", f"data.train={corpus}", f"data.seq_len={SEQ}", "data.split=[1,0,0]", "eval=off",
            "train.precision=fp32", "train.global_batch=1", "train.steps=1", "optim.lr=1e-3", "parallel.micro_batch=1", *keys,
        ],
    ).spec  # fmt: skip
    source = open_source(f"hf:{policy or base.directory}")
    return spec, parallelize(
        spec,
        Mesh(torch.device("cpu")),
        weights=lambda model: starting_weights(source, model, spec.model, spec.train.seed),
    )


def gradients_of(model: Any, directory: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the gradients of a transformers model by our names: stored as its weights, and read as a model of ours would be."""
    for parameter in model.parameters():
        parameter.data = parameter.grad
    model.save_pretrained(directory)
    source = open_source(f"hf:{directory}")
    yield from ((name, source.read(name)) for name in source.infos)


def test_sft_computes_the_loss_and_gradients_of_trl(base: Base, tmp_path: Path) -> None:
    """TRL pads each conversation; ours are packed, two and more in a row."""
    from datasets import Dataset  # loaded here: with TRL and PEFT it takes every worker 2 s to collect
    from trl import SFTConfig, SFTTrainer

    settings = SFTConfig(
        output_dir=str(tmp_path / "trl"), assistant_only_loss=True, max_length=SEQ, per_device_train_batch_size=COUNT, use_cpu=True,
        report_to=[], bf16=False, gradient_checkpointing=False,
    )  # fmt: skip
    model = base.model()
    trainer = SFTTrainer(
        model=model, args=settings, train_dataset=Dataset.from_list(base.chats), processing_class=base.tokenizer()
    )
    batch = next(iter(trainer.get_train_dataloader()))
    expected = trainer.compute_loss(model.train(), dict(batch))
    expected.backward()

    corpus = prepared(base, tmp_path / "corpus", base.chats)
    spec, engine = ours(base, corpus, "data.task=sft")
    stream = open_data(spec).training()
    assert 1 < stream.epoch_samples < COUNT
    result = engine.forward_backward(stream.batch(0, stream.epoch_samples), 1)
    assert int(result.tokens) == int((batch["labels"][:, 1:] != -100).sum())
    assert float(result.loss_sum) / int(result.tokens) == pytest.approx(expected.item(), rel=1e-6)
    found = dict(engine.model.named_parameters())
    for name, gradient in gradients_of(model, tmp_path / "gradients"):
        torch.testing.assert_close(found[name].grad / int(result.tokens), gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("template", ["marked", "plain"])
def test_masks_are_those_of_trl(base: Base, tmp_path: Path, template: str) -> None:
    """A marked template masks as `assistant_only_loss` does. One without marks, as TRL masks the prompt of a completion, turn by turn."""
    tokenizer = base.tokenizer()
    directory = write_tokenizer(tmp_path / "tokenizer", MARKED if template == "marked" else CHATML)
    corpus = open_corpus(prepared(Base(directory, base.chats), tmp_path / "corpus", base.chats))
    for number, chat in enumerate(base.chats):
        tokens, learnt = read_conversation(corpus, number, 1 << 20)
        theirs = tokenizer.apply_chat_template(
            chat["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        assert tokens.tolist() == theirs["input_ids"]
        assert learnt.astype(int).tolist() == theirs["assistant_masks"]


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_peft_loads_the_adapters_of_a_run_and_computes_its_gradients(base: Base, tmp_path: Path, dora: bool) -> None:
    from peft import PeftModel

    corpus = prepared(base, tmp_path / "corpus", base.chats)
    run = resolve(
        None,
        [
            "name=lora", f"runs_dir={tmp_path}", f"init_from=hf:{base.directory}", f"data.train={corpus}", f"data.seq_len={SEQ}",
            "data.split=[1,0,0]", "data.task=sft", "eval=off", f"model.lora={{rank: 4, alpha: 8, dora: {str(dora).lower()}}}", "train.global_batch=2",
            "train.steps=3", "optim.lr=1e-2", "checkpoint.mode=sync",
        ],
    )  # fmt: skip
    assert train(run, None, TrainOptions(quiet=True)) == 0
    export_adapter(str(tmp_path / "lora"), tmp_path / "adapter")
    adapted = PeftModel.from_pretrained(base.model(), tmp_path / "adapter").eval()
    merged = load_model(str(tmp_path / "lora"), device="cpu").model
    tokens = torch.arange(40)[None] * 7 % 302
    with torch.no_grad():
        expected = adapted(tokens).logits
        torch.testing.assert_close(merged(tokens), expected, rtol=1e-5, atol=1e-5)
        assert (expected - base.model().eval()(tokens).logits).abs().max() > 1e-3
    export_hf(str(tmp_path / "lora"), tmp_path / "merged", ExportOptions())
    whole = T.LlamaForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    assert T.AutoTokenizer.from_pretrained(tmp_path / "merged").chat_template == MARKED
    with torch.no_grad():
        torch.testing.assert_close(whole(tokens).logits, expected, rtol=1e-5, atol=1e-5)
    theirs = PeftModel.from_pretrained(base.model(), tmp_path / "adapter", is_trainable=True)
    require_gradients_of_peft(run.spec.model, tmp_path / "lora", theirs, tokens)


@pytest.mark.parametrize("keys", ["", ", dora: true", ", targets: [out]"], ids=["all", "dora", "one of two of a name"])
def test_peft_loads_adapters_of_gpt2_whose_layers_are_no_linear_ones(
    write_spec: Any, tmp_path: Path, keys: str
) -> None:
    from peft import PeftModel

    config = T.GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=257, n_positions=32)
    torch.manual_seed(0)
    T.GPT2LMHeadModel(config).save_pretrained(tmp_path / "hf")
    path = write_spec(init_from=f"hf:{tmp_path / 'hf'}", model=None, optim={"lr": 1e-2})
    path.write_text(path.read_text().replace("model: null\n", ""))
    run = resolve(path, [f"model.lora={{rank: 4, alpha: 8{keys}}}"])
    assert train(run, path, TrainOptions(quiet=True)) == 0
    export_adapter(str(tmp_path / "runs" / "tiny"), tmp_path / "adapter")
    base = T.GPT2LMHeadModel.from_pretrained(tmp_path / "hf").eval()
    adapted = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    tokens = torch.arange(30)[None] * 7 % 257
    with torch.no_grad():
        found = load_model(str(tmp_path / "runs" / "tiny"), device="cpu").model(tokens)
        torch.testing.assert_close(found, adapted(tokens).logits, rtol=1e-5, atol=1e-5)
    names = {name.split(".lora_")[0] for name, _ in adapted.named_parameters() if ".lora_A" in name}
    assert len(names) == (2 if "targets" in keys else 8)


def require_gradients_of_peft(spec: ModelSpec, run: Path, theirs: Any, tokens: Tensor) -> None:
    """Compare the loss of the run's adapted model with PEFT's, and the gradients of its adapters.

    PEFT's queries, keys and values have an A each, where ours have one."""
    found = open_source(str(run)).checkpoint
    assert found is not None
    stored, model = found.weights(), build_model(spec)
    model.load_state_dict({name: stored[name] for name in stored.infos})
    losses = [F.cross_entropy(logits[0, :-1], tokens[0, 1:]) for logits in (model(tokens), theirs(tokens).logits)]
    torch.testing.assert_close(*losses, rtol=1e-6, atol=1e-6)
    for loss in losses:
        loss.backward()
    ours = {name: parameter.grad for name, parameter in model.named_parameters()}
    names = {name: parameter.grad for name, parameter in theirs.named_parameters() if parameter.requires_grad}
    for entry in entries(spec):
        layer = entry.ours.removesuffix(".weight")
        if f"{layer}.lora_a" not in ours:
            continue
        modules = [f"base_model.model.{name.removesuffix('.weight')}" for name in entry.theirs]
        a = sum(names.pop(f"{module}.lora_A.default.weight") for module in modules)
        torch.testing.assert_close(ours[f"{layer}.lora_a"], a, rtol=1e-4, atol=1e-6)
        for part, there in [("lora_b", "lora_B"), ("lora_magnitude", "lora_magnitude_vector")]:
            if (gradient := ours.get(f"{layer}.{part}")) is not None:
                rows = to_theirs(entry, gradient.reshape(len(gradient), -1)).values()
                for module, mine in zip(modules, rows, strict=True):
                    other = names.pop(f"{module}.{there}.default.weight")
                    torch.testing.assert_close(mine.view_as(other), other, rtol=1e-4, atol=1e-6)
    assert not names


def test_dpo_computes_the_loss_and_gradients_of_trl(base: Base, tmp_path: Path) -> None:
    """The model has moved away from the reference, so that every pair has a loss of its own."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    pairs = []
    for number in range(4):
        said, other = messages(number, 2), messages(number + 1, 2)
        pairs.append({"prompt": said[:-1], "chosen": said[-1:], "rejected": other[-1:]})
    model = base.model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    model.save_pretrained(tmp_path / "policy")
    settings = DPOConfig(
        output_dir=str(tmp_path / "trl"), beta=0.3, max_length=SEQ, per_device_train_batch_size=4, use_cpu=True, report_to=[],
        bf16=False, gradient_checkpointing=False,
    )  # fmt: skip
    trainer = DPOTrainer(
        model=model, ref_model=base.model(), args=settings, train_dataset=Dataset.from_list(pairs), processing_class=base.tokenizer()
    )  # fmt: skip
    batch = next(iter(trainer.get_train_dataloader()))
    expected = trainer.compute_loss(model.eval(), dict(batch))
    expected.backward()

    corpus = prepared(base, tmp_path / "corpus", pairs, pairs=True)
    keys = ("data.task=dpo", "data.dpo.beta=0.3", "data.seq_len=192", "model.max_seq_len=192")
    spec, engine = ours(base, corpus, *keys, policy=tmp_path / "policy")
    with pytest.raises(ArgosyError, match="argosy data reference"):
        open_data(spec).training()
    write_references(spec, device="cpu")
    data = open_data(spec)
    stream = data.training()
    # The weights at init_from may change after the reference was computed; a resumed run notices another reference.
    task_of(spec).check_weights(data.corpora, open_source(f"hf:{base.directory}").identity)
    with pytest.raises(ArgosyError, match="has other weights now"):
        task_of(spec).check_weights(data.corpora, open_source(f"hf:{tmp_path / 'policy'}").identity)
    assert {"reference_weights", "reference_sha256"} < data.facts()["corpora"][0].keys()
    result = engine.forward_backward(stream.batch(0, len(pairs)), 1)
    tokens = int(result.tokens)
    assert float(result.loss_sum) / tokens == pytest.approx(expected.item(), rel=1e-5)
    assert 0 <= float(result.metrics["reward_accuracy"]) / tokens <= 1
    found = dict(engine.model.named_parameters())
    for name, gradient in gradients_of(model, tmp_path / "gradients"):
        torch.testing.assert_close(found[name].grad / tokens, gradient, rtol=1e-4, atol=1e-6)
