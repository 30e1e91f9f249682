"""The base of the Kubernetes targets: render, conduct, query and stop jobs made from the shared pod template.

A target that starts pods subclasses `KubernetesTarget`, names the kind of its training job and renders it. The official client
is imported only to talk to a cluster.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, ClassVar

from argosy.config.cluster import ClusterSpec
from argosy.errors import ArgosyError
from argosy.extras import install_extra
from argosy.launch.indexed_jobs import data_job, ranks_job
from argosy.launch.manifests import BESIDE, JOB, Kind, Manifests, shared_objects
from argosy.launch.placement import Placement
from argosy.launch.pod import Manifest
from argosy.launch.pod_checks import check_pods
from argosy.launch.registry import all_targets
from argosy.launch.stages import STAGES, TRAIN, Stage, stages_of
from argosy.launch.storage import size_note
from argosy.launch.target import Launched, LaunchOptions, Right, RunStatus, State, Target, logged_progress, not_found

if TYPE_CHECKING:
    from argosy.launch.api import Cluster

_JOB_VERBS = ("get", "list", "create", "patch", "delete")
_BESIDE_VERBS = ("get", "create", "patch")


# The RBAC rules of a launch on any of these targets, besides those for the kinds of its own.
EVERY_LAUNCH = (
    Right("", "configmaps", _BESIDE_VERBS),
    Right("", "services", _BESIDE_VERBS),
    Right("", "pods", ("list", "watch")),
    Right("", "events", ("list",)),
    Right("", "pods/log", ("get",)),
    Right("batch", "jobs", _JOB_VERBS),
)


class KubernetesTarget(Target):
    """A target whose stages are pods. Data stages and preflight are plain Jobs; the training job is the subclass's own."""

    makes_pods = True
    # The kinds that the training job may have.
    jobs: ClassVar[tuple[Kind, ...]]
    # Further kinds that are created for the training job and deleted with it.
    beside: ClassVar[tuple[Kind, ...]] = ()

    @abstractmethod
    def train_objects(self, placed: Placement) -> list[Manifest]:
        """Return the objects of the training stage: first what the job needs, then the job."""

    def check(self, placed: Placement) -> None:
        check_pods(placed)

    def manifests(self, placed: Placement) -> Manifests:
        storage, spec = shared_objects(placed)
        return Manifests(storage, spec, {stage: self._objects(placed, stage) for stage in stages_of(placed)})

    def _objects(self, placed: Placement, stage: Stage) -> list[Manifest]:
        if stage.trains:
            return self.train_objects(placed)
        return ranks_job(placed, stage) if stage.on_gpus else data_job(placed, stage)

    def render(self, placed: Placement) -> dict[str, str]:
        return self.manifests(placed).files()

    def apply(self, placed: Placement, options: LaunchOptions) -> int:
        cluster = connected(placed.cluster.namespace, in_cluster=options.in_cluster)
        from argosy.launch.conduct import Conductor

        manifests = self.manifests(placed)
        if note := size_note(placed.storage):
            options.say(note)
        conductor = Conductor(
            cluster,
            placed,
            manifests,
            options.say,
            self.jobs,
            self.restarts_itself,
            beside=self.beside,
            rights=[*EVERY_LAUNCH, *self.rights(placed.cluster)],
        )
        return conductor.run(options.only, follow=options.follow)

    def status(self, run: Launched) -> RunStatus:
        cluster = _cluster_of(run)
        from argosy.launch.conduct import look, runs_in
        from argosy.launch.pod_logs import progress_in_log
        from argosy.launch.run_record import recorded_spec, recorded_state

        found = runs_in(cluster, job_kinds()).get(run.name)
        if found is None:
            spec = recorded_spec(cluster, run.name)
            if spec is None:
                raise not_found(run, f"namespace {cluster.namespace} has no run {run.name}")
            return RunStatus(run.name, cluster.namespace, {TRAIN.name: recorded_state(spec)}, logged_progress(run))
        states = {stage: look(cluster, run.name, stage, job_kinds()) for stage in STAGES if stage in found}
        progress = logged_progress(run) or progress_in_log(cluster, run.name)
        return RunStatus(run.name, cluster.namespace, states, progress)

    def logs(self, run: Launched, *, rank: int, follow: bool, tail: int | None) -> Iterator[str]:
        """Yield the log of the pod that holds a rank. A lost connection resumes where it broke off."""
        cluster = _cluster_of(run)
        from argosy.launch.pod_logs import read_pod_log

        yield from read_pod_log(cluster, run, job_kinds(), rank=rank, follow=follow, tail=tail)

    def stop(self, run: Launched) -> list[str]:
        cluster = _cluster_of(run)
        from argosy.launch.stopping import stop_and_watch

        stopped = stop_and_watch(cluster, run.name, job_kinds(), kinds_beside())
        if not stopped:
            raise not_found(run, f"namespace {cluster.namespace} has nothing of {run.name} to stop")
        return stopped

    def rights(self, cluster: ClusterSpec) -> Sequence[Right]:
        """Return the RBAC rules for the target's own kinds. Every launch may already create plain Jobs."""
        jobs = [Right(kind.group, kind.plural, _JOB_VERBS) for kind in self.jobs if kind != JOB]
        return [*jobs, *(Right(kind.group, kind.plural, _BESIDE_VERBS) for kind in self.beside)]


def job_kinds() -> list[Kind]:
    """Return the kinds that a stage's job may have on any target. A run known only by name is searched in all of them."""
    return list(dict.fromkeys([JOB, *(kind for target in _all() for kind in target.jobs)]))


def kinds_beside() -> list[Kind]:
    return list(dict.fromkeys([*(kind for target in _all() for kind in target.beside), *BESIDE]))


def _all() -> list[KubernetesTarget]:
    return [target for target in all_targets() if isinstance(target, KubernetesTarget)]


def runs_of_namespace(namespace: str | None) -> dict[str, dict[str, State]]:
    """Return every run of a namespace, with the state of each of its stages."""
    cluster = connected(namespace)
    from argosy.launch.conduct import runs_in
    from argosy.launch.run_record import recorded_runs

    recorded = {run: {TRAIN.name: state} for run, state in recorded_runs(cluster).items()}
    return recorded | runs_in(cluster, job_kinds())


def connected(namespace: str | None, *, in_cluster: bool = False) -> Cluster:
    """Return the cluster kubectl would talk to, or the one this pod runs in.

    Raises:
        ArgosyError: the official client is not installed, or no cluster is configured.
    """
    if find_spec("kubernetes") is None:
        raise ArgosyError(
            "launch.missing-extra",
            "talking to Kubernetes needs its official client, which is not installed",
            fix=f"{install_extra('k8s')}; or argosy launch --dry-run -o DIR, and kubectl apply -f on each file in the order of their numbers",
        )
    from argosy.launch.api import connect

    return connect(namespace, in_cluster=in_cluster)


def _cluster_of(run: Launched) -> Cluster:
    """Connect to the cluster of a run. If none is configured, say that the run is not on this machine either."""
    try:
        return connected(run.namespace)
    except ArgosyError as error:
        if run.namespace is not None or run.directory.is_dir():
            raise
        raise not_found(run, f"there is no {run.directory} here, and {error.cause}", error.fix) from None
