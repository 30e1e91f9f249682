"""Read a run's record out of a cluster without mounting its volume: a small pod serves it, through the API server.

The pod runs `argosy.record.record_server` in the run's own image. It has the run's volume read-only, no service account, no
secrets, no GPU, a fraction of a CPU, and it ends by itself when nobody asks, at the latest after half a day. Requests go through
the API server's proxy to pods. A reader needs these rights in the namespace: `pods` (create, patch, get, delete), `pods/proxy`
(get), and `configmaps` (get) if the run is named instead of its spec; with `events` (list) it can say what a pod waits for.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from argosy.errors import ArgosyError
from argosy.launch.indexed_jobs import CONTAINER
from argosy.launch.manifests import POD, Kind
from argosy.launch.names import object_name
from argosy.launch.place import place
from argosy.launch.placement import Placement
from argosy.launch.pod import Manifest, pod_template
from argosy.launch.pod_start import wait_for_pod
from argosy.launch.runs import find
from argosy.launch.stages import Stage
from argosy.launch.target import not_found
from argosy.launch.targets.kubernetes import connected
from argosy.record.record_mirror import RecordMirror
from argosy.record.record_server import DIGEST_VARIABLE, TOKEN_HEADER

if TYPE_CHECKING:
    from argosy.launch.api import Cluster

_log = logging.getLogger(__name__)
PORT = 8266
_CONFIG_MAP = Kind("v1", "ConfigMap")
_LONGEST_S, _START_S, _UPDATE_S = 12 * 3600, 300.0, 2.0
_READ = Stage("read", lambda _: False, lambda _, run: run, on_gpus=False)
_SMALL = {"cpu": "250m", "memory": "512Mi"}


@contextmanager
def copied_record(run: str, namespace: str | None, *, all_runs: bool) -> Iterator[Path]:
    """Give a copy of the record of a run in a cluster, which is kept up to date. The arguments are those of `run_directory`."""
    with tempfile.TemporaryDirectory(prefix="argosy-cluster-") as folder:
        placed, cluster = _placed(run, namespace)
        name = placed.spec.name
        with RecordReader(cluster, placed) as reader:
            mirror = RecordMirror(reader.fetch, Path(folder), None if all_runs else name)
            if name not in mirror.update() and not all_runs:
                raise ArgosyError(
                    "run.not-found",
                    f"the volume {placed.storage.claim} has no run {name} in {placed.spec.runs_dir} yet",
                    fix="`argosy status` says how far the launch is",
                )
            with _updating(mirror):
                yield Path(folder) if all_runs else Path(folder) / name


def _placed(run: str, namespace: str | None) -> tuple[Placement, Cluster]:
    """Place a run as its launch did: by its spec, or by the spec that the launch left in the namespace."""
    if run.endswith((".yaml", ".yml")):
        space = [] if namespace is None else [f"cluster.namespace={namespace}"]
        placed = place(Path(run), space, oversized=True)
        return placed, connected(placed.cluster.namespace)
    cluster = connected(namespace)
    name = Path(run).name
    found = cluster.get(_CONFIG_MAP, f"{object_name(name)}-spec")
    if found is None:
        raise not_found(find(name, namespace), f"namespace {cluster.namespace} has no run {name}")
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
        file.write(str(found["data"]["run.yaml"]))
        file.flush()
        # The name may have been overridden when the run was launched.
        given = [f"name={name}", f"cluster.namespace={cluster.namespace}"]
        return place(Path(file.name), given, oversized=True), cluster


def reader_pod(placed: Placement, name: str, digest: str) -> Manifest:
    """Return the pod that serves the records on the run's volume."""
    body = pod_template(placed, _READ, CONTAINER)
    [container] = body["spec"]["containers"]
    mount = placed.storage.mount
    container |= {
        "command": ["python", "-m", "argosy.record.record_server"],
        "args": [placed.spec.runs_dir, "--port", str(PORT)],
        "env": [{"name": DIGEST_VARIABLE, "value": digest}, {"name": "HOME", "value": "/tmp"}],
        "ports": [{"containerPort": PORT}],
        "resources": {"requests": _SMALL, "limits": _SMALL},
        "volumeMounts": [
            {"name": "storage", "mountPath": mount, "readOnly": True},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
    }
    claim = {"claimName": placed.storage.claim, "readOnly": True}
    body["spec"] |= {
        "activeDeadlineSeconds": _LONGEST_S,
        "terminationGracePeriodSeconds": 1,
        "volumes": [
            {"name": "storage", "persistentVolumeClaim": claim},
            {"name": "tmp", "emptyDir": {"sizeLimit": "64Mi"}},
        ],
    }
    metadata = body["metadata"] | {"name": name, "namespace": placed.cluster.namespace}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": body["spec"]}


class RecordReader:
    """The reader pod of one command: started on entry, deleted on exit."""

    def __init__(self, cluster: Cluster, placed: Placement) -> None:
        self._cluster, self._placed, self._token = cluster, placed, secrets.token_urlsafe(32)
        self.pod = f"{placed.name[:40]}-read-{secrets.token_hex(4)}"

    def __enter__(self) -> RecordReader:
        _log.info(
            "starting the reader pod %s in namespace %s; it is deleted at the end", self.pod, self._cluster.namespace
        )
        self._cluster.apply(reader_pod(self._placed, self.pod, hashlib.sha256(self._token.encode()).hexdigest()))
        try:
            wait_for_pod(
                self._cluster,
                self.pod,
                "the reader pod",
                lambda text: _log.info("%s", text),
                seconds=_START_S,
                fix="the image has to hold this version of Argosy or a newer one; `argosy logs` needs no reader",
            )
        except BaseException:
            self._cluster.delete(POD, self.pod)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._cluster.delete(POD, self.pod)
        except ArgosyError as error:
            _log.warning("the reader pod %s could not be deleted and ends by itself: %s", self.pod, error.cause)

    def fetch(self, path: str, query: Sequence[tuple[str, str]]) -> bytes:
        return self._cluster.through_pod(self.pod, PORT, path, query, {TOKEN_HEADER: self._token})


@contextmanager
def _updating(mirror: RecordMirror) -> Iterator[None]:
    """Update the copy every 2 seconds in a thread. A failed update is tried again: the copy stays as it was."""
    done = threading.Event()

    def keep_updating() -> None:
        lost = False
        while not done.wait(_UPDATE_S):
            try:
                mirror.update()
                lost = False
            except (ArgosyError, OSError, ValueError) as error:
                if not lost:
                    _log.warning("the run's record could not be read, trying again: %s", error)
                lost = True

    thread = threading.Thread(target=keep_updating, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(_UPDATE_S)
