"""Data parallelism: each rank trains on its share of the global batch, with a replica of the model, a shard (FSDP) or both.

A rank's share is a contiguous range of the batch's samples. Micro-batches, and with them dropout and losses per micro-batch, are
therefore those of one process. Gradients are summed over all ranks once a step, beside the backward pass of the last micro-batch or
after one that is replayed as a CUDA graph; FSDP sums its shards in every micro-batch. Losses, counts and expert loads are summed too, so that every rank has the `Result` of the global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from argosy.config.schema import ParallelSpec
from argosy.data.samples.windows import Batch
from argosy.model.kv_cache import KeyValueCache
from argosy.model.objective import Loss, Objective
from argosy.parallel import cuda_graphs
from argosy.parallel.cp import input_cut
from argosy.parallel.cuda_graphs import CudaGraphs, GraphMode, Inputs
from argosy.parallel.engine import Result, ignore_phase
from argosy.parallel.fsdp import FSDP_CUT_SHORT, free_gathered, reduce_copies, units
from argosy.parallel.graph_trial import GraphTrial
from argosy.parallel.host_group import all_gather_json
from argosy.parallel.mesh import DATA_AXES, SUM_AXES, Mesh
from argosy.parallel.replicas import GradientSums
from argosy.parallel.shards import norm_of
from argosy.parallel.single import MicroBatches
from argosy.parallel.tensor.apply import partial_parameters
from argosy.parallel.text_passes import TextInputs, required
from argosy.parallel.trace_ranges import LEFT_OVER, traced
from argosy.parallel.transformer_blocks import DropoutSeeds

# Steps whose first pass is timed, to learn whether a rank is launch-bound. With many ranks, one of them is often held up in a step.
_TIMINGS = 2


class DataParallel:
    """The `Engine` of data-parallel ranks, with or without FSDP, tensor and context parallelism."""

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        parallel: ParallelSpec,
        dropout: DropoutSeeds,
        *,
        z_loss: float,
        graph: GraphMode | None = None,
    ) -> None:
        """With `graph` "auto", passes are captured as CUDA graphs and replayed if they are launch-bound and steps become shorter; with
        "on", always; with "advise" the user is told if they are launch-bound; None: launched one by one. It has to be the same on all ranks.

        The collectives of FSDP, tensor and context parallelism are part of a pass. The sums of gradients over replicas are not: they run
        beside the step's last pass if it is launched, and after it if it is replayed."""
        self.model, self.device, self.data_ranks = model, mesh.device, mesh.data_ranks
        self.on_phase: Callable[[str], None] = ignore_phase
        self._micro_batches = make_micro_batches(model, mesh, parallel, dropout)
        self._reduction = Reduction(model, mesh, parallel, z_loss=z_loss)
        self._texts = TextInputs.of(mesh, parallel)
        self._data_rank = mesh.data_rank
        # Whether the next pass is the last of its step.
        self._is_last = False
        self._units = units(model)
        self._graphs: CudaGraphs | None = None
        self._trial: GraphTrial | None = None
        if graph is not None:
            self._graphs = CudaGraphs(
                self._run_micro, model.parameters(), mesh.device, dropout.captured,
                mode=graph, timings=_TIMINGS, tell_all=self._tell_all,
                cut_short=FSDP_CUT_SHORT if mesh.has_fsdp else None,
            )  # fmt: skip
        if self._graphs is not None and graph == "auto":
            self._trial = GraphTrial(self._graphs, mesh.device)

    def place(self, batch: Batch) -> Batch:
        return self._micro_batches.place(batch)

    def forward_backward(self, batch: Batch, step: int, loss_scale: Tensor | float = 1.0) -> Result:
        with nullcontext() if self._trial is None else self._trial.timed():
            return self._forward_backward(batch, step, loss_scale)

    def _forward_backward(self, batch: Batch, step: int, loss_scale: Tensor | float) -> Result:
        self.on_phase("communication")
        totals = self._reduction.count(batch)
        self.on_phase("forward_backward")
        result = self._micro_batches.forward_backward(
            batch,
            step,
            self._reduction.objective(totals, loss_scale),
            run=self._graphs or self._run_micro,
            first_micro=self._data_rank * len(self._micro_batches.firsts(batch)),
            before=self._before_pass,
        )
        self.on_phase("communication")
        with traced(LEFT_OVER):
            self._reduction.sum_gradients(in_place=self._owned_by_graph)
        return self._reduction.sum_result(result, totals)

    def _tell_all(self, message: Any) -> list[Any]:
        """Gather a message of every rank between two passes. A rank that waits for a slow one must not seem as slow."""
        self.on_phase("communication")
        found = all_gather_json(message)
        self.on_phase("forward_backward")
        return found

    @property
    def _owned_by_graph(self) -> bool:
        """True if gradients are where a graph has written them: their sums are copied there, since that memory is not free."""
        return self._graphs is not None and self._graphs.owns_gradients

    def _before_pass(self, last: bool) -> None:
        reduce_copies(self.model, last=last)
        self._is_last = last
        if self.uses_cuda_graph:
            free_gathered(self._units)

    def _run_micro(self, inputs: Inputs, objective: Objective) -> Loss:
        if self._is_last and not cuda_graphs.is_capturing() and not self._owned_by_graph:
            self._reduction.arm()
        return self._micro_batches.forward_backward_micro(inputs, objective)

    def make_room(self) -> None:
        if self._graphs is not None:
            self._graphs.drop()

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Result:
        """Sum the loss of a batch that is whole on every rank. Shares may differ by a sample, and so by a micro-batch. A rank with
        fewer micro-batches runs extra passes that do not count, because each pass all-gathers parameters from all ranks."""
        self.make_room()
        mine, most = self._reduction.share(batch, self._micro_batches.size)
        totals = self._reduction.count(mine)
        objective = self._reduction.objective(totals)
        self.model.eval()
        uncounted = [batch] * (most - len(self._micro_batches.firsts(mine)))
        result = self._micro_batches.evaluate(mine, objective, uncounted)
        self.model.train()
        return self._reduction.sum_result(result, totals)

    @property
    def takes_cache(self) -> bool:
        return self._texts.takes_tokens_alone

    def logits(
        self, tokens: Tensor, *, logits_at: Tensor | None = None, cache: KeyValueCache | None = None, **others: Tensor
    ) -> Tensor:
        if self.takes_cache:
            inputs: Mapping[str, Any] = {"tokens": tokens, "logits_at": logits_at, "cache": cache, **others}
        else:
            inputs = self._texts(tokens, required(logits_at), others)
        found: Tensor = self.model(**inputs)
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


