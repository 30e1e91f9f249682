"""Everything a run needs once its spec is resolved: device, data, model, in the order that refuses earliest.

Training, evaluation and sampling all start here, so that they build the same model from the same spec.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
from torch import nn

from argosy.checkpoint.source import Source, open_source, require_fit, starting_weights
from argosy.config.layout import check_shares
from argosy.config.schema import RunSpec, TrainSpec
from argosy.data.open import RunData, open_data
from argosy.model.build import build_model
from argosy.parallel.apply import apply_layout
from argosy.parallel.mesh import Mesh
from argosy.parallel.pipeline.stage_cut import cut, part_of
from argosy.parallel.precision import apply_precision, choose_precision, evaluation_precision
from argosy.parallel.single import SingleDevice
from argosy.tasks.registry import masks_vary
from argosy.train.device import prepare_device
from argosy.train.device_memory import require_memory


@dataclass(frozen=True)
class Loaded:
    """A trained model, ready to evaluate or to sample from."""

    source: Source
    spec: RunSpec | None  # of the run it was trained by, or of the first of an average; None for one that was imported
    model: nn.Module
    device: torch.device


def open_checked_data(spec: RunSpec) -> RunData:
    """The data, with every split the run will use checked to hold a sample."""
    data = open_data(spec)
    data.training()
    if spec.eval is not None:
        data.each("validation")
    if data.target_len is not None:
        check_shares(spec.parallel, data.target_len, "the length of the decoder's sequences")
    return data


def make_model(spec: RunSpec, mesh: Mesh) -> nn.Module:
    """What this rank has of the model, with uninitialised weights, in the precision of the spec. One that will be sharded has
    no memory yet: a device need not hold all of it."""
    if mesh.device.type != "meta":
        require_memory(spec, mesh.device, ranks=mesh.world_size // spec.parallel.dp_replicate)
    pipeline = mesh.along("pp")
    model = build_model(spec.model, "meta" if mesh.is_sharded or pipeline is not None else mesh.device)
    if pipeline is not None:
        stages = cut(spec.model, spec.parallel, spec.data.seq_len)
        model = part_of(model, stages.modules_of_rank(pipeline.get_local_rank()))
    apply_precision(model, choose_precision(spec.train.precision, mesh.device), masters=mesh.has_fsdp)
    return model if mesh.is_sharded or pipeline is None else model.to_empty(device=mesh.device)


def whole_model(spec: RunSpec) -> nn.Module:
    """For its names and shapes, where a rank has only some: without memory."""
    return build_model(spec.model, "meta")


def parameter_names(spec: RunSpec) -> list[str]:
    """Of the whole model, wherever they are."""
    return [name for name, _ in whole_model(spec).named_parameters()]


def make_engine(spec: RunSpec, model: nn.Module, mesh: Mesh) -> SingleDevice:
    apply_layout(model, spec.parallel, mesh, spec.train.precision)
    seed, z_loss = spec.train.seed, spec.train.z_loss
    if mesh.devices is None:
        micro_batch = spec.parallel.micro_batch
        engine = SingleDevice(model, micro_batch=micro_batch, seed=seed, device=mesh.device, z_loss=z_loss)
        if _replayable(spec, mesh.device):
            engine.replay()
        return engine
    if mesh.size("pp") > 1:
        from argosy.parallel.pipeline.engine import PipelineParallel

        stages = cut(spec.model, spec.parallel, spec.data.seq_len)
        return PipelineParallel(model, mesh, stages, spec.parallel, seed=seed, z_loss=z_loss)
    from argosy.parallel.data import DataParallel  # takes most of a second to import, which one process saves

    return DataParallel(model, mesh, spec.parallel, seed=seed, z_loss=z_loss)


def _replayable(spec: RunSpec, device: torch.device) -> bool:
    """Whether every pass is the same kernels. Dropout is not: it is seeded anew for each block of each pass. Masks that differ from sample to sample
    may be, but no GPU has yet shown that they replay with the same bits."""
    asked = device.type == "cuda" and spec.parallel.graph == "auto" and spec.parallel.compile == "off"
    return asked and not spec.model.dropout and not masks_vary(spec)


def load_model(where: str, *, device: str | None = None) -> Loaded:
    """The newest good checkpoint of a run, one checkpoint of it, or an imported model, in a model on a device."""
    source = open_source(where, report=lambda text: print(text, file=sys.stderr))
    spec = source.run_spec()
    train = spec.train if spec is not None else TrainSpec(global_batch=1)
    on = prepare_device(train, device)
    model = build_model(source.model, on)
    precision = evaluation_precision(train.precision, on)
    if precision == "fp32" != choose_precision(train.precision, on):
        why = f"note: trained in {train.precision}, computed in fp32: this CPU has no instructions for 16-bit floats"
        print(why, file=sys.stderr)
    apply_precision(model, precision)
    require_fit(source, model, source.model)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in starting_weights(source, model, source.model, seed=0):
            parameters[name].copy_(value)
    return Loaded(source, spec, model.eval(), on)
