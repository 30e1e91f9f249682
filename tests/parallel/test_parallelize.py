"""What a layout does to a model on one device changes how it computes, never what."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from argosy.config.resolve import resolve
from argosy.model.build import initial_weights
from argosy.model.objective import Objective
from argosy.model.ops import hopper
from argosy.parallel.mesh import Mesh
from argosy.parallel.parallelize import graph_mode, graph_refusal, parallelize
from argosy.plan.advise import work_of
from argosy.plan.own_layout import layout_of

SIZES = ["layers=2", "hidden=32", "heads=4", "ffn=64", "vocab_size=64", "max_seq_len=64"]


EXPERTS = ["mlp_bias=false", "moe={experts: 4, top_k: 2, ffn: 24, router: sigmoid, bias_rate: 0.1, z_loss: 0.1}"]


def _built(more: list[str], layout: dict[str, Any], precision: str = "auto") -> nn.Module:
    keys = [
        f"train.precision={precision}",
        "model.preset=gpt2",
        *(f"model.{key}" for key in [*SIZES, *more]),
        "data.train=synthetic",
        "data.seq_len=64",
    ]
    keys += [f"parallel.{key}={value}" for key, value in ({"micro_batch": 2} | layout).items()]
    spec = resolve(None, [*keys, "train.global_batch=2", "train.steps=3", "optim.lr=1e-3", "eval=off"]).spec
    weights = partial(initial_weights, spec=spec.model, seed=5)
    return parallelize(spec, Mesh(torch.device("cpu")), weights=weights).model


def _train(
    layout: dict[str, Any], *, dropout: float, more: list[str] | None = None, precision: str = "auto"
) -> tuple[list[torch.Tensor], list[str]]:
    """Losses and last gradients of three steps."""
    model = _built([f"dropout={dropout}", *(more or [])], layout, precision)
    results = []
    for step in range(3):
        torch.manual_seed(step)
        tokens, labels = torch.randint(0, 64, (2, 2, 64))
        model.zero_grad()
        loss = model(tokens, labels, Objective())
        loss.total.backward()
        results.append(loss.total.detach())
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [*results, *gradients], [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("more", [[], EXPERTS], ids=["dense", "experts"])
def test_recomputing_gives_the_same_bits_and_names_with_dropout(recompute: str, more: list[str]) -> None:
    expected, names = _train({}, dropout=0.2, more=more)
    found, found_names = _train({"recompute": recompute}, dropout=0.2, more=more)
    assert found_names == names
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


class _Calls(TorchDispatchMode):
    """Counts the calls of one operation."""

    def __init__(self, operation: Any) -> None:
        super().__init__()
        self.operation, self.count = operation, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is self.operation
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("recompute", "products"), [("none", 4), ("selective", 4), ("full", 6)])
def test_selective_recomputing_multiplies_the_experts_no_second_time(recompute: str, products: int) -> None:
    with _Calls(torch.ops.argosy.grouped_product.default) as calls:
        _train({"recompute": recompute}, dropout=0.0, more=EXPERTS)
    assert calls.count == products * 2 * 3  # up and down, forward and for the gradient; in two layers; in three steps


class _Storages(TorchDispatchMode):
    """Remembers the memory of every result, without keeping it alive."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.made[StorageWeakRef(storage)] = storage.nbytes()
        return result

    def alive(self) -> int:
        return sum(size for storage, size in self.made.items() if not storage.expired())


def test_each_way_of_recomputing_keeps_less() -> None:
    def kept(recompute: str) -> int:
        model = _built([], {"recompute": recompute})
        tokens, labels = torch.randint(0, 64, (2, 2, 64))
        with _Storages() as storages:
            loss = model(tokens, labels, Objective())
        kept = storages.alive()
        loss.total.backward()
        return kept

    everything, costly, inputs = kept("none"), kept("selective"), kept("full")
    assert everything > 1.2 * costly > 1.2 * 1.2 * inputs


