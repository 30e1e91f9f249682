"""Start a run, find a launched one by run spec or by name, and ask its target for status, log or stop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from argosy.config.resolve import resolve
from argosy.errors import ArgosyError
from argosy.extras import install_extra
from argosy.launch.placement import Placement
from argosy.launch.registry import default_target, find_target, local_target
from argosy.launch.stages import STAGES, Stage, stages_of
from argosy.launch.target import Launched, LaunchOptions, RunStatus, not_found


def start(placed: Placement, options: LaunchOptions) -> int:
    """Run or submit a placed run, and return the exit code."""
    return find_target(placed.cluster.target).apply(placed, options)


def chosen_stage(placed: Placement, name: str | None) -> Stage | None:
    """Return the stage with that name, or None without a name.

    Raises:
        ArgosyError: the run has no such stage.
    """
    stages = [stage.name for stage in stages_of(placed)]
    if name is not None and name not in stages:
        raise ArgosyError(
            "launch.no-stage",
            f"this run has no stage {name}: it has {', '.join(stages)}",
            key="--stage",
            value=name,
            fix="storage comes from cluster.storage.take_ownership, fetch and prepare from data.train.N.prepare, preflight from cluster.preflight",
        )
    return None if name is None else STAGES[name]


def find(run: str, namespace: str | None, target: str | None = None, overrides: Sequence[str] = ()) -> Launched:
    """Find a launched run.

    Args:
        run: a run spec's file, a run directory, or a run's name. A name is looked up in the namespace, or on this machine.
        namespace: the Kubernetes namespace; the default is the run spec's, or the one of the current context.
        target: the target the run was launched on, if it differs from its spec.
        overrides: `key=value` pairs over the run spec, the same as when it was launched.

    Raises:
        ArgosyError: the run is not on this machine, and no cluster can be asked for it.
    """
    if run.endswith((".yaml", ".yml")):
        spec = resolve(Path(run), overrides, elsewhere=True).spec
        where = target or (local_target().name if spec.cluster is None else spec.cluster.target)
        space = namespace or (spec.cluster.namespace if spec.cluster is not None else None)
        return Launched(spec.name, where, space, Path(spec.runs_dir) / spec.name)
    if overrides:
        raise ArgosyError(
            "config.conflict",
            f"{run} is a run's name, and overrides change a run spec",
            key="KEY=VALUE",
            value=overrides[0],
            fix="name the run spec's file, or leave the overrides out; -n and --target say where a run of that name is",
        )
    directory = Path(run) if "/" in run else Path("runs") / run
    here = directory.is_dir() and namespace is None
    assumed = local_target() if here else default_target()
    found = Launched(directory.name, target or assumed.name, namespace, directory)
    if target is None and not here and "/" in run:
        raise not_found(found, f"there is no run directory {directory}")
    if target is None and not here and find_spec("kubernetes") is None:
        client = f"its client: {install_extra('k8s')}"
        raise not_found(found, f"there is no {directory} here, and asking Kubernetes for {run} needs {client}")
    return found


def status(run: Launched) -> RunStatus:
    """Return the state of every stage, and the training progress."""
    return find_target(run.target).status(run)


def logs(run: Launched, *, rank: int, follow: bool, tail: int | None) -> Iterator[str]:
    """Yield the lines of a rank's log."""
    return find_target(run.target).logs(run, rank=rank, follow=follow, tail=tail)


def end(run: Launched) -> list[str]:
    """End a run, which saves first. Return a description of each job that was ended."""
    return find_target(run.target).stop(run)
