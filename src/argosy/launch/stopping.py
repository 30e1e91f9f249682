"""Ending a run on Kubernetes: its jobs are deleted, and the log of its first pod is read until the pod has saved and ended.

A deleted job stays until its last pod is gone, some seconds after the log has ended. Only then `argosy status` can say that the run is stopped,
and a launch can make its objects anew.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Sequence

from argosy.console.training_lines import STOPPED_LINE
from argosy.launch.api import Cluster
from argosy.launch.conduct import objects_of, selector, stop
from argosy.launch.manifests import POD, Kind
from argosy.launch.pod import Manifest
from argosy.launch.run_record import note_end
from argosy.launch.stages import TRAIN
from argosy.launch.states import pod_number

# How long pods may take to vanish after their grace period, and to let their log be read before it begins.
_SLACK_S = 60.0
_OPEN_S = 5.0
_LOOK_EVERY_S = 0.5


def stop_and_watch(cluster: Cluster, run: str, kinds: Sequence[Kind], beside: Sequence[Kind]) -> list[str]:
    """Delete the run's jobs, wait until training has saved and the jobs are gone, and keep what training said.

    Returns:
        The names of what was deleted.
    """
    pods = sorted(cluster.find(POD, selector(run, TRAIN.name)), key=pod_number)
    training = [pod for pod in pods if pod.get("status", {}).get("phase") == "Running"]
    words = _LastWords(cluster, training[0]) if training else None
    if words is not None:
        words.start()
        words.opened.wait(_OPEN_S)
    stopped = stop(cluster, run, kinds, beside)
    if stopped:
        if words is not None:
            words.join(words.patience_s)
        note_end(
            cluster, run, "nothing was training" if words is None else words.found or "it did not say that it saved"
        )
        _wait_until_gone(cluster, run, kinds, beside, _SLACK_S)
    return stopped


def _wait_until_gone(cluster: Cluster, run: str, kinds: Sequence[Kind], beside: Sequence[Kind], seconds: float) -> None:
    """Return when the cluster has none of the run's objects and training pods left, or after `seconds`: a pod of a lost node stays."""
    deadline = time.monotonic() + seconds
    while objects_of(cluster, run, kinds, beside) or cluster.find(POD, selector(run, TRAIN.name)):
        if time.monotonic() > deadline:
            return
        time.sleep(_LOOK_EVERY_S)


class _LastWords(threading.Thread):
    """Reads the log of the first pod to its end. `found` is what the pod said of its last save."""

    def __init__(self, cluster: Cluster, pod: Manifest) -> None:
        super().__init__(daemon=True)
        self._cluster, self._pod = cluster, pod["metadata"]["name"]
        self.patience_s = float(pod.get("spec", {}).get("terminationGracePeriodSeconds", 600)) + _SLACK_S
        self.opened = threading.Event()
        self.found = ""

    def run(self) -> None:
        deadline = time.monotonic() + self.patience_s
        while not self.found and time.monotonic() < deadline:
            for line in self._cluster.logs(self._pod, follow=True, tail=20):
                self.opened.set()
                said = re.search(STOPPED_LINE, line)
                if said is not None:
                    self.found = f"saved at step {said[1]} of {said[2]}"
            # The connection may be lost before the pod is.
            if not self._cluster.find(POD, fields=f"metadata.name={self._pod}"):
                break
            time.sleep(0.2)
        self.opened.set()
