"""A few steps of training, as one rank of a layout: what the matrix compares."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn

from argosy.compat import gathered_parameters
from argosy.config.resolve import resolve
from argosy.config.schema import RunSpec
from argosy.data.samples.masks import IGNORED
from argosy.data.samples.windows import Batch
from argosy.model import attention, build
from argosy.model.ops.matmul import separable
from argosy.parallel.data_parallel import DataParallel
from argosy.parallel.engine import Engine
from argosy.parallel.fsdp import units
from argosy.parallel.mesh import Mesh
from argosy.parallel.parallelize import parallelize
from argosy.parallel.pipeline import pipeline_engine
from argosy.parallel.shards import span_of, whole
from argosy.parallel.tensor.region import EarlySum
from argosy.tasks.task_registry import TASKS
from argosy.train.optimizer import Optimizer
from argosy.train.step import take_step
from dist.devices import ON_GPU, own_mesh

SEQ, VOCAB, BATCH = 16, 67, 16  # a vocabulary no number of ranks divides
_SIZES = ["layers=4", "hidden=32", "heads=4", f"vocab_size={VOCAB}", f"max_seq_len={SEQ}", "ffn=64", "init_std=0.2"]
MODELS = {
    "gpt": ["model.preset=gpt2", *_SIZES, "tied=true"],
    "llama": ["model.preset=llama3-8b", *_SIZES, "kv_heads=4"],
    "mpt": ["model.preset=mpt-7b-alibi", *_SIZES, "tied=true"],
    "moe": [
        "model.preset=mixtral-8x7b", *_SIZES, "kv_heads=4",
        "moe={experts: 4, top_k: 2, ffn: 24, router: sigmoid, bias_rate: 0.01, z_loss: 0.1, balance_loss: 0.1}",
    ],
    # Key heads fewer than the ranks, each token's view short, and several documents in a sample.
    "packed": [
        "model.preset=llama3-8b", *_SIZES, "kv_heads=2", "window=6", "qk_norm=true",
    ],
    # Two kinds of attention in turn, with rotary positions of their own, and norms on both sides.
    "gemma": ["model.preset=gemma3-1b", *_SIZES, "kv_heads=2", "head_dim=8", "window=6", "global_every=2"],
    # A prefix of each sample seen both ways.
    "prefix": ["model.preset=llama3-8b", *_SIZES, "kv_heads=2", "data.task=prefix-lm"],
    # Conversations, of which some tokens are learnt.
    "sft": ["model.preset=llama3-8b", *_SIZES, "kv_heads=2", "data.task=sft"],
    "dpo": ["model.preset=llama3-8b", *_SIZES, "kv_heads=2", "data.task=dpo"],
    # Adapters beside frozen weights.
    "lora": ["model.preset=llama3-8b", *_SIZES, "kv_heads=2", "tied=true", "lora={rank: 4}"],
    "dora": ["model.preset=llama3-8b", *_SIZES, "kv_heads=2", "tied=true", "lora={rank: 4, dora: true}"],
    "bert": ["model.preset=bert-base", *_SIZES, "dropout=0"],
    "t5": ["model.preset=t5-small", *_SIZES, "decoder_layers=2", "head_dim=8", "init_std=1", "dropout=0"],
    "ict": ["model.preset=ict-base", *_SIZES, "dropout=0", "retrieval={projection: 12}", "data.ict.query_len=8"],
}  # fmt: skip
DECODERS, ENCODERS = ("gpt", "llama", "mpt", "moe"), ("bert", "t5", "ict")


class Trace(NamedTuple):
    """What one rank saw."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, np.ndarray]


def spec_of(model: str, layout: str) -> RunSpec:
    """`layout` is keys of `parallel` and others of the run, separated by spaces."""
    preset, *keys = MODELS[model]
    given = [key if "." in key.split("=")[0] else f"parallel.{key}" for key in layout.split()]
    if not any(key.startswith("parallel.micro_batch") for key in given):
        given.append("parallel.micro_batch=2")
    # On a GPU, "auto" depends on how long the host takes.
    if not any(key.startswith("parallel.graph") for key in given):
        given.append("parallel.graph=off")
    # A key's bias has no gradient: its rounding noise must not become an update. Lion has no epsilon.
    epsilon = [] if "optim.name=lion" in given else ["optim.eps=1e-6"]
    return resolve(
        None,
        [
            preset, *(key if key.startswith("data.") else f"model.{key}" for key in keys), "data.train=synthetic", f"data.seq_len={SEQ}",
            f"train.global_batch={BATCH}", "train.steps=100", "train.precision=fp32", "optim.lr=3e-3", "eval=off",
            *epsilon, *given,
        ],
    ).spec  # fmt: skip


