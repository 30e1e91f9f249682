"""The conductor of a launch on Kubernetes. It applies each stage once the previous one has succeeded; a failure stops the chain.

The conductor follows a stage that already runs with the same settings and replaces one that has ended. It refuses the launch if a
stage runs with other settings, and leaves that stage alone. If somebody deletes the job of a stage, as `argosy stop` does, the chain ends. After an interruption, the same command resumes.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from argosy.errors import EXIT_DONE, ArgosyError
from argosy.launch.api import Cluster, Forbidden
from argosy.launch.cluster_checks import check_cluster, check_rights
from argosy.launch.manifests import EVENT, POD, Kind, Manifests, kind_of
from argosy.launch.placement import Placement
from argosy.launch.pod import RUN_LABEL, STAGE_LABEL, Manifest
from argosy.launch.run_record import FINISHED, forget_end, note_end
from argosy.launch.stages import Stage
from argosy.launch.states import pod_number, stage_state
from argosy.launch.target import Right, State

DIGEST = "argosy/digest"
EXIT_STAGE_FAILED = 3
_LOOK_EVERY_S = 15
_LAST_LINES = 15
Say = Callable[[str], None]


@dataclass
class Conductor:
    """The conductor of one launch.

    `jobs` are the kinds that the target's own job may have, and `beside` the kinds it needs besides. `rights` are those of every request that
    follows. `restarts_itself` says that something in the cluster restarts the job.
    """

    cluster: Cluster
    placed: Placement
    manifests: Manifests
    say: Say
    jobs: Sequence[Kind] = ()
    restarts_itself: bool = True
    look_every: int = _LOOK_EVERY_S
    beside: Sequence[Kind] = ()
    rights: Sequence[Right] = ()

    def run(self, only: Stage | None = None, *, follow: bool = True) -> int:
        """Run the stages and return the exit code: 0 if all succeeded, or if the last one was started and is not followed."""
        # Check now, not after hours of data preparation.
        for stage in self.manifests.stages:
            self.cluster.require(self._kind(stage))
        check_rights(self.cluster, self.rights)
        # Check this before the spec of running stages is overwritten.
        going = [stage for stage in self.manifests.stages if self._running(stage)]
        stages = list(self.manifests.stages) if only is None else [only]
        if only is None and going:
            # Earlier stages are done, and could not get the GPUs that the running stage holds.
            stages = stages[stages.index(going[-1]) :]
        shared = [*self.manifests.storage, *self.manifests.spec]
        for document in shared:
            self._require_ours(document)
        # A single stage is followed by the others sooner or later, so they are checked with it.
        starting = [stage for stage in (stages if only is None else self.manifests.stages) if stage not in going]
        check_cluster(self.cluster, self.placed, self.manifests, starting, [*self.jobs, *self.beside])
        for document in shared:
            self.cluster.apply(document)
        forget_end(self.cluster, self.placed.spec.name)
        for stage in stages:
            self._start(stage)
            if not follow and stage == stages[-1]:
                self.say(f"{stage}: started; argosy status {self._named()}")
                return EXIT_DONE
            state = self._followed(stage, stages)
            if state.phase != "done":
                self.say(f"{stage} {state}")
                self._show_end_of_log(state)
                return EXIT_STAGE_FAILED
            if stage.trains:
                note_end(self.cluster, self.placed.spec.name, FINISHED)
        return EXIT_DONE

    def _job(self, stage: Stage) -> Manifest:
        return self.manifests.stages[stage][-1]

    def _kind(self, stage: Stage) -> Kind:
        """Return the kind of a stage's job, as the target declares it if the job is the target's own."""
        kind = kind_of(self._job(stage))
        return next((declared for declared in self.jobs if declared == kind), kind)

    def _named(self) -> str:
        return f"{self.placed.spec.name} -n {self.cluster.namespace}"

    def _followed(self, stage: Stage, stages: Sequence[Stage]) -> State:
        """Follow a stage as `_follow` does. On Ctrl-C, tell the user what continues in the cluster."""
        try:
            return self._follow(stage)
        except KeyboardInterrupt:
            waiting = [later.name for later in stages[stages.index(stage) + 1 :]]
            rest = f"; {', '.join(waiting)} will not start by itself" if waiting else ""
            self.say(
                f"{stage} goes on in the cluster{rest}. The same command follows it again; argosy stop {self._named()}"
            )
            raise

    def _start(self, stage: Stage) -> None:
        if self._running(stage):
            self.say(f"{stage}: is running already")
            return
        *before, job = self.manifests.stages[stage]
        self._remove(stage)
        for document in before:
            self._require_ours(document)
            self.cluster.apply(document)
        marks = job["metadata"].get("annotations", {}) | {DIGEST: self._digest(stage)}
        self.cluster.apply(job | {"metadata": job["metadata"] | {"annotations": marks}})
        self.say(f"{stage}: {job['kind']} {job['metadata']['name']} applied")

    def _running(self, stage: Stage) -> bool:
        """Return whether a stage is running with these settings. Refuse if it runs with other settings."""
        job = self._job(stage)
        there = self.cluster.get(kind_of(job), job["metadata"]["name"])
        if there is None:
            return False
        self._require_run(there)
        if stage_state(there, [], []).over or there["metadata"].get("deletionTimestamp"):
            return False
        if there["metadata"].get("annotations", {}).get(DIGEST) == self._digest(stage):
            return True
        raise ArgosyError(
            "launch.running",
            f"{job['kind']} {job['metadata']['name']} is running with other settings",
            key="name",
            value=self.placed.spec.name,
            fix=f"argosy stop {self.placed.spec.name}: it saves; then launch again, and it goes on with the new ones",
        )

    def _digest(self, stage: Stage) -> str:
        """Return a hash of everything that decides what a stage does: its objects, and the run spec its pods read."""
        parts = [self.manifests.stages[stage], self.placed.spec.model_dump(mode="json")]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]

    def _remove(self, stage: Stage) -> None:
        """Delete an ended job to make room for its successor, and wait for its last pod. Most fields of a job are immutable."""
        kind, name = self._kind(stage), self._job(stage)["metadata"]["name"]
        if self.cluster.get(kind, name) is not None:
            self.cluster.delete(kind, name, owned_first=not _recreated(kind))
        deadline = time.monotonic() + self.placed.cluster.grace.amount + 60
        while self.cluster.get(kind, name) is not None or self._has_pods(stage):
            if time.monotonic() > deadline:
                raise ArgosyError(
                    "launch.running",
                    f"{kind.name} {name} has ended but does not go away",
                    fix="kubectl get pods: one on a dead node stays Terminating until the node is removed",
                )
            time.sleep(min(1.0, self.look_every))

    def _has_pods(self, stage: Stage) -> bool:
        return bool(self.cluster.find(POD, selector(self.placed.spec.name, stage.name)))

    def _follow(self, stage: Stage) -> State:
        """Report every change of a stage until it is over or its job is deleted, and return its final state."""
        told = ""
        restarts = 0
        while True:
            state = look(self.cluster, self.placed.spec.name, stage.name, [self._kind(stage)])
            if state.phase == "absent":
                return State("stopped", "its job was deleted", "launch it again to go on")
            if str(state) != told and not state.over:
                told = str(state)
                self.say(f"{stage} {state}")
            if state.phase == "failed" and self._may_start_again(stage, state, restarts):
                restarts += 1
                self.say(f"{stage} {state}\n{stage}: starting it again, {restarts} of {self.placed.cluster.restarts}")
                self._start(stage)
                continue
            if state.over:
                if state.phase == "done":
                    self.say(f"{stage} {state}")
                return state
            for _ in self.cluster.changes(POD, selector(self.placed.spec.name, stage.name), self.look_every):
                break
            else:
                time.sleep(min(1.0, self.look_every))

    def _may_start_again(self, stage: Stage, state: State, restarts: int) -> bool:
        """Return whether the conductor restarts a failed stage. Nothing else restarts all pods of a plain Job; a refusal is final."""
        alone = stage.trains and not self.restarts_itself
        return alone and "refused to run" not in state.text and restarts < self.placed.cluster.restarts

    def _show_end_of_log(self, state: State) -> None:
        if state.pod is not None:
            for line in self.cluster.logs(state.pod, tail=_LAST_LINES):
                self.say(f"  | {line.partition(' ')[2]}")

    def _require_ours(self, document: Manifest) -> None:
        if RUN_LABEL in document["metadata"].get("labels", {}):
            there = self.cluster.get(kind_of(document), document["metadata"]["name"])
            if there is not None:
                self._require_run(there)

    def _require_run(self, there: Manifest) -> None:
        owner = there["metadata"].get("labels", {}).get(RUN_LABEL)
        if owner != self.placed.spec.name:
            raise ArgosyError(
                "launch.running",
                f"{there['kind']} {there['metadata']['name']} is there, and belongs to {owner or 'somebody else'}",
                key="name",
                value=self.placed.spec.name,
                fix="choose another name, or another namespace",
            )


def selector(run: str, stage: str | None = None) -> dict[str, str]:
    return {RUN_LABEL: run} | ({} if stage is None else {STAGE_LABEL: stage})


def look(cluster: Cluster, run: str, stage: str, kinds: Sequence[Kind]) -> State:
    """Return the current state of a stage of a run."""
    own = _jobs(cluster, selector(run, stage), kinds)
    pods = sorted(cluster.find(POD, selector(run, stage)), key=pod_number)
    state = stage_state(own[0] if own else None, pods, [])
    if state.phase in ("waiting", "failed") and own:
        state = stage_state(own[0], pods, cluster.find(EVENT, fields="type=Warning"))
    return state


def runs_in(cluster: Cluster, kinds: Sequence[Kind]) -> dict[str, dict[str, State]]:
    """Return every run of the namespace, with the state of each of its stages."""
    found: dict[str, dict[str, State]] = {}
    for job in _jobs(cluster, {"app.kubernetes.io/managed-by": "argosy"}, kinds):
        labels = job["metadata"].get("labels", {})
        if RUN_LABEL in labels and STAGE_LABEL in labels:
            found.setdefault(labels[RUN_LABEL], {})[labels[STAGE_LABEL]] = stage_state(job, [], [])
    return found


def _jobs(cluster: Cluster, wanted: dict[str, str], kinds: Sequence[Kind], *, passing: bool = False) -> list[Manifest]:
    """Return the matching objects that no other object owns.

    Kinds that the user may not list are skipped. If that is all of them, raise `Forbidden`, unless `passing` is set.
    """
    found, refusals = [], []
    for kind in kinds:
        try:
            found += cluster.find(kind, wanted)
        except Forbidden as refusal:
            refusals.append(refusal)
    if len(refusals) == len(kinds) and not passing:
        raise refusals[0]
    return [job for job in found if not job["metadata"].get("ownerReferences")]


def objects_of(cluster: Cluster, run: str, kinds: Sequence[Kind], beside: Sequence[Kind]) -> list[Manifest]:
    """Return the run's jobs, then their companion objects."""
    others = [item for kind in beside for item in _jobs(cluster, selector(run), [kind], passing=True)]
    return [*_jobs(cluster, selector(run), kinds), *others]


def _recreated(kind: Kind) -> bool:
    """Return whether an operator would make new pods for a job that is being deleted. Such a job has to go before its pods."""
    return kind.operator is not None and kind.operator.recreates


def stop(cluster: Cluster, run: str, kinds: Sequence[Kind], beside: Sequence[Kind]) -> list[str]:
    """Delete the run's jobs, whose pods save first, and their companion objects. Data, checkpoints, claims and the spec stay."""
    stopped = []
    recreated = [kind for kind in kinds if _recreated(kind)]
    for item in objects_of(cluster, run, kinds, beside):
        if cluster.delete(kind_of(item), item["metadata"]["name"], owned_first=kind_of(item) not in recreated):
            stopped.append(f"{item['kind']} {item['metadata']['name']}")
    return stopped
