"""`parallel: auto`: the layout of a run whose spec leaves it open, once it is known how many ranks there are and of what."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from argosy.config.layout import AXES, check_layout
from argosy.config.resolve import Resolved, resolve
from argosy.config.schema import RunSpec
from argosy.errors import ArgosyError
from argosy.plan.advise import ranked_layouts
from argosy.plan.hardware import gpu_of_device, parse_cluster

ORIGIN = "planner"


def is_open(resolved: Resolved) -> bool:
    """Whether the spec names no axis of the layout."""
    return _open_keys(resolved) >= {*AXES, "ep"}


def settle_layout(
    resolved: Resolved, path: Path | None, overrides: Sequence[str], ranks: int, planned_on: str | None
) -> Resolved:
    """The run with its layout, where that was left open, spread over the ranks; `planned_on` is the cluster as the planner
    names it, or None where it knows nothing of it."""
    chosen = open_layout(resolved, planned_on, ranks)
    if not chosen:
        return resolved
    settled = resolve(path, [*overrides, *chosen])
    keys = {override.partition("=")[0] for override in chosen}
    return Resolved(settled.spec, {key: ORIGIN if key in keys else origin for key, origin in settled.origins.items()})


def open_layout(resolved: Resolved, planned_on: str | None, ranks: int) -> tuple[str, ...]:
    """Overrides that spread a layout the spec leaves open over the ranks: the planner's best, or replicas where it knows
    nothing of the nodes."""
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
    """What the planner does not know of: the rules of this model's own parts."""
    parallel = spec.parallel.model_copy(update=chosen)
    check_layout(spec.model_copy(update={"parallel": parallel}), {})


def cluster_of(spec: RunSpec, device_name: str | None, ranks: int) -> str | None:
    """The cluster as the planner names it: the spec's own, where it has as many GPUs as there are ranks, or so many of the
    GPU that is here. None where the planner knows neither."""
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
