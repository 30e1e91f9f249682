"""On GPUs only (`make test-gpu`): what the matrix cannot try on a CPU. The rest of the matrix runs there as it is, with NCCL."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from argosy.config.resolve import resolve
from argosy.config.schema import RunSpec
from argosy.data.synthetic import synthetic_batch
from argosy.measure.step_bench import start
from argosy.parallel import cuda_graphs
from argosy.parallel.cuda_graphs import Recording
from argosy.train.device import prepare_device
from argosy.train.step import take_step
from dist.pool import Pool
from dist.test_matrix import COMPILED, of_one_process, reference, require_equal, run

CLOSE = {"bf16": 3e-3, "fp16": 3e-3, "fp8": 1e-2}
LAYOUTS = [
    "dp_replicate=2",
    "dp_shard=2",
    "tp=2",
    "pp=2",
    "cp=2",
    "dp_shard=2 tp=2",
    "dp_shard=2 ep=2",
    "pp=2 dp_shard=2",
    "pp=2 dp_shard=2 schedule=zbv",
]


@pytest.mark.parametrize("precision", CLOSE)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_in_fewer_bits_follows_one_process(pool: Pool, layout: str, precision: str) -> None:
    """Closely, not to the last bits: a sum over ranks is rounded where one process rounds another. The process takes the micro-batches of
    the ranks, since a scale for 8 bits is that of a micro-batch."""
    model, keys = "moe" if "ep=" in layout else "llama", f"{layout} train.precision={precision}"
    expected = reference(model, of_one_process(keys), 4)
    for trace in run(pool, model, keys, steps=4):
        np.testing.assert_allclose(trace.losses, expected.losses, rtol=CLOSE[precision])


@pytest.mark.parametrize("scope", ["block", "model"])
@pytest.mark.parametrize("layout", COMPILED)
def test_a_layout_compiled_for_this_gpu_computes_the_same(pool: Pool, layout: str, scope: str) -> None:
    require_equal("moe", layout, run(pool, "moe", f"{layout} compile={scope}"))


@pytest.mark.parametrize(
    "keys",
    [
        "model=gpt2",
        "model=gpt2 model.dropout=0.1",
        "model=gpt2 model.dropout=0.1 train.precision=fp32",
        "model=llama3-1b model.kv_heads=2 model.embed_noise=5",
        "model=t5-small model.dropout=0.1",
        "model=bert-base model.dropout=0.1",
    ],
)
def test_a_step_that_is_captured_as_a_graph_computes_the_same(keys: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random numbers too, which the seeds of each micro-batch give."""
    recorded: list[object] = []

    def counted(*arguments: Any) -> Recording:
        recorded.append(arguments)
        return record(*arguments)

    record = cuda_graphs.record
    monkeypatch.setattr(cuda_graphs, "record", counted)
    monkeypatch.setattr(cuda_graphs, "_TAIL", 1.1)  # so that the host is always the limit
    sizes = "model.layers=2 model.hidden=128 model.heads=4 model.ffn=256 data.seq_len=64 train.global_batch=8 parallel.micro_batch=4"
    given = f"{keys} {sizes} data.train=synthetic train.steps=9 optim.lr=1e-3 eval=off".split()
    captured, launched = (
        _trained(resolve(None, [*given, f"parallel.graph={graph}"]).spec) for graph in ("auto", "off")
    )
    assert len(recorded) == 2, "the first micro-batch of a step, and the one that adds to it"
    assert captured == launched


def _trained(spec: RunSpec) -> list[Any]:
    """Return the losses of five steps and the weights after them, as they are."""
    engine, optimizer = start(spec, prepare_device(spec.train))
    batch = engine.place(synthetic_batch(spec))
    losses = [take_step(engine, optimizer, batch, step=step, lr=1e-3).result.loss_sum.item() for step in range(1, 6)]
    return [losses, [parameter.detach().double().sum().item() for parameter in engine.model.parameters()]]
