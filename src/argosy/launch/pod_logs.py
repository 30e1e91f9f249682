"""The logs of ranks on Kubernetes: the pod that holds a rank, its lines as they arrive, and the training progress they show."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence

from argosy.console.training_lines import STEP_LINE
from argosy.launch.api import Cluster
from argosy.launch.conduct import look, runs_in, selector
from argosy.launch.manifests import POD, Kind
from argosy.launch.pod import RANKS, STAGE_LABEL, Manifest
from argosy.launch.stages import STAGES, TRAIN
from argosy.launch.states import pod_number
from argosy.launch.target import Launched, not_found

_TAIL = 200


def progress_in_log(cluster: Cluster, run: str) -> str | None:
    """Return the newest step line in the log of the first pod, or None."""
    first = [pod["metadata"]["name"] for pod in _pods(cluster, run) if pod_number(pod) == 0][-1:]
    lines = [line for pod in first for line in cluster.logs(pod, tail=_TAIL)]
    told = [line for line in lines if re.search(STEP_LINE, line)]
    return None if not told else told[-1].partition(" ")[2].strip()


def read_pod_log(
    cluster: Cluster, run: Launched, kinds: Sequence[Kind], *, rank: int, follow: bool, tail: int | None
) -> Iterator[str]:
    """Yield the log lines of the pod that holds a rank. With `follow`, reconnect as often as needed until training has ended."""
    since, seen = None, set[str]()
    while True:
        # Ask before reading, because training may end while we read.
        last = not follow or look(cluster, run.name, TRAIN.name, kinds).over
        if not last and not _pods(cluster, run.name) and run.name in runs_in(cluster, kinds):
            # The run waits for nodes or in a queue; `argosy status` says which.
            time.sleep(1.0)
            continue
        pod = _pod_of(run, cluster, rank)
        for line in cluster.logs(pod, follow=follow, tail=tail if since is None else None, since=since):
            stamp, _, text = line.partition(" ")
            if stamp != since:
                since, seen = stamp, set()
            # After a reconnect, the lines of the last second are sent again.
            if text not in seen:
                seen.add(text)
                yield text
        if last:
            return
        time.sleep(1.0)


def _pod_of(run: Launched, cluster: Cluster, rank: int) -> str:
    """Return the name of the newest pod that holds a rank. An annotation on each pod has the number of its ranks."""
    pods = _pods(cluster, run.name)
    if not pods:
        raise not_found(run, f"namespace {cluster.namespace} has no pod of {run.name}")
    by_number = {pod_number(pod): pod for pod in pods}
    ranks = int(pods[0]["metadata"].get("annotations", {}).get(RANKS, 1))
    pod = by_number.get(rank // ranks)
    if pod is None:
        held = f"{len(by_number)} pod{'s' if len(by_number) > 1 else ''} of {ranks} rank{'s' if ranks > 1 else ''}"
        raise not_found(run, f"{run.name} has {held}, and none holds rank {rank}")
    return str(pod["metadata"]["name"])


def _pods(cluster: Cluster, run: str) -> list[Manifest]:
    """Return the pods of the last stage that has any, sorted by pod number, then by age with the newest last."""
    pods = cluster.find(POD, selector(run))
    for stage in reversed(STAGES):
        mine = [pod for pod in pods if pod["metadata"].get("labels", {}).get(STAGE_LABEL) == stage]
        if mine:
            return sorted(mine, key=_newest_by_number)
    return []


def _newest_by_number(pod: Manifest) -> tuple[int, str]:
    return pod_number(pod), str(pod["metadata"].get("creationTimestamp", ""))
