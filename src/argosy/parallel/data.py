"""Several ranks, each with its share of the global batch: replicas, shards of one model (FSDP), or replicas of shards.

A rank's share is a contiguous range of the batch's samples, so that micro-batches, and with them dropout and whatever a
model makes of a micro-batch, are those of one process. Gradients are sums over all ranks, made once a step, after the last
micro-batch; losses, counts and loads are summed too, so that every rank has the `Result` of the global batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from argosy.config.schema import ParallelSpec
from argosy.data.samples.windows import Batch
from argosy.model.objective import Objective
from argosy.parallel.cp import Cut, cut_inputs
from argosy.parallel.fsdp import reduce_after
from argosy.parallel.mesh import DATA_AXES, SUM_AXES, Mesh
from argosy.parallel.replicas import sum_gradients
from argosy.parallel.single import Result, SingleDevice
from argosy.parallel.tensor.apply import sum_partial_gradients


@dataclass(frozen=True)
class _Totals:
    """Of the global batch, on the device."""

    tokens: Tensor
    samples: Tensor


class DataParallel(SingleDevice):
    _result_axes: tuple[str, ...] = SUM_AXES  # whose ranks have other parts of what is reported

    def __init__(self, model: nn.Module, mesh: Mesh, parallel: ParallelSpec, *, seed: int, z_loss: float) -> None:
        super().__init__(model, micro_batch=parallel.micro_batch, seed=seed, device=mesh.device, z_loss=z_loss)
        self.mesh, self._sequence = mesh, parallel.sp
        self._reduce = torch.float32 if parallel.reduce == "fp32" else torch.bfloat16
        along = mesh.along(*SUM_AXES)
        self._group = None if along is None or mesh.has_fsdp else along.get_group()  # FSDP sums by itself
        self.data_ranks = mesh.data_ranks
        self._cut = Cut.of(mesh)

    def forward_backward(self, batch: Batch, step: int, loss_scale: Tensor | float = 1.0) -> Result:
        self.enter("communication")
        self._totals = self._count(batch)
        self.enter("forward_backward")
        result = super().forward_backward(batch, step, loss_scale)
        self.enter("communication")
        self._sum_gradients()
        return self._summed(result)

    def _sum_gradients(self) -> None:
        """What FSDP has not summed already, after a step's last micro-batch."""
        if self._group is not None:
            sum_gradients(self.model.parameters(), self._group, self._reduce)
        if (along := self.mesh.along("tp")) is not None:
            sum_partial_gradients(self.model, along.get_group(), self._reduce, sequence=self._sequence)

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Result:
        """`batch` is whole, and the same on every rank. Shares may differ by a sample, and so may the micro-batches in them:
        a rank that has fewer goes along with the others on samples that do not count, since each pass gathers parameters
        from all."""
        ranks, rank, count = self.data_ranks, self.mesh.data_rank, len(batch.tokens)
        mine = batch.rows(count * rank // ranks, count * (rank + 1) // ranks)
        self._totals = self._count(mine)
        result = super().evaluate(mine)
        most, done = (-(-rows // self.micro_batch) for rows in (-(-count // ranks), len(mine.tokens)))
        for _ in range(most - done):
            self._loss(batch, 0, self._objective(batch))
        return self._summed(result)

    def _count(self, batch: Batch) -> _Totals:
        counts = [
            torch.full((), n, dtype=torch.int64, device=self.device) for n in (batch.valid_tokens, len(batch.tokens))
        ]
        totals = torch.stack(counts)
        self.mesh.sum_(totals, *DATA_AXES)  # ranks that share a sequence were all given the whole of it
        return _Totals(*totals.unbind())

    def _objective(self, batch: Batch, loss_scale: Tensor | float = 1.0) -> Objective:
        return Objective(self.z_loss, loss_scale, (self._totals.tokens / self._totals.samples).float())

    def _inputs(self, batch: Batch, first: int, objective: Objective) -> tuple[dict[str, Tensor], Objective]:
        inputs, objective = super()._inputs(batch, first, objective)
        return (inputs, objective) if self._cut is None else cut_inputs(inputs, objective, self._cut)

    def _first_micro(self, count: int) -> int:
        return self.mesh.data_rank * count

    def _before_micro(self, *, last: bool) -> None:
        reduce_after(self.model, last=last)

    def accumulates(self, samples: int) -> bool:
        return super().accumulates(samples) or self._reduce == torch.float32

    def _summed(self, result: Result) -> Result:
        """Everything reported, in one message."""
        load = result.expert_load
        parts = [result.loss_sum, *result.metrics.values(), *([] if load is None else [load])]
        flat = torch.cat([part.detach().reshape(-1).double() for part in parts])
        self.mesh.sum_(flat, *self._result_axes)
        pieces = [
            piece.view_as(part).to(part.dtype)
            for piece, part in zip(flat.split([part.numel() for part in parts]), parts, strict=True)
        ]
        metrics = dict(zip(result.metrics, pieces[1:], strict=False))
        return Result(pieces[0], self._totals.tokens, metrics, None if load is None else pieces[-1])
