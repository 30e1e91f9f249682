"""The engine of pipeline parallelism: runs this rank's stages on the micro-batches of a step.

Every pipeline rank reads the same samples: the first stage needs the tokens, the last the labels, and the others the inputs that
depend on positions or documents. Gradients of replicas are summed beside the last backward passes of their stages, those of shards
after them. Gradients of weights that several stages hold are then summed over their holders. Each rank reports the metrics of its stages; the sum over ranks is
the `Result` of the global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor, nn

from argosy.compat import allow_fsdp_views
from argosy.config.schema import RunSpec
from argosy.data.samples.windows import Batch
from argosy.model.kv_cache import KeyValueCache
from argosy.model.objective import Loss, Objective, Stream
from argosy.parallel.data_parallel import Reduction, make_micro_batches
from argosy.parallel.engine import Result, ignore_phase
from argosy.parallel.fsdp import reduce_everything, reduce_nothing
from argosy.parallel.host_group import all_gather_json
from argosy.parallel.mesh import SUM_AXES, Mesh
from argosy.parallel.pipeline.runtime import Key, Pass, Runtime
from argosy.parallel.pipeline.schedules import Action, forward_order, last_gradients, training_order, with_messages
from argosy.parallel.pipeline.shared import SharedWeights
from argosy.parallel.pipeline.stage_cut import Stages
from argosy.parallel.pipeline.stage_messages import Form
from argosy.parallel.pipeline.stream_forms import StreamForms
from argosy.parallel.precision import DTYPES
from argosy.parallel.shards import square_sum_of
from argosy.parallel.single import Sums
from argosy.parallel.text_passes import TextInputs, required
from argosy.parallel.trace_ranges import LEFT_OVER, PIPELINE, traced
from argosy.parallel.transformer_blocks import DropoutSeeds

# A micro-batch: the batch that it is part of, and the index of its first sample.
_Micro = tuple[Batch, int]


def make_pipeline(
    spec: RunSpec, model: nn.Module, mesh: Mesh, stages: Stages, precision: str, dropout: DropoutSeeds
) -> PipelineParallel:
    """Return the engine of a pipeline rank, whose model is already cut to its stages."""
    forms = StreamForms(stages, spec.parallel, spec.model.hidden, DTYPES[precision])
    return PipelineParallel(model, mesh, forms, dropout, z_loss=spec.train.z_loss, vocab_size=spec.model.vocab_size)


class PipelineParallel:
    """The `Engine` of pipeline ranks. `model` holds all stages of this rank; its forward pass takes the number of a stage."""

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        forms: StreamForms,
        dropout: DropoutSeeds,
        *,
        z_loss: float,
        vocab_size: int,
    ) -> None:
        along = mesh.along("pp")
        if along is None:
            raise AssertionError("one rank is no pipeline")
        # A stream that passes a stage unchanged is a view of the message it came in. The runtime only sends it on.
        allow_fsdp_views()
        self.model, self.device, self.data_ranks = model, mesh.device, mesh.data_ranks
        self.on_phase: Callable[[str], None] = ignore_phase
        stages, parallel = forms.stages, forms.parallel
        self._mesh, self._parallel, self._pipeline, self._forms = mesh, parallel, along.get_group(), forms
        self._micro_batches = make_micro_batches(model, mesh, parallel, dropout)
        self._reduction = Reduction(model, mesh, parallel, z_loss=z_loss, result_axes=(*SUM_AXES, "pp"))
        self._runtime = Runtime(self._pipeline, stages.ranks, mesh.device)
        self._texts = TextInputs.of(mesh, parallel)
        self._last, self._vocab_size = stages.ranks[-1], vocab_size
        self._shared = SharedWeights(model, stages, self._pipeline)
        self._actions = cache(self._make_actions)
        # By stage of this rank.
        self._parameters = {
            stage: [
                parameter
                for name, parameter in model.named_parameters()
                if any(name.startswith(f"{module}.") for module in stages.modules[stage])
            ]
            for stage in stages.of_rank(dist.get_rank(self._pipeline))
        }
        self._lasts = cache(self._make_lasts)
        # Key: training or not. Value: the names of the metrics, and the shape of the expert loads.
        self._reported: dict[bool, tuple[list[str], tuple[int, ...] | None]] = {}

    def place(self, batch: Batch) -> Batch:
        return self._micro_batches.place(batch)

    def forward_backward(self, batch: Batch, step: int, loss_scale: Tensor | float = 1.0) -> Result:
        self.on_phase("communication")
        totals = self._reduction.count(batch)
        self.on_phase("forward_backward")
        self._micro_batches.prepare_gradients(batch)
        reduce_nothing(self.model, reshard=self._parallel.reshard)
        micros = [(batch, first) for first in self._micro_batches.firsts(batch)]
        number, objective = self._mesh.data_rank * len(micros), self._reduction.objective(totals, loss_scale)

        def forward(stage: int, micro: int, stream: tuple[Tensor, ...] | None) -> Loss | Stream:
            self._micro_batches.seed_dropout(step, number + micro)
            return self._forward(stage, micros[micro], objective, stream)

        with traced(PIPELINE), self._micro_batches.rounding(batch):
            reports = self._run(forward, micros, training=True)
        self.on_phase("communication")
        with traced(LEFT_OVER):
            reduce_everything(self.model)
            self._reduction.sum_gradients()
            self._shared.sum_gradients()
        return self._reduction.sum_result(self._joined(list(reports.values()), training=True), totals)

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Result:
        """Sum the loss of a batch that is whole on every rank. A data-parallel rank with fewer micro-batches runs extra ones that do
        not count."""
        mine, most = self._reduction.share(batch, self._micro_batches.size)
        totals = self._reduction.count(mine)
        own = [(mine, first) for first in self._micro_batches.firsts(mine)]
        micros, objective = own + [(batch, 0)] * (most - len(own)), self._reduction.objective(totals)

        def forward(stage: int, micro: int, stream: tuple[Tensor, ...] | None) -> Loss | Stream:
            return self._forward(stage, micros[micro], objective, stream)

        self.model.eval()
        reports = self._run(forward, micros, training=False)
        self.model.train()
        counted, uncounted = (
            [report for (_, micro), report in reports.items() if (micro < len(own)) is counts]
            for counts in (True, False)
        )
        return self._reduction.sum_result(self._joined(counted, uncounted, training=False), totals)

    def make_room(self) -> None:
        """Do nothing: passes of a pipeline are not captured."""

    takes_cache = False

    def logits(
        self, tokens: Tensor, *, logits_at: Tensor | None = None, cache: KeyValueCache | None = None, **others: Tensor
    ) -> Tensor:
        """Run one micro-batch through all stages, and broadcast the logits of the last to the ranks of the pipeline."""
        wanted, kept = required(logits_at), list[Tensor]()
        inputs = self._texts(tokens, wanted, others)

        def forward(stage: int, micro: int, stream: tuple[Tensor, ...] | None) -> Stream:
            found: Tensor | Stream = self.model(**inputs, stage=stage, stream=stream)
            if isinstance(found, Stream):
                return found
            kept.append(found.float().contiguous())
            return Stream((), {})

        def forms(stage: int, micro: int) -> list[Form]:
            samples, length = inputs["tokens"].shape
            return self._forms.leaving_of(stage, [length * self._parallel.cp], samples)

        self._runtime.run(self._actions(1, False), forward, forms, training=False)
        logits = kept[0] if kept else torch.empty(len(wanted), self._vocab_size, device=self.device)
        dist.broadcast(logits, group=self._pipeline, group_src=self._last)
        return logits

    def norm(self, gradients: Mapping[str, Tensor]) -> Tensor:
        own = [gradient for name, gradient in gradients.items() if name not in self._shared.copies]
        square = square_sum_of(own)
        self._mesh.sum_(square, "pp")
        return square.sqrt().float()

    def accumulates(self, samples: int) -> bool:
        return self._micro_batches.accumulates(samples)

    @property
    def uses_cuda_graph(self) -> bool:
        return False

    def news(self) -> list[str]:
        return []

    def _run(self, forward: Pass, micros: Sequence[_Micro], *, training: bool) -> dict[Key, Loss | Stream]:
        actions, lasts = self._actions(len(micros), training), self._lasts(len(micros)) if training else {}

        def forms(stage: int, micro: int) -> list[Form]:
            batch, first = micros[micro]
            return self._forms.leaving(stage, batch, min(self._micro_batches.size, len(batch.tokens) - first))

        @contextmanager
        def around(action: Action) -> Iterator[None]:
            """Sum the gradients of a stage beside the action that computes the last of them."""
            final = lasts.get(action)
            # Deferred gradients of a weight may come in several parts.
            if final is not None and action.kind == "B":
                self._reduction.arm(final)
            yield
            if final is not None:
                self._reduction.complete(final)

        return self._runtime.run(actions, forward, forms, training=training, around=around)

    def _forward(
        self, stage: int, micro: _Micro, objective: Objective, stream: tuple[Tensor, ...] | None
    ) -> Loss | Stream:
        inputs, objective = self._micro_batches.inputs(*micro, objective)
        tokens, labels = inputs.pop("tokens"), inputs.pop("labels")
        found: Loss | Stream = self.model(tokens, labels, objective, stage=stage, stream=stream, **inputs)
        return found

    def _make_actions(self, micros: int, training: bool) -> list[Action]:
        parallel = self._parallel
        make = training_order if training else forward_order
        orders = make(parallel.schedule, parallel.pp, parallel.vpp, micros)
        return with_messages(orders, parallel.schedule)[dist.get_rank(self._pipeline)]

    def _make_lasts(self, micros: int) -> dict[Action, list[nn.Parameter]]:
        """Return the actions that compute the last gradients of a stage, and the parameters of which no later action has one."""
        # Stages here may share a weight: the later action replaces the earlier.
        owners = {
            parameter: action
            for action in last_gradients(self._actions(micros, True))
            for parameter in self._parameters[action.stage]
        }
        found: dict[Action, list[nn.Parameter]] = {}
        for parameter, action in owners.items():
            found.setdefault(action, []).append(parameter)
        return found

    def _joined(
        self, reports: Sequence[Loss | Stream], uncounted: Sequence[Loss | Stream] = (), *, training: bool
    ) -> Result:
        """Sum the reports of this rank's stages over all micro-batches. Metrics that only other ranks report are zero."""
        sums = Sums(self.device)
        for report in reports:
            if isinstance(report, Loss):
                sums.loss += report.cross_entropy
            sums.add_report(report.metrics, report.expert_load if training else None)
        for report in uncounted:
            sums.add_zeros(report.metrics)
        if training not in self._reported:
            self._reported[training] = self._agree(sums)
        names, shape = self._reported[training]
        if sums.expert_load is None and shape is not None:
            sums.expert_load = torch.zeros(shape, dtype=torch.int64, device=self.device)
        zero = Sums(self.device).loss
        metrics = {name: sums.metrics.get(name, zero) for name in names}
        return Result(sums.loss, 0, metrics, sums.expert_load)

    def _agree(self, sums: Sums) -> tuple[list[str], tuple[int, ...] | None]:
        """Return the names of the metrics that any rank of the pipeline reports, and the shape of the expert loads."""
        load = sums.expert_load
        mine = {"metrics": list(sums.metrics), "load": None if load is None else list(load.shape)}
        theirs = all_gather_json(mine, self._pipeline)
        names = sorted({name for said in theirs for name in said["metrics"]})
        return names, next((tuple(said["load"]) for said in theirs if said["load"] is not None), None)
