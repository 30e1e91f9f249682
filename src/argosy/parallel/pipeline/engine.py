"""The engine of a pipeline: this rank's stages, with the micro-batches of a step on their way through all of them.

Every pipeline rank reads the same samples: the first stage needs the tokens, the last the labels, and the others whatever
depends on positions or documents. Gradients are summed over data-parallel ranks after the last micro-batch, then those of
weights that several stages hold over their holders. Each rank reports what its stages know; the sum over ranks is the
`Result` of the global batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor, nn

from argosy.config.schema import ParallelSpec
from argosy.config.seeds import derive_seed
from argosy.data.samples.windows import Batch
from argosy.model.objective import Loss, Objective, Stream
from argosy.parallel.data import DataParallel
from argosy.parallel.fsdp import reduce_everything, reduce_nothing
from argosy.parallel.host_group import all_gather_json
from argosy.parallel.mesh import SUM_AXES, Mesh
from argosy.parallel.pipeline.runtime import Key, Pass, Runtime
from argosy.parallel.pipeline.schedules import Action, forward_order, training_order, with_messages
from argosy.parallel.pipeline.shared import SharedWeights
from argosy.parallel.pipeline.stage_cut import Stages, part_of
from argosy.parallel.shards import square_sum_of
from argosy.parallel.single import Result, Sums, zero_sum

_Micro = tuple[Batch, int]  # a micro-batch: where it is, and its first sample there


class PipelineParallel(DataParallel):
    """`model` is what this rank holds, all its stages together."""

    _result_axes = (*SUM_AXES, "pp")

    def __init__(
        self, model: nn.Module, mesh: Mesh, stages: Stages, parallel: ParallelSpec, *, seed: int, z_loss: float
    ) -> None:
        super().__init__(model, mesh, parallel, seed=seed, z_loss=z_loss)
        along = mesh.along("pp")
        if along is None:
            raise AssertionError("one rank is no pipeline")
        # FSDP fears that a stream which passes a stage untouched is changed in place; a runtime only sends it on.
        warnings.filterwarnings("ignore", message=".*returned a view tensor", category=UserWarning)
        self._pipeline, self._parallel = along.get_group(), parallel
        self._rank = dist.get_rank(self._pipeline)
        self._parts = {stage: part_of(model, stages.modules[stage]) for stage in stages.of_rank(self._rank)}
        self._runtime = Runtime(self._pipeline, stages.ranks, mesh.device)
        self._shared = SharedWeights(model, stages, self._pipeline)
        self._actions = cache(self._make_actions)
        # By training or not: the names of the metrics, and the shape of the experts' loads.
        self._reported: dict[bool, tuple[list[str], tuple[int, ...] | None]] = {}

    def forward_backward(self, batch: Batch, step: int, loss_scale: Tensor | float = 1.0) -> Result:
        self.enter("communication")
        self._totals = self._count(batch)
        self.enter("forward_backward")
        self._prepare_gradients(torch.float32 if self.accumulates(len(batch.tokens)) else None)
        reduce_nothing(self.model, reshard=self._parallel.reshard)
        micros = [(batch, first) for first in range(0, len(batch.tokens), self.micro_batch)]
        number, objective = self._first_micro(len(micros)), self._objective(batch, loss_scale)

        def forward(stage: int, micro: int, stream: tuple[Tensor, ...] | None) -> Loss | Stream:
            self._dropout.begin(derive_seed(self.seed, "dropout", step, number + micro))
            return self._pass(stage, micros[micro], objective, stream)

        reports = self._run(forward, micros, training=True)
        self.enter("communication")
        reduce_everything(self.model)
        self._sum_gradients()
        self._shared.sum_gradients()
        return self._summed(self._joined(list(reports.values()), training=True))

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Result:
        """As without a pipeline, a data-parallel rank that has fewer micro-batches goes along on samples that do not count."""
        ranks, rank, count = self.data_ranks, self.mesh.data_rank, len(batch.tokens)
        mine = batch.rows(count * rank // ranks, count * (rank + 1) // ranks)
        self._totals = self._count(mine)
        most = -(-count // (ranks * self.micro_batch))
        own = [(mine, first) for first in range(0, len(mine.tokens), self.micro_batch)]
        micros, objective = own + [(batch, 0)] * (most - len(own)), self._objective(batch)

        def forward(stage: int, micro: int, stream: tuple[Tensor, ...] | None) -> Loss | Stream:
            return self._pass(stage, micros[micro], objective, stream)

        for part in (self.model, *self._parts.values()):
            part.eval()
        reports = self._run(forward, micros, training=False)
        for part in (self.model, *self._parts.values()):
            part.train()
        counted = [report for (_, micro), report in reports.items() if micro < len(own)]
        return self._summed(self._joined(counted, training=False))

    def norm(self, gradients: Mapping[str, Tensor]) -> Tensor:
        own = [gradient for name, gradient in gradients.items() if name not in self._shared.copies]
        square = square_sum_of(own)
        self.mesh.sum_(square, "pp")
        return square.sqrt().float()

    def _run(self, forward: Pass, micros: Sequence[_Micro], *, training: bool) -> dict[Key, Loss | Stream]:
        actions = self._actions(len(micros), training)
        return self._runtime.run(actions, forward, [self._shape(micro) for micro in micros], training=training)

    def _pass(
        self, stage: int, micro: _Micro, objective: Objective, stream: tuple[Tensor, ...] | None
    ) -> Loss | Stream:
        inputs, objective = self._inputs(*micro, objective)
        part = self._parts[stage]
        found: Loss | Stream = part(inputs.pop("tokens"), inputs.pop("labels"), objective, stream=stream, **inputs)
        return found

    def _shape(self, micro: _Micro) -> tuple[object, ...]:
        batch, first = micro
        arrays = (batch.tokens, *batch.inputs.values())
        return min(self.micro_batch, len(batch.tokens) - first), *(array.shape[1:] for array in arrays)

    def _make_actions(self, micros: int, training: bool) -> list[Action]:
        parallel = self._parallel
        make = training_order if training else forward_order
        orders = make(parallel.schedule, parallel.pp, parallel.vpp, micros)
        return with_messages(orders, parallel.schedule)[self._rank]

    def _joined(self, reports: Sequence[Loss | Stream], *, training: bool) -> Result:
        """What this rank's stages report of all micro-batches, with a zero for what only other ranks report."""
        total, metrics = zero_sum(self.device), Sums()
        load: Tensor | None = None
        for report in reports:
            metrics.add(report.metrics)
            if isinstance(report, Loss):
                total += report.cross_entropy
            if training and report.expert_load is not None:
                load = report.expert_load if load is None else load + report.expert_load
        if training not in self._reported:
            self._reported[training] = self._agree(metrics, load)
        names, shape = self._reported[training]
        if load is None and shape is not None:
            load = torch.zeros(shape, dtype=torch.int64, device=self.device)
        zero = zero_sum(self.device)
        return Result(total, self._totals.tokens, {name: metrics.get(name, zero) for name in names}, load)

    def _agree(self, metrics: Sums, load: Tensor | None) -> tuple[list[str], tuple[int, ...] | None]:
        """Return the names of the metrics that any rank of the pipeline reports, and the shape of the experts' loads."""
        mine = {"metrics": list(metrics), "load": None if load is None else list(load.shape)}
        theirs = all_gather_json(mine, self._pipeline)
        names = sorted({name for said in theirs for name in said["metrics"]})
        return names, next((tuple(said["load"]) for said in theirs if said["load"] is not None), None)
