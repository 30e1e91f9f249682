"""The engine of one process and one device, which every other layout is compared with.

Losses are sums; the trainer divides once, by the number of valid tokens of the whole global batch.

`MicroBatches` is gradient accumulation, which all engines share: a rank's samples of a global batch are cut into micro-batches
whose gradients and losses add up. Batches are in pinned (page-locked) memory, from which a GPU copies while the CPU goes on. The
loader's thread makes the pinned copy. The memory comes from torch's own pool, which tracks every transfer that reads a tensor or
a slice of it, and reuses the memory only after those have ended. A batch may therefore be released as soon as its transfers are
queued.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from argosy.compat import accumulate_in
from argosy.data.samples.windows import Batch
from argosy.model.kv_cache import KeyValueCache
from argosy.model.objective import Loss, Objective
from argosy.model.ops.fp8 import weights_rounded_once
from argosy.parallel.cuda_graphs import CudaGraphs, GraphMode
from argosy.parallel.engine import Result, ignore_phase
from argosy.parallel.shards import norm_of
from argosy.parallel.trace_ranges import BACKWARD, FORWARD, traced
from argosy.parallel.transformer_blocks import DropoutSeeds


class SingleDevice:
    """The `Engine` of one device."""

    data_ranks = 1

    def __init__(
        self,
        model: nn.Module,
        dropout: DropoutSeeds,
        *,
        micro_batch: int,
        device: torch.device,
        z_loss: float = 0.0,
        graph: GraphMode | None = None,
    ) -> None:
        """With `graph` "auto", passes are captured as CUDA graphs and replayed if they are launch-bound; with "on", always."""
        self.model, self.device = model, device
        self.on_phase: Callable[[str], None] = ignore_phase
        self._z_loss = z_loss
        self._micro_batches = MicroBatches(model, dropout, size=micro_batch, device=device)
        self._run_micro = self._micro_batches.forward_backward_micro
        self._graphs: CudaGraphs | None = None
        if graph is not None:
            self._graphs = CudaGraphs(self._run_micro, model.parameters(), device, dropout.captured, mode=graph)

    def place(self, batch: Batch) -> Batch:
        return self._micro_batches.place(batch)

    def forward_backward(self, batch: Batch, step: int, loss_scale: Tensor | float = 1.0) -> Result:
        objective = self._objective(batch, loss_scale)
        return self._micro_batches.forward_backward(batch, step, objective, run=self._graphs or self._run_micro)

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Result:
        run = partial(self._micro_batches.evaluate, batch, self._objective(batch))
        self.model.eval()
        try:
            return run() if self._graphs is None else self._graphs.beside(run)
        finally:
            self.model.train()

    def make_room(self) -> None:
        if self._graphs is not None:
            self._graphs.drop()

    takes_cache = True

    def logits(
        self, tokens: Tensor, *, logits_at: Tensor | None = None, cache: KeyValueCache | None = None, **others: Tensor
    ) -> Tensor:
        found: Tensor = self.model(tokens, logits_at=logits_at, cache=cache, **others)
        return found

    def norm(self, gradients: Mapping[str, Tensor]) -> Tensor:
        return norm_of(list(gradients.values()))

    def accumulates(self, samples: int) -> bool:
        return self._micro_batches.accumulates(samples)

    @property
    def uses_cuda_graph(self) -> bool:
        return self._graphs is not None and bool(self._graphs.wanted)

    def news(self) -> list[str]:
        return [] if self._graphs is None else self._graphs.take_news()

    def _objective(self, batch: Batch, loss_scale: Tensor | float = 1.0) -> Objective:
        tokens_per_sample = torch.full((), batch.valid_tokens / len(batch.tokens), device=self.device)
        return Objective(self._z_loss, loss_scale, tokens_per_sample)


Inputs = dict[str, Tensor]


class MicroBatches:
    """Gradient accumulation over the micro-batches of a rank, shared by all engines."""

    def __init__(
        self,
        model: nn.Module,
        dropout: DropoutSeeds,
        *,
        size: int,
        device: torch.device,
        fp32_gradients: bool = False,
        reduces_itself: bool = False,
        shard: Callable[[Inputs, Objective], tuple[Inputs, Objective]] | None = None,
    ) -> None:
        """Args:
        size: samples in a micro-batch.
        fp32_gradients: keep gradients in 32 bits even where a step has only one micro-batch.
        reduces_itself: FSDP keeps the gradients, in a precision of its own.
        shard: cuts the inputs of a micro-batch for this rank, where ranks share a sequence.
        """
        self.size, self._model, self._dropout, self._device = size, model, dropout, device
        self._fp32_gradients, self._reduces_itself, self._shard = fp32_gradients, reduces_itself, shard
        self._rounds = any(getattr(module, "fp8", False) for module in model.modules())

    def place(self, batch: Batch) -> Batch:
        """Copy a batch into pinned memory if the device is a GPU."""
        if self._device.type != "cuda":
            return batch
        # Without this, a new thread would pin memory for the first GPU.
        with torch.cuda.device(self._device):
            return copied(batch, pinned=True)

    def firsts(self, batch: Batch) -> range:
        """Return the index of the first sample of each micro-batch."""
        return range(0, len(batch.tokens), self.size)

    def inputs(self, batch: Batch, first: int, objective: Objective) -> tuple[Inputs, Objective]:
        """Return the model's inputs for the micro-batch that begins at sample `first`, on the device, and its objective."""
        rows = slice(first, first + self.size)
        inputs = {name: tensor[rows].to(self._device, non_blocking=True) for name, tensor in tensors_of(batch).items()}
        return (inputs, objective) if self._shard is None else self._shard(inputs, objective)

    def accumulates(self, samples: int) -> bool:
        """True if the gradients of `samples` samples accumulate in 32 bits. Those of one micro-batch keep their precision."""
        return samples > self.size or self._fp32_gradients

    def prepare_gradients(self, batch: Batch) -> None:
        """Set the precision of the gradients that the backward passes over a batch accumulate."""
        if self._reduces_itself:
            # Its parameters here may be those it gathered for an evaluation, in this process and not in one that resumes.
            return
        wide = self.accumulates(len(batch.tokens))
        for parameter in self._model.parameters():
            if parameter.requires_grad and parameter.dtype != torch.float32:
                accumulate_in(parameter, torch.float32 if wide else parameter.dtype)

    def rounding(self, batch: Batch) -> AbstractContextManager[None]:
        """Return a context for the passes over a batch, in which the weights of 8-bit matmuls are rounded once for all of them.

        FSDP gathers the weights again for each pass, so there each pass rounds them."""
        once = self._rounds and not self._reduces_itself and len(self.firsts(batch)) > 1
        return weights_rounded_once() if once else nullcontext()

    def seed_dropout(self, step: int, micro: int) -> None:
        """Seed dropout for the forward pass of micro-batch `micro` of the global batch."""
        self._dropout.begin(step, micro)

    def forward_backward(
        self,
        batch: Batch,
        step: int,
        objective: Objective,
        *,
        run: Callable[[Inputs, Objective], Loss],
        first_micro: int = 0,
        before: Callable[[bool], None] = lambda last: None,
    ) -> Result:
        """Run `run`, a forward and backward pass, on each micro-batch and sum the results.

        Args:
            first_micro: number of this rank's first micro-batch in the global batch.
            before: called ahead of each pass, with True if it is the step's last.
        """
        self.prepare_gradients(batch)
        sums, firsts = Sums(self._device), self.firsts(batch)
        with self.rounding(batch):
            for micro, first in enumerate(firsts, start=first_micro):
                before(first == firsts[-1])
                self.seed_dropout(step, micro)
                sums.add(run(*self.inputs(batch, first, objective)))
        return sums.result(batch.valid_tokens)

    def forward_backward_micro(self, inputs: Inputs, objective: Objective) -> Loss:
        """Add the gradients of one micro-batch to the parameters."""
        with traced(FORWARD):
            loss = self.forward(inputs, objective)
        with traced(BACKWARD):
            loss.total.backward()
        return loss

    def forward(self, inputs: Inputs, objective: Objective) -> Loss:
        others = {name: tensor for name, tensor in inputs.items() if name not in ("tokens", "labels")}
        loss: Loss = self._model(inputs["tokens"], inputs["labels"], objective, **others)
        return loss

    def evaluate(self, batch: Batch, objective: Objective, uncounted: Sequence[Batch] = ()) -> Result:
        """Sum the losses of a batch without gradients. The model has to be in evaluation mode.

        The first micro-batches of `uncounted` run too, because other ranks wait for their collectives. They add nothing, but the
        result of every rank has the same metrics."""
        sums = Sums(self._device)
        for first in self.firsts(batch):
            sums.add(self.forward(*self.inputs(batch, first, objective))._replace(expert_load=None))
        for other in uncounted:
            sums.add_zeros(self.forward(*self.inputs(other, 0, objective)).metrics)
        return sums.result(batch.valid_tokens)


