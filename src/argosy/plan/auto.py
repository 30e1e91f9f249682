"""The layout of `parallel: auto`, chosen once the world size and the GPU are known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from argosy.config.layout import AXES, check_layout
from argosy.config.overrides import Override
from argosy.config.resolve import Resolved, resolve
from argosy.config.schema import RunSpec
from argosy.errors import ArgosyError
from argosy.plan.advise import ranked_layouts
from argosy.plan.hardware import gpu_of_device, parse_cluster

ORIGIN = "planner"


def is_open(resolved: Resolved) -> bool:
    """True if the spec sets no axis of the layout."""
    return _open_keys(resolved) >= {*AXES, "ep"}


def settle_layout(
    resolved: Resolved,
    source: Path | Mapping[str, Any] | None,
    overrides: Sequence[Override],
    ranks: int,
    planned_on: str | None,
) -> Resolved:
    """Return the run with a layout for `ranks` ranks, if its spec leaves the layout open.

    `planned_on` is the planner's name of the cluster, or None if the planner does not know the hardware.
    """
    chosen = open_layout(resolved, planned_on, ranks)
    if not chosen:
        return resolved
    settled = resolve(source, [*overrides, *chosen])
    keys = {override.partition("=")[0] for override in chosen}
    return Resolved(settled.spec, {key: ORIGIN if key in keys else origin for key, origin in settled.origins.items()})


def open_layout(resolved: Resolved, planned_on: str | None, ranks: int) -> tuple[str, ...]:
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
            _check(resolved.spec, chosen)
        except ArgosyError as error:
            refusal = refusal or error
        else:
            return tuple(f"parallel.{key}={value}" for key, value in chosen.items())
    raise refusal or AssertionError("the planner refuses what has no layout")


def _check(spec: RunSpec, chosen: dict[str, object]) -> None:
    """Apply the checks of the run spec. The planner does not know all rules of a model's parts."""
    parallel = spec.parallel.model_copy(update=chosen)
    check_layout(spec.model_copy(update={"parallel": parallel}), {})


def cluster_of(spec: RunSpec, device_name: str | None, ranks: int) -> str | None:
    """Return the planner's name of the cluster, or None if the planner does not know the hardware.

    It is the spec's cluster if that has one GPU for each rank, else `ranks` times the GPU of this machine.
    """
    if spec.cluster is not None and spec.cluster.instance is not None:
        named = f"{spec.cluster.nodes}x{spec.cluster.instance}"
        if parse_cluster(named).gpus == ranks:
            return named
    gpu = None if device_name is None else gpu_of_device(device_name)
    return None if gpu is None else f"{ranks}x{gpu.name}"


def _open_keys(resolved: Resolved) -> set[str]:
    return {
        key
        for key in (*AXES, "ep", "vpp", "schedule", "micro_batch", "recompute")
        if resolved.origins[f"parallel.{key}"].startswith(("default", "derived"))
    }
