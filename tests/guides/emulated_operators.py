"""Operators for the emulated API server: every job they find has pods, logs two lines, and succeeds."""

from __future__ import annotations

import contextlib
import threading
from types import TracebackType

from api_server import ApiServer

# The condition with which each operator marks a job as done.
DONE = {
    "jobs": "Complete",
    "jobsets": "Completed",
    "pytorchjobs": "Succeeded",
    "trainjobs": "Complete",
    "hyperpodpytorchjobs": "Completed",
}


class EmulatedOperators:
    """A thread that plays all operators while the block of `with` runs."""

    def __init__(self, server: ApiServer) -> None:
        self.server, self.finished = server, list[str]()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> EmulatedOperators:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._ended.wait(0.05):
            for (plural, name), job in list(self.server.objects.items()):
                if plural in DONE and "status" not in job:
                    # A command may delete the job meanwhile.
                    with contextlib.suppress(KeyError):
                        self._run(plural, name)
                elif plural == "pods" and job["status"] == {"phase": "Pending"}:
                    # A pod of `argosy cp`, which no job owns.
                    self.server.put("pods", job | {"status": {"phase": "Running"}})

    def _run(self, plural: str, name: str) -> None:
        labels = self.server.objects[plural, name]["metadata"]["labels"]
        run, stage = labels["argosy/run"], labels["argosy/stage"]
        for index in range(2):
            pod = f"{name}-{index}"
            self.server.logs[pod] = [
                "2026-01-01T00:00:00Z started",
                "2026-01-01T00:00:01Z step 10/10 | loss 1.0000 | ETA 0s",
            ]
            self.server.pod(pod, run=run, stage=stage, index=index, phase="Succeeded")
        self.finished.append(name)
        self.server.condition(plural, name, DONE[plural])
        # The job controller removes its finalizer from pods once it has counted them: who watches pods looks at the job again.
        for index in range(2):
            self.server.put("pods", self.server.objects["pods", f"{name}-{index}"])
