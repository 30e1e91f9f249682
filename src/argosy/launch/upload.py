"""Copy files of this machine to the shared volume of a run, through a short-lived pod that mounts the volume.

The pod runs as the run's own pods do: an ordinary user, a read-only root. `kubectl exec` carries the files as a tar archive into it, because
kubectl has the stream protocol of the cluster it is configured for. The volume is claimed first, so that it may be empty or new.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from argosy.errors import ArgosyError
from argosy.launch.api import Cluster
from argosy.launch.manifests import POD
from argosy.launch.placement import Placement
from argosy.launch.pod import Manifest, pod_template
from argosy.launch.pod_start import wait_for_pod
from argosy.launch.stages import Stage
from argosy.launch.storage import size_note, storage_objects

_LIFETIME_S = 24 * 3600
# A new Lustre file system takes 20 minutes and more.
_START_S, _GONE_S = 3600.0, 600.0
_UPLOAD = Stage("upload", lambda _: True, lambda *_: [str(_LIFETIME_S)], on_gpus=False, program="sleep")
_UNPACK = 'mkdir -p "$1" && tar --extract --directory "$1"'


def upload(placed: Placement, cluster: Cluster, source: Path, destination: str, say: Callable[[str], None]) -> None:
    """Copy a file or a directory to `destination`, a path on the volume.

    Raises:
        ArgosyError: the path is not on the volume, kubectl is missing, or the pod does not start or take the files.
    """
    if not placed.in_pods:
        raise ArgosyError(
            "config.conflict",
            f"the target {placed.cluster.target} starts no pods, and reads the files of its own machines",
            key="cluster.target",
            value=placed.cluster.target,
            fix="copy them with cp or rsync",
        )
    target = _on_volume(placed, destination)
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        raise ArgosyError("launch.missing-extra", "copying files into a pod needs kubectl", fix="install kubectl")
    for document in storage_objects(placed):
        cluster.apply(document)
    if note := size_note(placed.storage):
        say(note)
    pod = _pod(placed)
    name = pod["metadata"]["name"]
    cluster.delete(POD, name)
    _wait_until_gone(cluster, name)
    cluster.apply(pod)
    try:
        say(f"{name}: waiting for the pod that mounts {placed.storage.claim}")
        fix = f"kubectl describe pod {name} -n {cluster.namespace} says more; the claim stays, and the same command goes on waiting"
        wait_for_pod(cluster, name, f"the pod {name}", lambda text: say(f"{name} {text}"), seconds=_START_S, fix=fix)
        command = [kubectl, "exec", "--stdin", "--namespace", cluster.namespace, name, "--"]
        _send([*command, "sh", "-c", _UNPACK, "-", str(target.parent)], source, target.name)
        say(f"{source} is {target} on the volume {placed.storage.claim}")
    finally:
        cluster.delete(POD, name)


def _on_volume(placed: Placement, destination: str) -> PurePosixPath:
    mount = PurePosixPath(placed.storage.mount)
    target = mount / destination
    if ".." in target.parts or mount not in target.parents:
        raise ArgosyError(
            "launch.not-shared",
            f"{destination} is not on the shared volume, which is mounted at {mount}",
            key="DESTINATION",
            value=destination,
            fix=f"a path under {mount}, or a relative one, which starts there",
        )
    return target


def _pod(placed: Placement) -> Manifest:
    """Return a pod with the volume of the run, and without its spec, which may not be in the cluster yet."""
    template = pod_template(placed, _UPLOAD, "upload")
    spec = template["spec"]
    spec["volumes"] = [volume for volume in spec["volumes"] if volume["name"] != "spec"]
    [container] = spec["containers"]
    container["volumeMounts"] = [mount for mount in container["volumeMounts"] if mount["name"] != "spec"]
    resources = {"cpu": "1", "memory": "1Gi"}
    container["resources"] = {"requests": resources, "limits": resources}
    metadata = template["metadata"] | {"name": f"{placed.name}-upload", "namespace": placed.cluster.namespace}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def _send(command: list[str], source: Path, name: str) -> None:
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=errors)
        # The pod may stop reading; its exit code and its words say why.
        with contextlib.suppress(BrokenPipeError), tarfile.open(fileobj=process.stdin, mode="w|") as archive:
            archive.add(source, arcname=name)
        process.communicate()
        errors.seek(0)
        said, code = errors.read().decode(errors="replace").strip(), process.returncode
    if code:
        raise ArgosyError(
            "launch.refused",
            f"the files were not taken (exit code {code}): {said[-500:]}",
            fix="Permission denied: cluster.storage.take_ownership=true and argosy launch --stage storage; else see what is said",
        )


def _wait_until_gone(cluster: Cluster, name: str) -> None:
    deadline = time.monotonic() + _GONE_S
    while cluster.get(POD, name) is not None:
        if time.monotonic() > deadline:
            raise ArgosyError(
                "launch.refused",
                f"the pod {name} of an earlier copy does not go away",
                fix=f"kubectl describe pod {name} -n {cluster.namespace} says more",
            )
        time.sleep(0.5)