def batch_of(model: str, step: int) -> Batch:
    """A global batch whose samples have very different numbers of labels that count."""
    rng = np.random.default_rng(step)
    tokens, labels = rng.integers(0, VOCAB, (2, BATCH, SEQ))
    lengths = rng.permutation(BATCH)
    for row, valid in enumerate(lengths):
        labels[row, valid:] = IGNORED
    if model in ENCODERS:
        return _encoder_batch(model, rng, tokens, labels, np.arange(SEQ) < np.maximum(lengths, 1)[:, None])
    if model in ("sft", "dpo"):
        return TASKS[model].synthetic(spec_of(model, ""), lambda length: tokens[:, :length])
    if model == "prefix":
        return Batch(tokens, labels, {"reach": np.maximum(np.arange(SEQ), lengths[:, None] // 2)})
    if model != "packed":
        return Batch(tokens, labels)
    starts = rng.random((BATCH, SEQ)) < 0.2
    starts[:, 0] = True
    index = np.arange(SEQ)
    positions = index - np.maximum.accumulate(np.where(starts, index, 0), axis=1)
    return Batch(tokens, labels, {"documents": starts.cumsum(1), "positions": positions})


def _encoder_batch(model: str, rng: np.random.Generator, tokens: Any, labels: Any, seen: Any) -> Batch:
    if model == "t5":
        return Batch(tokens, labels[:, :12], {"decoder_tokens": rng.integers(0, VOCAB, (BATCH, 12))})
    if model == "ict":
        queries = {"query_tokens": tokens[::-1, :8].copy(), "query_padding_mask": seen[:, :8]}
        return Batch(tokens, np.arange(BATCH) % 11, {"padding_mask": seen, **queries})
    predicted = np.sort(rng.permuted(np.tile(np.arange(SEQ), (BATCH, 1)), axis=1)[:, :5])
    pairs = {"pair_labels": rng.integers(0, 2, BATCH), "token_types": rng.integers(0, 2, (BATCH, SEQ))}
    return Batch(tokens, labels[:, :5], {"padding_mask": seen, "predicted": predicted, **pairs})


def share_of(batch: Batch, mesh: Mesh) -> Batch:
    share = len(batch.tokens) // mesh.data_ranks
    return batch.rows(mesh.data_rank * share, (mesh.data_rank + 1) * share)


def drawing_alike(spec: RunSpec) -> AbstractContextManager[Any]:
    """Let all layouts drop the same on a GPU, where torch's attention kernels draw masks of their own: attention in plain torch."""

    def plainly(case: attention.Case, scale: float | None) -> attention.Attend:
        return partial(attention._attend_dropping, case, attention.explicit_bias(case), scale)

    if not ON_GPU or not spec.model.dropout:
        return nullcontext()
    return patch.object(attention, "BACKENDS", (attention.Backend("plain", lambda case: None, plainly),))


def set_initial_weights(optimizer: Optimizer, engine: Engine, spec: RunSpec) -> None:
    """Draw them in small blocks. Of a block that this rank does not ask for, all numbers are NaN."""
    draws = build._draws

    def on_nothing(value: Tensor, *arguments: Any) -> Any:
        value.fill_(math.nan)
        return draws(value, *arguments)

    with patch.object(build, "_BLOCK", 128), patch.object(build, "_draws", on_nothing):
        optimizer.set_weights(build.initial_weights(engine.model, spec.model, spec.train.seed, span_of))


def train_steps(model: str, layout: str, steps: int, evaluates: Sequence[int] = ()) -> Trace:
    """Train. After the steps of `evaluates`, a batch is evaluated."""
    spec = spec_of(model, layout)
    with drawing_alike(spec):
        return _train(model, spec, steps, evaluates)


def _train(model: str, spec: RunSpec, steps: int, evaluates: Sequence[int]) -> Trace:
    mesh = own_mesh(spec.parallel)
    engine = parallelize(spec, mesh)
    optimizer = Optimizer(engine.model, spec.optim)
    set_initial_weights(optimizer, engine, spec)
    losses, norms = [], []
    for step in range(1, steps + 1):
        batch = batch_of(model, step)
        taken = take_step(engine, optimizer, share_of(batch, mesh), step=step, lr=spec.optim.lr)
        losses.append(float(taken.result.loss_sum) / int(taken.result.tokens))
        norms.append(float(taken.grad_norm))
        if step in evaluates:
            engine.evaluate(batch_of(model, 100 + step))
    return Trace(
        losses, norms, {name: whole(w).float().numpy(force=True).copy() for name, w in optimizer.weights().items()}
    )


def gradients_between(model: str, layout: str) -> list[tuple[int, bool]]:
    """Return, before each pass of a step, how many gradients each parameter has, and whether those are all that FSDP keeps."""
    spec = spec_of(model, layout)
    mesh = own_mesh(spec.parallel)
    engine = parallelize(spec, mesh)
    optimizer = Optimizer(engine.model, spec.optim)
    set_initial_weights(optimizer, engine, spec)
    held, before = [], DataParallel._before_pass

    def looked(self: DataParallel, last: bool) -> None:
        (count,) = {int(parameter.grad is not None) for parameter in self.model.parameters()}
        groups = [unit._get_fsdp_state()._fsdp_param_group for unit in units(self.model)]
        whole = [p.unsharded_accumulated_grad for group in groups if group is not None for p in group.fsdp_params]
        held.append((count, bool(whole) and all(gradient is None for gradient in whole)))
        before(self, last)

    with patch.object(DataParallel, "_before_pass", looked):
        take_step(engine, optimizer, share_of(batch_of(model, 1), mesh), step=1, lr=spec.optim.lr)
    return held


def kept_dtypes(model: str, layout: str) -> set[str]:
    """Return the precisions of the gradients that a pipeline's FSDP units hold before they are reduced."""
    spec = spec_of(model, layout)
    mesh = own_mesh(spec.parallel)
    engine = parallelize(spec, mesh)
    optimizer = Optimizer(engine.model, spec.optim)
    set_initial_weights(optimizer, engine, spec)
    found, reduce = set[str](), pipeline_engine.reduce_everything

    def looking(stages: nn.Module) -> None:
        held = [parameter for unit in units(stages) for parameter in gathered_parameters(unit)]
        found.update(str(parameter.grad.dtype) for parameter in held if parameter.grad is not None)
        reduce(stages)

    with patch.object(pipeline_engine, "reduce_everything", looking):
        take_step(engine, optimizer, share_of(batch_of(model, 1), mesh), step=1, lr=spec.optim.lr)
    return found


def train_compiled(model: str, layout: str, steps: int, scope: str) -> Trace:
    """The same with blocks or the model compiled, by a compiler that only traces."""
    compiled = nn.Module.compile
    try:
        nn.Module.compile = lambda module: compiled(module, backend="aot_eager")  # type: ignore[assignment, method-assign]
        return train_steps(model, f"{layout} compile={scope}", steps)
    finally:
        nn.Module.compile = compiled  # type: ignore[method-assign]
        torch.compiler.reset()


def train_after(model: str, layout: str, steps: int) -> Trace:
    """The same with every sum of gradients started after the last backward pass."""
    return train_broken(model, layout, steps, "argosy.parallel.data_parallel:Reduction.arm", "nothing")


def train_early(model: str, layout: str, steps: int, early: bool) -> tuple[Trace, int]:
    """The same with matmuls as on a GPU, which give away the gradient of their input before they compute others. Return how often a sum
    over ranks was launched in between; if not `early`, none is."""
    count, hear = 0, EarlySum.hear

    def counting(listener: EarlySum, gradient: torch.Tensor) -> None:
        nonlocal count
        count += 1
        hear(listener, gradient)

    with separable(), patch.object(EarlySum, "hear", counting if early else lambda listener, gradient: None):
        return train_steps(model, layout, steps), count


def train_broken(model: str, layout: str, steps: int, where: str, bug: str) -> Trace:
    """The same with one function, `module:name` or `module:class.name`, replaced by a planted bug."""
    module, _, path = where.partition(":")
    *outer, name = path.split(".")
    home: Any = importlib.import_module(module)
    for part in outer:
        home = getattr(home, part)
    right = vars(home)[name]
    wrong = getattr(importlib.import_module("dist.bugs"), bug)
    setattr(home, name, staticmethod(wrong) if isinstance(right, staticmethod) else wrong)
    try:
        return train_steps(model, layout, steps)
    finally:
        setattr(home, name, right)
