"""A trained model on several ranks of one machine: the layout that a command asks for, and its engine."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from argosy.checkpoint.source import Source
from argosy.config.layout import AXES, check_world
from argosy.config.resolve import resolve
from argosy.config.schema import RunSpec
from argosy.errors import ArgosyError
from argosy.infer.loading import Loaded, load_engine, open_trained
from argosy.parallel.engine import Engine
from argosy.parallel.mesh import Mesh, joined
from argosy.supervise.world import World
from argosy.train.device import prepare_device


@contextmanager
def load_on_ranks(
    where: str, layout: Sequence[str], world: World, device: str | None = None
) -> Iterator[tuple[Loaded, Engine, Mesh]]:
    """Join the ranks, and load this rank's part of a model, in evaluation mode.

    Args:
        layout: keys of `parallel`, such as "tp=2". Ranks that it leaves are replicas.
    """
    # What every rank would say, the first one says.
    if world.rank:
        logging.getLogger("argosy").setLevel(logging.ERROR)
    source = open_trained(where)
    run = source.run_spec()
    spec = _spec_for(source, run, layout, world)
    on = prepare_device(spec.train, device, local_rank=world.local_rank)
    with joined(spec.parallel, world, on) as mesh:
        engine = load_engine(source, spec, mesh)
        engine.model.eval()
        yield Loaded(source, run, engine.model, on), engine, mesh


def _spec_for(source: Source, run: RunSpec | None, layout: Sequence[str], world: World) -> RunSpec:
    """Return a run spec with the model and a layout for all ranks, which is checked as that of a training run is.

    Texts are padded to what the layout needs, so the length of the samples is only one that it can cut. Without sequence
    parallelism a tensor-parallel layout reads one token at a time.
    """
    keys = dict(_key(given) for given in layout)
    # A size that is none is refused with all other values of the spec.
    sizes = {axis: int(keys[axis]) for axis in AXES if keys.get(axis, "").isdigit() and int(keys[axis])}
    if not {"dp_replicate", "dp_shard"} & keys.keys():
        sizes["dp_replicate"] = max(1, world.size // math.prod(sizes.values()))
        keys["dp_replicate"] = str(sizes["dp_replicate"])
    copies = sizes.get("dp_replicate", 1) * sizes.get("dp_shard", 1)
    made: dict[str, object] = {"init_from": source.where, "data.train": "none", "eval": "off", "optim.lr": 1}
    made |= {"train.steps": 1, "train.global_batch": copies, "parallel.micro_batch": 1, "parallel.sp": False}
    made["data.seq_len"] = 2 * sizes.get("cp", 1) * sizes.get("tp", 1)
    if run is not None:
        made |= {f"train.{key}": getattr(run.train, key) for key in ("device", "precision", "deterministic")}
    given = [f"parallel.{key}={value}" for key, value in keys.items()]
    spec = resolve(None, [*made.items(), *given]).spec
    check_world(spec.parallel, world.size, "--nproc")
    return spec


def _key(given: str) -> tuple[str, str]:
    key, equals, value = given.strip().removeprefix("parallel.").partition("=")
    if not equals:
        raise ArgosyError(
            "config.bad-value",
            "a layout is written as keys of `parallel` with their values",
            key="--layout",
            value=given,
            fix="--layout tp=2, or --layout pp=2,tp=2",
        )
    return key, value
