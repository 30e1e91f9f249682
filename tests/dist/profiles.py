"""A profiled step, as one rank of a layout."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import NamedTuple

from argosy.parallel.parallelize import parallelize
from argosy.train.exposed_communication import Exposure, exposure_of
from argosy.train.optimizer import Optimizer
from argosy.train.profile_steps import Profiling, Window
from argosy.train.step import take_step
from dist.devices import own_mesh
from dist.training import batch_of, set_initial_weights, share_of, spec_of


class Profiled(NamedTuple):
    exposure: Exposure
    # What the console would show.
    lines: list[str]
    # When each kind of range first began, in microseconds.
    began: dict[str, float]


def profile_steps(model: str, layout: str) -> Profiled:
    """The second and third step of a run, under torch's profiler."""
    spec = spec_of(model, layout)
    mesh = own_mesh(spec.parallel)
    engine = parallelize(spec, mesh)
    optimizer = Optimizer(engine.model, spec.optim)
    set_initial_weights(optimizer, engine, spec)
    with tempfile.TemporaryDirectory() as root:
        profiling, lines = Profiling(Window(2, 4), Path(root), mesh), list[str]()
        for step in range(1, 4):
            profiling.before(step)
            take_step(engine, optimizer, share_of(batch_of(model, step), mesh), step=step, lr=spec.optim.lr)
            lines += profiling.after(step, last=False)
        trace = Path(root) / "profile" / f"trace-rank{mesh.rank}.json"
        found, events = exposure_of(trace, mesh.names), json.loads(trace.read_bytes())["traceEvents"]
    assert found is not None
    began: dict[str, float] = {}
    for event in sorted((e for e in events if e.get("cat") == "user_annotation"), key=lambda e: e["ts"]):
        began.setdefault(event["name"], event["ts"])
    return Profiled(found, lines, began)
