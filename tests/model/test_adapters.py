"""LoRA: only adapters are trained, a run begins with the model it starts from, and merged weights compute the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from argosy.checkpoint.source import open_source
from argosy.checkpoint.store import listed
from argosy.config.counts import count_parameters, training_flops_per_token
from argosy.config.resolve import Resolved, resolve, resolve_model
from argosy.errors import ArgosyError
from argosy.families.adapter_sizes import is_adapter
from argosy.infer.loading import load_model
from argosy.model.build import build_model, initialise
from argosy.model.ops.low_rank import merged, row_norms
from argosy.plan.calibration import calibration
from argosy.plan.hardware import parse_cluster
from argosy.plan.layouts import Layout, Work
from argosy.plan.memory import layer_activations, memory_of
from argosy.plan.time import step_time
from argosy.train.run import TrainOptions, train
from tiny import TINY_MODEL

KEYS = ("model.lora.rank=4", "model.lora.alpha=8")


def run_of(tmp_path: Path, corpus: Path, name: str, *keys: str) -> Resolved:
    model = ", ".join(f"{key}: {value}" for key, value in TINY_MODEL.items())
    return resolve(
        None,
        [
            f"name={name}", f"runs_dir={tmp_path}", f"model={{{model}}}", f"data.train={corpus}", "data.seq_len=32", "eval=off",
            "train.global_batch=4", "optim.lr=1e-2", "optim.schedule=constant", "checkpoint.mode=sync", *keys,
        ],
    )  # fmt: skip


def trained(run: Resolved) -> Path:
    assert train(run, None, TrainOptions(quiet=True)) == 0
    return Path(run.spec.runs_dir) / run.spec.name


def bits(run: Path) -> dict[str, bytes]:
    newest = listed(run / "checkpoints")[0]
    return {path.name: path.read_bytes() for path in newest.glob("*.safetensors")}


# How far the logits of merged weights may be from those of adapters. Frozen weights of 16 bits are merged into weights of 16 bits.
@pytest.mark.parametrize(("precision", "error"), [("fp32", 1e-5), ("bf16", 2e-2)])
@pytest.mark.parametrize("keys", [KEYS, (*KEYS, "model.lora.dora=true")], ids=["lora", "dora"])
def test_a_run_trains_adapters_beside_the_model_it_starts_from(
    corpus: Path, tmp_path: Path, keys: tuple[str, ...], precision: str, error: float
) -> None:
    base = trained(run_of(tmp_path, corpus, "base", "train.steps=2", f"train.precision={precision}"))
    start = [f"init_from={base}", f"train.precision={precision}", *keys]
    run = trained(run_of(tmp_path, corpus, "lora", "train.steps=4", *start))
    before, after = open_source(str(base)), open_source(str(run))
    assert before.infos.keys() == after.infos.keys()
    checkpoint = after.checkpoint
    assert checkpoint is not None
    stored = checkpoint.weights()
    for name in stored.infos:
        if not is_adapter(name):
            # In 16-bit training, frozen weights have 16 bits.
            assert torch.equal(stored[name], before.read(name).to(stored[name].dtype)), name
    assert all(is_adapter(name) for name in checkpoint.optimizer().infos)
    assert float(stored["layers.1.mlp.down.lora_b"].abs().max()) > 0
    # Resumed, the bits are the same.
    trained(run_of(tmp_path, corpus, "cut", "train.steps=1", *start))
    assert bits(trained(run_of(tmp_path, corpus, "cut", "train.steps=4", *start))) == bits(run)
    # What samples and exports reads is the merged model, which computes what the adapted one does.
    spec = resolve(
        None,
        [f"init_from={base}", *keys, f"data.train={corpus}", "train.global_batch=4", "train.steps=1", "optim.lr=1"],
    )
    adapted = build_model(spec.spec.model).eval()
    adapted.load_state_dict({name: stored[name] for name in stored.infos})
    tokens = torch.arange(24)[None] * 7 % 257
    with torch.no_grad():
        found, expected = load_model(str(run), device="cpu", precision="fp32").model(tokens), adapted(tokens)
        assert float((found - expected).norm()) <= error * float(expected.norm())


@pytest.mark.parametrize("dora", ["false", "true"])
def test_fresh_adapters_change_nothing(dora: str) -> None:
    sizes = ["layers=2", "hidden=32", "heads=4", "kv_heads=2", "head_dim=8", "ffn=48", "vocab_size=64"]
    spec = resolve_model("llama3-8b", [*sizes, f"lora={{rank: 2, targets: [qkv, down], dora: {dora}}}"])
    adapted, plain = build_model(spec), build_model(spec.model_copy(update={"lora": None}))
    initialise(adapted, spec, 1)
    initialise(plain, spec, 1)
    tokens = torch.arange(8)[None]
    assert torch.equal(adapted(tokens), plain(tokens))
    names = {name.rpartition(".")[0].rpartition(".")[2] for name, _ in adapted.named_parameters() if is_adapter(name)}
    assert names == {"qkv", "down"}
    count = count_parameters(spec)
    assert count.total == sum(parameter.numel() for parameter in adapted.parameters())
    added = [p for name, p in adapted.named_parameters() if is_adapter(name)]
    assert count.matrices == sum(p.numel() for p in added if p.ndim == 2)
    assert count.total - count.fixed == sum(p.numel() for p in added)


def test_the_plan_counts_frozen_weights_and_adapters() -> None:
    keys = ["model=llama2-7b", "data.train=x", "train.global_batch=8", "train.steps=1", "optim.lr=1"]
    full, lora = (resolve(None, [*keys, *more]).spec.model for more in ((), ("model.lora.rank=16",)))
    assert 0.6 < training_flops_per_token(lora) / training_flops_per_token(full) < 0.75
    known = calibration()
    of_full, of_lora = (
        memory_of(Work(model, 4096, 8), Layout(), known.stacks["argosy"], known)[0] for model in (full, lora)
    )
    # 16-bit weights and nothing else, but for 40 million adapter parameters of 16 bytes.
    assert of_lora.weights == pytest.approx(2 * count_parameters(lora).total / 2**30, rel=0.01)
    sharded = memory_of(Work(lora, 4096, 8), Layout(dp=8, zero=3), known.stacks["argosy"], known)[0]
    assert sharded.weights == pytest.approx(of_lora.weights / 8, rel=0.02)
    assert of_lora.optimiser < 0.01 * of_full.optimiser
    assert of_lora.gradients < 0.02 * of_full.gradients
    # Selective recompute keeps the products of adapters beside those of the layers.
    kept_of_full, kept = (
        layer_activations(Work(model, 4096, 8), Layout(recompute="selective"), known.stacks["argosy"])[0]
        for model in (full, lora)
    )
    assert kept - kept_of_full == 2 * (5 * full.hidden + 2 * full.ffn)


def test_the_plan_counts_magnitudes_norms_and_unscaled_outputs() -> None:
    keys = [
        "model=llama2-7b",
        "data.train=x",
        "train.global_batch=8",
        "train.steps=1",
        "optim.lr=1",
        "model.lora.rank=16",
    ]
    lora, dora = (resolve(None, [*keys, f"model.lora.dora={on}"]).spec.model for on in ("false", "true"))
    magnitudes = lora.layers * (3 * lora.hidden + lora.hidden + 2 * lora.ffn + lora.hidden)
    assert count_parameters(dora).total - count_parameters(lora).total == magnitudes
    assert training_flops_per_token(dora) == training_flops_per_token(lora)
    known = calibration()
    stack = known.stacks["argosy"]
    works = [Work(model, 4096, 8) for model in (lora, dora)]
    plain, more = (memory_of(work, Layout(), stack, known)[0] for work in works)
    assert (more.weights - plain.weights) * 2**30 == pytest.approx(stack.weight * magnitudes)
    assert (more.optimiser - plain.optimiser) * 2**30 == pytest.approx(stack.optimiser * magnitudes)
    # The outputs of all linear layers of 4096 tokens, in 16 bits.
    assert (more.activations - plain.activations) * 2**30 == pytest.approx(2 * magnitudes * 4096)
    faster, slower = (step_time(work, Layout(), parse_cluster("1xh100"), stack, known).total for work in works)
    assert faster < slower < 1.3 * faster


@pytest.mark.parametrize(
    ("model", "why"),
    [("bert-base", "adapts decoders"), ("gpt2", "names gate"), ("mixtral-8x7b", "experts have no adapters")],
)
def test_adapters_that_a_model_cannot_have_are_refused(model: str, why: str) -> None:
    with pytest.raises(ArgosyError, match=why):
        resolve(
            None,
            [
                f"model.preset={model}",
                "model.lora={rank: 2, targets: [gate]}",
                "data.train=x",
                "train.global_batch=1",
                "train.steps=1",
                "optim.lr=1",
            ],
        )


def test_a_row_of_zeros_stays_zero_with_dora() -> None:
    weight, a, b = torch.ones(2, 3), torch.ones(1, 3), torch.zeros(2, 1)
    weight[0] = 0
    assert torch.equal(merged(weight, a, b, 1.0, row_norms(weight)), weight)
