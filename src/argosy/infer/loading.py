"""A trained model, ready to evaluate or to sample from: a run's newest good checkpoint, one checkpoint, or an imported model."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from argosy.checkpoint.source import Source, open_source, require_fit, starting_weights
from argosy.checkpoint.tensors import overflow
from argosy.config.schema import RunSpec, TrainSpec
from argosy.errors import ArgosyError
from argosy.model.build import build_model
from argosy.model.decoder import Decoder
from argosy.model.layers import Table
from argosy.parallel.engine import Engine
from argosy.parallel.mesh import Mesh
from argosy.parallel.parallelize import Weights, materialise, parallelize
from argosy.parallel.precision import apply_precision, choose_precision, evaluation_precision
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


def load_model(
    where: str,
    *,
    device: str | None = None,
    precision: str | None = None,
    writes: bool = False,
    train: TrainSpec | None = None,
) -> Loaded:
    """Load a model as a plain module, in evaluation mode.

    Args:
        where: a run directory, a checkpoint, an imported model, or "hf:DIRECTORY".
        device: "cpu" or "cuda". Default: the device of the run's spec.
        precision: the precision of the parameters: "fp32", "bf16" or "fp16". Default: the one that training used, if the device
            supports it.
        writes: the model will generate text: on a CPU, store weights in the order that is fastest for few tokens.
        train: the settings to compute with, in place of those that the model was trained with.
    """
    source = open_trained(where)
    spec = source.run_spec()
    train = train or (TrainSpec(global_batch=1) if spec is None else spec.train)
    on = prepare_device(train, device)
    model = _fitting_model(source)
    apply_precision(model, precision or _precision(train, on))
    materialise(model, on, _weights(source))
    if writes and on.type == "cpu" and isinstance(model, Decoder):
        _store_columns(model)
    return Loaded(source, spec, model.eval(), on)


@torch.no_grad()
def _store_columns(model: Decoder) -> None:
    """Store matrices column by column, which changes no value and no shape.

    MKL's products of a few rows with a matrix stored this way take 0.6 to 0.95 of the time. Products of hundreds of rows, as in
    training and scoring, may take longer.
    """
    for module in model.modules():
        # A lookup reads rows. The token table is the output head too if they are tied.
        if isinstance(module, Table) and not (module is model.embed.tokens and model.head is None):
            continue
        for parameter in module.parameters(recurse=False):
            if parameter.ndim > 1 and parameter.dtype == torch.float32:
                parameter.data = parameter.data.transpose(-1, -2).contiguous().transpose(-1, -2)


def open_trained(where: str) -> Source:
    return open_source(where, report=_log.warning)


def load_engine(source: Source, spec: RunSpec, mesh: Mesh) -> Engine:
    """Return the engine of a run spec on a mesh, with the weights of a source, in a precision the device supports."""
    _fitting_model(source)
    return parallelize(
        spec.model_copy(update={"model": source.model}),
        mesh,
        precision=_precision(spec.train, mesh.device),
        weights=_weights(source),
    )


def _fitting_model(source: Source) -> nn.Module:
    """Return the model on the meta device. Raise ArgosyError if the weights of the source do not fit it."""
    model = build_model(source.model, "meta")
    require_fit(source, model, source.model)
    return model


def _precision(train: TrainSpec, device: torch.device) -> str:
    precision = evaluation_precision(train.precision, device)
    if precision == "fp32" != choose_precision(train.precision, device):
        _log.info("trained in %s, computed in fp32: this CPU has no instructions for 16-bit floats", train.precision)
    return precision


def _weights(source: Source) -> Weights:
    def checked(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
        for name, value in starting_weights(source, model, spec=source.model, seed=0):
            _require_range(source, name, value, dtypes[name])
            yield name, value

    return checked


def _require_range(source: Source, name: str, value: Tensor, dtype: torch.dtype) -> None:
    """Refuse a weight that becomes infinite in the dtype it is loaded in."""
    if (beyond := overflow(value, dtype)) is not None:
        raise ArgosyError(
            "checkpoint.mismatch",
            f"{source.where}: {name} {beyond}",
            fix="use another model"
            if dtype == torch.float32
            else "compute in fp32: train.precision=fp32, or dtype=torch.float32 in Python",
        )
