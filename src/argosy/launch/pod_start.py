"""Wait for a pod that a command starts for itself, and say what the pod waits for."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from argosy.errors import ArgosyError
from argosy.launch.manifests import EVENT, POD
from argosy.launch.pod import Manifest
from argosy.launch.states import stage_state

if TYPE_CHECKING:
    from argosy.launch.api import Cluster

# Seconds between two looks: the first, and the most after a long wait.
_FIRST_S, _LAST_S = 0.5, 5.0


def wait_for_pod(
    cluster: Cluster, name: str, what: str, say: Callable[[str], None], *, seconds: float, fix: str
) -> None:
    """Return when a pod runs. Each new reason for the wait is said once.

    Args:
        what: the pod in an error message, as `the reader pod`.
        seconds: how long to wait.
        fix: what to do if the pod does not start.

    Raises:
        ArgosyError: the pod has ended, or does not run in time.
    """
    deadline, said, pause = time.monotonic() + seconds, "", _FIRST_S
    while True:
        pod = cluster.get(POD, name) or {"metadata": {"name": name}}
        phase = pod.get("status", {}).get("phase", "Pending")
        if phase == "Running":
            return
        state = stage_state({"metadata": pod["metadata"]}, [pod], _events(cluster))
        if phase in ("Failed", "Succeeded") or time.monotonic() > deadline:
            raise ArgosyError("launch.refused", f"{what} did not start: {state}", fix=fix)
        if str(state) != said:
            said = str(state)
            say(said)
        time.sleep(pause)
        pause = min(1.2 * pause, _LAST_S)


def _events(cluster: Cluster) -> list[Manifest]:
    """Return the events of the namespace. They only explain: who may not read them waits without a reason."""
    try:
        return cluster.find(EVENT)
    except ArgosyError:
        return []
