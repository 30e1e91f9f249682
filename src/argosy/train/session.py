"""The parts of a run that do not depend on its directory: data, schedule, engine and optimiser, in the order that refuses
earliest. A run directory is touched only after all of them are built."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from argosy.checkpoint.source import Source, open_source, require_fit
from argosy.checkpoint.store import listed
from argosy.config.batches import Batches
from argosy.config.layout import check_shares
from argosy.config.lr_schedules import check_phases, counts_epochs
from argosy.config.schema import RunSpec
from argosy.config.units import Duration
from argosy.data.open import RunData, open_data
from argosy.data.samples.windows import Stream
from argosy.model.build import build_model
from argosy.parallel.engine import Engine
from argosy.parallel.mesh import Mesh
from argosy.parallel.parallelize import parallelize
from argosy.parallel.precision import choose_precision
from argosy.record.rundir import RunDir
from argosy.tasks.task_registry import task_of
from argosy.train.device import require_memory
from argosy.train.optimizer import Optimizer
from argosy.train.saving import Timer
from argosy.train.schedule import Schedule, make_schedule, schedule_notes


@dataclass(frozen=True)
class Session:
    """The data, schedule, engine and optimiser that a trainer uses."""

    spec: RunSpec
    mesh: Mesh
    data: RunData
    stream: Stream
    # Validation data by source. None: the run does not evaluate.
    validation: dict[str, Stream] | None
    steps: int
    schedule: Schedule
    precision: str
    engine: Engine
    optimizer: Optimizer

    @property
    def device(self) -> torch.device:
        return self.mesh.device

    @property
    def batches(self) -> Batches:
        return self.spec.train.batches

    def timer(self, every: Duration, clock: Callable[[], float] = time.monotonic) -> Timer:
        samples = every.samples(seq_len=self.spec.data.seq_len, epoch_samples=self.stream.epoch_samples)
        return Timer(every, samples, self.batches, clock)

    def schedule_notes(self, run: RunDir, step: int, changes: list[str]) -> list[str]:
        """Describe the effect of spec changes on the learning rate of a run that resumes after `step` steps."""
        before = run.spec_at(step) if changes else None
        if before is None:
            return []
        earlier = _schedule(before, self.stream.epoch_samples)
        return schedule_notes(earlier, self.schedule, self.spec.optim, step, changes)

    def starting_source(self, run: RunDir, *, fresh: bool = False) -> Source | None:
        """Return the weights that `init_from` names; None if the run already has a checkpoint and does not start afresh."""
        if self.spec.init_from is None or (listed(run.checkpoints) and not fresh):
            return None
        source = open_source(self.spec.init_from)
        require_fit(source, build_model(self.spec.model, "meta"), self.spec.model)
        task_of(self.spec).check_weights((*self.data.corpora, *self.data.validation), source.identity)
        return source


def open_session(spec: RunSpec, mesh: Mesh) -> Session:
    """Open the data and build the model of a run, as one rank of a mesh, with every check that needs one of them. On the meta
    device the model has no memory, for a dry run."""
    data = open_data(spec)
    stream = data.training()
    validation = data.each("validation") if spec.eval is not None else None
    if spec.log.samples is not None:
        data.require_tokenizer("log.samples")
    if data.target_len is not None:
        check_shares(spec.parallel, data.target_len, "the length of the decoder's sequences")
    schedule = _schedule(spec, stream.epoch_samples)
    if mesh.device.type != "meta":
        require_memory(spec, mesh.device, ranks=mesh.world_size // spec.parallel.dp_replicate)
    precision = choose_precision(spec.train.precision, mesh.device)
    engine = parallelize(spec, mesh, precision=precision)
    optimizer = Optimizer(
        engine.model,
        spec.optim,
        scaled=precision == "fp16",
        guard=spec.guard,
        guessing=math.log(spec.model.vocab_size),
        names=parameter_names(spec) if mesh.size("pp") > 1 else None,
    )
    return Session(spec, mesh, data, stream, validation, schedule.steps, schedule, precision, engine, optimizer)


def parameter_names(spec: RunSpec) -> list[str]:
    """Return the names of all parameters of the model, whichever rank holds them."""
    return [name for name, _ in build_model(spec.model, "meta").named_parameters()]


def _schedule(spec: RunSpec, epoch_samples: int) -> Schedule:
    """Return the learning-rate schedule of a spec for data of this size."""
    steps = spec.train.length.steps(spec.train.batches, seq_len=spec.data.seq_len, epoch_samples=epoch_samples) or 0
    if counts_epochs(spec):
        check_phases(spec, steps=steps, epoch_samples=epoch_samples)
    return make_schedule(spec, steps=steps, epoch_samples=epoch_samples)
