"""What a cluster keeps of a run that has no job any more: its spec, as a ConfigMap, with a note of how the run ended.

A deleted job takes its pods and their logs with it. The ConfigMap stays, so `argosy status` can say that a run was stopped, and where it saved.
"""

from __future__ import annotations

import time

from argosy.launch.api import Cluster, Forbidden
from argosy.launch.manifests import CONFIG_MAP
from argosy.launch.names import object_name
from argosy.launch.pod import RUN_LABEL, Manifest
from argosy.launch.target import State

# The annotation of the ConfigMap: what the run said last, and when.
ENDED = "argosy/ended"
FINISHED = "finished"
_GO_ON = "launch it again to go on from its newest checkpoint"


def note_end(cluster: Cluster, run: str, said: str) -> None:
    """Keep how a run ended, with the time."""
    if recorded_spec(cluster, run) is not None:
        now = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
        cluster.annotate(CONFIG_MAP, _spec_name(run), {ENDED: f"{said} ({now})"})


def forget_end(cluster: Cluster, run: str) -> None:
    """Remove the note of an earlier end, because the run starts again."""
    spec = recorded_spec(cluster, run)
    if spec is not None and ENDED in spec["metadata"].get("annotations", {}):
        cluster.annotate(CONFIG_MAP, _spec_name(run), {ENDED: None})


def recorded_spec(cluster: Cluster, run: str) -> Manifest | None:
    """Return the ConfigMap with the spec of a run; None if the run was never launched here."""
    spec = cluster.get(CONFIG_MAP, _spec_name(run))
    return spec if spec is not None and spec["metadata"].get("labels", {}).get(RUN_LABEL) == run else None


def recorded_state(spec: Manifest) -> State:
    """Return the state of a run without a job, from the ConfigMap with its spec."""
    said = spec["metadata"].get("annotations", {}).get(ENDED, "no job of it is left")
    return State("done", said) if said.startswith(FINISHED) else State("stopped", said, _GO_ON)


def recorded_runs(cluster: Cluster) -> dict[str, State]:
    """Return every run of the namespace that has a spec, with its state if it has no job. Who may not list ConfigMaps sees none."""
    try:
        specs = cluster.find(CONFIG_MAP, {"app.kubernetes.io/managed-by": "argosy"})
    except Forbidden:
        return {}
    named = {spec["metadata"].get("labels", {}).get(RUN_LABEL): spec for spec in specs}
    return {run: recorded_state(spec) for run, spec in named.items() if run is not None}


def _spec_name(run: str) -> str:
    return f"{object_name(run)}-spec"
