"""The layout of `parallel: auto` and the micro-batch, chosen once the world size and the GPU are known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from argosy.config.checks import check
from argosy.config.default_micro_batch import is_micro_batch_open, planner_chooses, with_micro_batch
from argosy.config.layout import AXES
from argosy.config.overrides import Override
from argosy.config.resolve import Resolved, resolve
from argosy.config.schema import RunSpec
from argosy.errors import ArgosyError
from argosy.plan.advise import ranked_layouts, ranked_micro_batches
from argosy.plan.hardware import Cluster, gpu_of_device, parse_cluster
from argosy.plan.own_layout import refusal_of
from argosy.plan.this_machine import local_gpus

ORIGIN = "planner"
# The origin of a micro-batch that a resumed run keeps.
KEPT = "the run's first start"


def is_open(resolved: Resolved) -> bool:
    """True if the spec sets no axis of the layout."""
    return _open_keys(resolved) >= {*AXES, "ep"}


def settle_layout(
    resolved: Resolved,
    source: Path | Mapping[str, Any] | None,
    overrides: Sequence[Override],
    ranks: int,
    planned_on: Cluster | None,
) -> Resolved:
    """Return the run with a layout for `ranks` ranks, if its spec leaves the layout open.

    `planned_on` is the cluster, or None if the planner does not know the hardware.
    """
    chosen = open_layout(resolved, planned_on, ranks)
    if not chosen:
        return resolved
    settled = resolve(source, [*overrides, *chosen])
    keys = {override.partition("=")[0] for override in chosen}
    return Resolved(settled.spec, {key: ORIGIN if key in keys else origin for key, origin in settled.origins.items()})


def check_open_layout(resolved: Resolved, source: Path, overrides: Sequence[str], ranks: int) -> bool:
    """Refuse a run for which `ranks` ranks would find no layout, before any is started. Returns False if the spec sets the layout.

    The ranks choose the layout themselves, by the name that torch has for the GPU. Where the driver does not tell the name here,
    nothing is refused.
    """
    if not is_open(resolved):
        return False
    gpus = [] if resolved.spec.train.device == "cpu" else local_gpus()
    if gpus is not None:
        cluster = cluster_of(resolved.spec, gpus[0] if gpus else None, ranks)
        settle_layout(resolved, source, overrides, ranks, cluster)
    return True


def open_layout(resolved: Resolved, planned_on: Cluster | None, ranks: int) -> tuple[str, ...]:
    """Return the overrides that complete a layout for `ranks` ranks, or nothing if the spec sets the layout.

    The overrides are the planner's best layout, or pure data parallelism if the planner does not know the hardware.
    """
    if ranks == 1 or not is_open(resolved):
        return ()
    if planned_on is None:
        return (f"parallel.dp_replicate={ranks}",)
    open_keys = _open_keys(resolved)
    settled = {
        key: getattr(resolved.spec.parallel, key) for key in ("micro_batch", "recompute") if key not in open_keys
    }
    refusal: ArgosyError | None = None
    for keys in ranked_layouts(resolved.spec, planned_on, settled):
        chosen = {key: value for key, value in keys.items() if key in open_keys}
        try:
            _check(resolved, chosen)
        except ArgosyError as error:
            refusal = refusal or error
        else:
            return tuple(f"parallel.{key}={value}" for key, value in chosen.items())
    raise refusal or AssertionError("the planner refuses what has no layout")


def settle_micro_batch(resolved: Resolved, planned_on: Cluster | None, kept: int | None) -> Resolved:
    """Return the run with a micro-batch for its layout, if its spec leaves that open.

    A resumed run keeps the size it has, because another one changes the rounding of sums. A fresh run of a decoder gets the planner's
    best on hardware that the planner knows, which is the one that `argosy plan` names beside the run spec's own layout; in its table, layouts
    with recompute may have another. Other runs keep the size they were resolved with.

    Args:
        planned_on: the cluster, or None.
        kept: the size that the run was saved with, or None.
    """
    if not is_micro_batch_open(resolved.origins):
        return resolved
    sizes = [(kept, KEPT)] if kept is not None else []
    if planned_on is not None and planner_chooses(resolved.spec):
        sizes += [(size, ORIGIN) for size in ranked_micro_batches(resolved.spec, planned_on)]
    for size, origin in sizes:
        spec = with_micro_batch(resolved.spec, size)
        if refusal_of(spec, resolved.origins) is None:
            return Resolved(spec, resolved.origins | {"parallel.micro_batch": origin})
    return resolved


def _check(resolved: Resolved, chosen: dict[str, object]) -> None:
    """Apply the checks of the run spec. The planner does not know all rules of a model's parts."""
    parallel = resolved.spec.parallel.model_copy(update=chosen)
    check(resolved.spec.model_copy(update={"parallel": parallel}), resolved.origins)


def cluster_of(spec: RunSpec, device_name: str | None, ranks: int) -> Cluster | None:
    """Return the cluster of a run, or None if the planner does not know the hardware.

    It is the spec's cluster if that has one GPU for each rank, else `ranks` times the GPU of this machine.
    """
    if spec.cluster is not None and spec.cluster.instance is not None:
        named = parse_cluster(f"{spec.cluster.nodes}x{spec.cluster.instance}").using(spec.cluster.gpus)
        if named.gpus == ranks:
            return named
    gpu = None if device_name is None else gpu_of_device(device_name)
    return None if gpu is None else parse_cluster(f"{ranks}x{gpu.name}")


def _open_keys(resolved: Resolved) -> set[str]:
    keys = {
        key
        for key in (*AXES, "ep", "vpp", "schedule", "recompute")
        if resolved.origins[f"parallel.{key}"].startswith(("default", "derived"))
    }
    return keys | {"micro_batch"} if is_micro_batch_open(resolved.origins) else keys
