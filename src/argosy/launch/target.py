"""The interface of a launch target: render, apply, status, logs, stop, RBAC rules, and whatever else differs between targets.

A target decides where a run's processes start and what starts them. Everything that depends on it is an attribute or a method here,
so that no other code compares target names. `argosy.config.targets` lists the targets; docs/how-to/add-a-launch-target.md
shows how to add one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from argosy.config.cluster import ClusterSpec
from argosy.console.formats import clock
from argosy.errors import ArgosyError
from argosy.launch.placement import Placement
from argosy.launch.stages import Stage
from argosy.record.jsonl import read_jsonl, read_metrics
from argosy.record.lifecycle import ended_as
from argosy.record.rank_logs import newest_attempt, pieces, ranks_with_logs, read_log

Phase = Literal["absent", "waiting", "running", "stopped", "done", "failed"]
WATCH_IT = "`argosy watch {directory}` shows what it does"
_LIST_RUNS = "`argosy ls` lists the runs here, and `argosy ls -n NAMESPACE` those of a namespace"


@dataclass(frozen=True)
class State:
    """The state of a stage, and the fix if it needs one."""

    phase: Phase
    text: str
    fix: str = ""
    # The pod whose log has the details.
    pod: str | None = None

    @property
    def over(self) -> bool:
        return self.phase in ("done", "failed")

    def __str__(self) -> str:
        return f"{self.phase}: {self.text}" + (f"\n  fix: {self.fix}" if self.fix else "")


@dataclass(frozen=True)
class Launched:
    """A launched run: the name of its target, its Kubernetes namespace if one was given, and its run directory on this machine."""

    name: str
    target: str
    namespace: str | None
    directory: Path


@dataclass(frozen=True)
class RunStatus:
    """The output of `argosy status`: the state of every stage that was started, and the last logged step."""

    run: str
    namespace: str | None = None
    stages: dict[str, State] = field(default_factory=dict)
    progress: str | None = None


@dataclass(frozen=True)
class Right:
    """A rule of a Kubernetes Role: the verbs that a launch from inside the cluster may use on one resource of an API group."""

    group: str
    resource: str
    verbs: tuple[str, ...]


@dataclass(frozen=True)
class LaunchOptions:
    """The options of an `argosy launch` call.

    `path` is the run spec's file. `only` is the single stage to run; None runs all. `follow` waits for the last stage to end.
    `in_cluster` uses the credentials of the pod this process runs in. `output` is the directory for rendered files.
    """

    path: Path
    only: Stage | None = None
    follow: bool = True
    in_cluster: bool = False
    output: Path | None = None
    say: Callable[[str], None] = print


class Target(ABC):
    """One way to start a run. A module in `launch/targets/` holds a subclass and its only instance, `TARGET`."""

    # The value of cluster.target.
    name: ClassVar[str]
    # Processes start on this machine: there is one node, its GPUs need not be declared, and no data leaves it.
    on_this_machine: ClassVar[bool] = False
    # Stages are pods on Kubernetes: they need an image, a volume, resource requests and a namespace.
    makes_pods: ClassVar[bool] = False
    # The cluster restarts a failed training job. Otherwise the process that follows the launch does.
    restarts_itself: ClassVar[bool] = True

    def check(self, placed: Placement) -> None:  # noqa: B027  # most targets can run whatever was placed
        """Refuse a run that this target cannot start. Called before rendering.

        Raises:
            ArgosyError: the run cannot be started here as it is specified.
        """

    @abstractmethod
    def render(self, placed: Placement) -> dict[str, str]:
        """Return the files that start the run, by name, in the order they are used. The function is pure: no clock, no network."""

    @abstractmethod
    def apply(self, placed: Placement, options: LaunchOptions) -> int:
        """Start the run, or follow it if it is already started, and return the exit code."""

    @abstractmethod
    def stop(self, run: Launched) -> list[str]:
        """End the run, which saves first. Return a description of each job that was ended."""

    def status(self, run: Launched) -> RunStatus:
        """Return the status of the run. This default has no scheduler to ask and reads the run directory."""
        return RunStatus(run.name, progress=logged_progress(run))

    def logs(self, run: Launched, *, rank: int, follow: bool, tail: int | None) -> Iterator[str]:
        """Yield the lines of a rank's log, from the run directory."""
        # A followed log may not exist yet.
        if not follow:
            _require_log(run, rank)
        yield from read_log(run.directory, rank, tail=tail, follow=follow)

    def programs(self, cluster: ClusterSpec) -> Sequence[str]:
        """Return the programs that the image must have besides `argosy`. Preflight looks for them."""
        return ()

    def rights(self, cluster: ClusterSpec) -> Sequence[Right]:
        """Return the RBAC rules that the chart's conductor needs for this target, in addition to those of every launch."""
        return ()


def logged_progress(run: Launched) -> str | None:
    """Return the newest step in the run directory's metrics, or None if there is none."""
    metrics = run.directory / "metrics.jsonl"
    if not metrics.exists():
        return None
    records = [record for record in read_metrics(metrics).values() if "loss" in record and "eta_s" in record]
    if not records:
        return None
    last = records[-1]
    # NaN and infinity are null in the record.
    loss = "not finite" if last["loss"] is None else f"{last['loss']:.4f}"
    facts = f"step {last['step']}/{last['steps']}, loss {loss}"
    ended = ended_as(read_jsonl(run.directory / "events.jsonl"))
    return f"{facts}, ETA {clock(last['eta_s'])}" if ended is None else f"{ended}: {facts}"


def not_found(run: Launched, cause: str, fix: str = _LIST_RUNS) -> ArgosyError:
    return ArgosyError(
        "launch.not-found",
        cause,
        key="RUN",
        value=run.name,
        fix=fix.format(directory=run.directory),
    )


def _require_log(run: Launched, rank: int) -> None:
    attempt = newest_attempt(run.directory)
    if attempt is None:
        cause = f"{run.directory} has no logs of ranks: it has not begun, or is not seen from here"
        raise not_found(run, cause, WATCH_IT)
    if not pieces(attempt, rank):
        others = ranks_with_logs(attempt)
        held = f"those of {len(others)} ranks, the last of them {others[-1]}" if others else "none"
        raise not_found(run, f"{attempt} has no log of rank {rank}, but {held}", "give another --rank")