def make_micro_batches(model: nn.Module, mesh: Mesh, parallel: ParallelSpec, dropout: DropoutSeeds) -> MicroBatches:
    """Return the `MicroBatches` of one of several ranks."""
    return MicroBatches(
        model,
        dropout,
        size=parallel.micro_batch,
        device=mesh.device,
        fp32_gradients=parallel.reduce == "fp32",
        reduces_itself=mesh.has_fsdp,
        shard=input_cut(mesh),
    )


class Totals(NamedTuple):
    """Counts of the global batch, on the device."""

    tokens: Tensor
    samples: Tensor


class Reduction:
    """The all-reduces of a step: counts before it, gradients and results after it."""

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        parallel: ParallelSpec,
        *,
        z_loss: float,
        result_axes: tuple[str, ...] = SUM_AXES,
    ) -> None:
        """`result_axes` are the axes whose ranks report different parts of the result."""
        self._model, self._mesh, self._z_loss = model, mesh, z_loss
        dtype = torch.float32 if parallel.reduce == "fp32" else torch.bfloat16
        # In this order: a partial gradient is summed over the tensor-parallel ranks after the replicas.
        self._sums: list[GradientSums] = []
        # FSDP sums by itself, and its gradients are there after the backward pass only.
        self._overlaps = not mesh.has_fsdp
        if (along := mesh.along(*SUM_AXES)) is not None and not mesh.has_fsdp:
            self._sums.append(GradientSums(model.parameters(), along.get_group(), dtype))
        if (tensor_parallel := mesh.along("tp")) is not None:
            partial = partial_parameters(model, sequence=parallel.sp)
            self._sums.append(GradientSums(partial, tensor_parallel.get_group(), dtype))
        self._result_axes = result_axes

    def count(self, batch: Batch) -> Totals:
        counts = [
            torch.full((), n, dtype=torch.int64, device=self._mesh.device)
            for n in (batch.valid_tokens, len(batch.tokens))
        ]
        totals = torch.stack(counts)
        # Context-parallel ranks all read the whole sequence: only data-parallel ranks are summed.
        self._mesh.sum_(totals, *DATA_AXES)
        return Totals(*totals.unbind())

    def objective(self, totals: Totals, loss_scale: Tensor | float = 1.0) -> Objective:
        return Objective(self._z_loss, loss_scale, (totals.tokens / totals.samples).float())

    def share(self, batch: Batch, micro_batch: int) -> tuple[Batch, int]:
        """Return this rank's share of a batch that every rank has whole, and the most micro-batches any rank has."""
        ranks, rank, count = self._mesh.data_ranks, self._mesh.data_rank, len(batch.tokens)
        mine = batch.rows(count * rank // ranks, count * (rank + 1) // ranks)
        return mine, -(-count // (ranks * micro_batch))

    def arm(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Sum gradients beside the next backward pass. It computes the step's last gradients of the parameters, by default all."""
        if self._overlaps and self._sums:
            self._sums[0].arm(parameters)

    def complete(self, parameters: Iterable[nn.Parameter]) -> None:
        """Start summing the gradients that the parameters have now, which are those of the step."""
        if self._overlaps and self._sums:
            self._sums[0].complete(parameters)

    def sum_gradients(self, *, in_place: bool = False) -> None:
        """Finish the sums that run beside the last backward pass, and sum the other gradients that FSDP has not summed."""
        for sums in self._sums:
            sums.finish(in_place=in_place)

    def sum_result(self, result: Result, totals: Totals) -> Result:
        """Sum everything reported over the ranks, in one all-reduce."""
        load = result.expert_load
        parts = [result.loss_sum, *result.metrics.values(), *([] if load is None else [load])]
        flat = torch.cat([part.detach().reshape(-1).double() for part in parts])
        self._mesh.sum_(flat, *self._result_axes)
        pieces = [
            piece.view_as(part).to(part.dtype)
            for piece, part in zip(flat.split([part.numel() for part in parts]), parts, strict=True)
        ]
        metrics = dict(zip(result.metrics, pieces[1:], strict=False))
        return Result(pieces[0], totals.tokens, metrics, None if load is None else pieces[-1])
