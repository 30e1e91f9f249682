"""A trained model, ready to evaluate or to sample from: a run's newest good checkpoint, one checkpoint, or an imported model."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from argosy.checkpoint.source import Source, open_source, require_fit, starting_weights
from argosy.config.schema import DataSource, DataSpec, OptimSpec, ParallelSpec, RunSpec, TrainSpec
from argosy.model.build import build_model
from argosy.parallel.engine import Engine
from argosy.parallel.mesh import Mesh
from argosy.parallel.parallelize import parallelize
from argosy.parallel.precision import choose_precision, evaluation_precision
from argosy.train.device import prepare_device

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loaded:
    """A model on a device, and where it came from."""

    source: Source
    # The spec of the run that trained it, or of the first run of an average. None for an imported model.
    spec: RunSpec | None
    model: nn.Module
    device: torch.device


def load_model(where: str, *, device: str | None = None) -> Loaded:
    """Load a model as a plain module, in evaluation mode."""
    source = open_trained(where)
    spec = source.run_spec()
    plain = _plain_spec(source, spec)
    on = prepare_device(plain.train, device)
    return Loaded(source, spec, load_engine(source, plain, on).model.eval(), on)


def open_trained(where: str) -> Source:
    return open_source(where, report=_log.warning)


def load_engine(source: Source, spec: RunSpec, device: torch.device) -> Engine:
    """Return the engine of a run spec on one device, with the weights of a source, in a precision the device supports."""
    precision = evaluation_precision(spec.train.precision, device)
    if precision == "fp32" != choose_precision(spec.train.precision, device):
        _log.info(
            "trained in %s, computed in fp32: this CPU has no instructions for 16-bit floats", spec.train.precision
        )
    require_fit(source, build_model(source.model, "meta"), source.model)
    return parallelize(
        spec.model_copy(update={"model": source.model}),
        Mesh(device),
        precision=precision,
        weights=partial(starting_weights, source, spec=source.model, seed=0),
    )


def _plain_spec(source: Source, spec: RunSpec | None) -> RunSpec:
    """Return a spec to load the model with, without torch.compile or recompute. `spec` is None for a model not trained here."""
    return RunSpec(
        model=source.model,
        data=DataSpec(train=[DataSource(path=source.where)], seq_len=source.model.max_seq_len),
        train=TrainSpec(global_batch=1) if spec is None else spec.train,
        optim=OptimSpec(lr=1.0, min_lr=1.0),
        parallel=ParallelSpec(micro_batch=1),
    )