class Sums:
    """The sums over micro-batches, in 64 bits: there may be thousands of micro-batches."""

    def __init__(self, device: torch.device) -> None:
        self.loss = torch.zeros((), dtype=torch.float64, device=device)
        self.metrics: dict[str, Tensor] = {}
        self.expert_load: Tensor | None = None

    def add(self, loss: Loss) -> None:
        self.loss += loss.cross_entropy
        self.add_report(loss.metrics, loss.expert_load)

    def add_report(self, metrics: dict[str, Tensor], expert_load: Tensor | None) -> None:
        """Add the metrics of a part of a model, such as a pipeline stage, that may have no loss."""
        for name, value in metrics.items():
            self.metrics[name] = self.metrics[name] + value if name in self.metrics else value.double()
        if expert_load is not None:
            self.expert_load = expert_load if self.expert_load is None else self.expert_load + expert_load

    def add_zeros(self, metrics: dict[str, Tensor]) -> None:
        """Have these metrics in the sums: 0 where no pass that counts reports them."""
        for name, value in metrics.items():
            self.metrics.setdefault(name, torch.zeros_like(value, dtype=torch.float64))

    def result(self, tokens: int) -> Result:
        return Result(self.loss, tokens, self.metrics, self.expert_load)


@dataclass(frozen=True)
class TensorBatch(Batch):
    """A batch whose arrays are views of these tensors."""

    tensors: dict[str, Tensor] = field(default_factory=dict)


def tensors_of(batch: Batch) -> dict[str, Tensor]:
    """Return tokens, labels and all other inputs by name, on the host, without a copy."""
    if isinstance(batch, TensorBatch):
        return batch.tensors
    arrays = {"tokens": batch.tokens, "labels": batch.labels, **batch.inputs}
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def copied(batch: Batch, *, pinned: bool) -> TensorBatch:
    """Return a contiguous copy of a batch, in pinned memory or not."""
    tensors = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned).copy_(tensor)
        for name, tensor in tensors_of(batch).items()
    }
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    return TensorBatch(arrays.pop("tokens"), arrays.pop("labels"), arrays, tensors)