@pytest.mark.parametrize(
    ("scope", "recompute", "more"),
    [
        ("block", "none", []),
        ("block", "full", []),
        ("block", "selective", EXPERTS),
        ("model", "none", []),
        ("model", "selective", []),
    ],
)
def test_compiling_gives_the_same_numbers_from_one_graph_and_what_follows_the_loss(
    scope: str, recompute: str, more: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled, whole = nn.Module.compile, scope == "block"
    monkeypatch.setattr(nn.Module, "compile", lambda module: compiled(module, backend="aot_eager", fullgraph=whole))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    expected, names = _train({}, dropout=0.0, more=more)
    found, found_names = _train({"compile": scope, "recompute": recompute}, dropout=0.0, more=more)
    assert found_names == names
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= (1 if whole else 3)


@pytest.mark.parametrize("scope", ["block", "model"])
def test_8_bit_matmuls_are_compiled_and_give_the_same_numbers(scope: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their biases have gradients of 16 bits, and sums of 32."""
    compiled = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda module: compiled(module, backend="aot_eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    expected, _ = _train({}, dropout=0.0, precision="fp8")
    found, _ = _train({"compile": scope}, dropout=0.0, precision="fp8")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_a_model_that_is_not_compiled_does_not_wait_for_the_compiler_to_load() -> None:
    code = """
import sys
from argosy.config.resolve import resolve
from argosy.data.synthetic import synthetic_batch
from argosy.measure.step_bench import start
from argosy.train.device import prepare_device
from argosy.train.step import take_step
sizes = "layers: 1, hidden: 8, heads: 1, vocab_size: 16, max_seq_len: 4, dropout: 0.1"
keys = ["model={family: gpt, " + sizes + "}", "data.train=synthetic", "data.seq_len=4"]
spec = resolve(None, [*keys, "train.global_batch=1", "train.steps=1", "optim.lr=1e-3", "eval=off"]).spec
take_step(*start(spec, prepare_device(spec.train)), synthetic_batch(spec), step=1, lr=1e-3)
sys.exit("torch._dynamo" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("keys", "mode"),
    [
        ([], "auto"),
        (["data.document_mask=true"], "auto"),
        (["data.document_mask=true", "data.seq_len=1000"], None),
        (["data.task=prefix-lm"], None),
        (["model.dropout=0.1"], "auto"),
        (["model.dropout=0.1", "parallel.recompute=selective"], None),
        (["parallel.graph=off"], None),
        (["parallel.graph=on"], "on"),
        (["parallel.dp_replicate=2"], "auto"),
        (["parallel.tp=2"], "advise"),
        (["parallel.cp=2"], "advise"),
        (["parallel.graph=on", "parallel.tp=2", "parallel.dp_replicate=2"], "on"),
        (["parallel.graph=on", "parallel.cp=2", "data.document_mask=true"], None),
        (["parallel.pp=2"], None),
        (["parallel.dp_shard=2"], "advise"),
        (["parallel.graph=on", "parallel.dp_shard=2"], "on"),
        (["parallel.dp_shard=2", "parallel.dp_replicate=2"], None),
        (["parallel.compile=block"], None),
        (["parallel.dp_replicate=2", "model.dropout=0.1", "parallel.recompute=full"], None),
        (["model=moe-3.5b-a1.1b"], "auto"),
        (["model=moe-3.5b-a1.1b", "parallel.dp_shard=2", "parallel.ep=2"], None),
        # A GPU has no grouped matmul for these.
        (["model=moe-3.5b-a1.1b", "model.moe.ffn=1020"], None),
        (
            ["model=moe-3.5b-a1.1b", "model.moe.ffn=1032", "parallel.graph=on", "parallel.tp=2", "parallel.sp=false"],
            None,
        ),
        (["model=moe-3.5b-a1.1b", "train.precision=fp32", "parallel.graph=on", "parallel.dp_shard=2"], None),
        (["model=moe-3.5b-a1.1b", "train.precision=fp16", "parallel.graph=on"], None),
        (["model=moe-3.5b-a1.1b", "train.precision=fp8", "parallel.graph=on"], "on"),
    ],
)
def test_passes_are_captured_where_a_replay_has_the_same_bits(
    keys: list[str], mode: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Documents do where Argosy's own kernels read them. The planner takes the same passes to be captured, but for those with documents."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(hopper, "_TRITON", "3.6.0")
    needed = ["model=gpt2", "data.train=corpus", "train.global_batch=8", "train.steps=9", "optim.lr=1e-3"]
    spec = resolve(None, [*needed, *keys]).spec
    precision = "bf16" if spec.train.precision == "auto" else spec.train.precision
    assert graph_mode(spec, graph_refusal(spec, precision, torch.device("cuda"))) == mode
    planned = work_of(spec).replays(layout_of(spec.parallel))
    assert planned == (mode in ("auto", "on") and not spec.data.document_mask)
