"""The state of a stage in plain words, from its job, pods and events on Kubernetes.

A few causes stop most launches: an image that cannot be pulled, no room on any node, a quota, an unbound claim, too little memory,
an eviction, a sandbox that the node cannot make. The state names the cause and the fix. Any other warning about a pod that does not start is
repeated as Kubernetes says it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from argosy.errors import EXIT_REFUSED, EXIT_RESUMABLE
from argosy.launch.pod import Manifest
from argosy.launch.target import State

# The weight of the trouble of a pod whose volume is not there yet.
_WAITS_FOR_VOLUME = 85
_DONE = ("Complete", "Completed", "Succeeded", "SuccessCriteriaMet")
_SANDBOX_FIX = (
    "the node's network plugin or the pause image is missing: kubectl get pods -n kube-system -o wide shows the plugin of that node; "
    "kubectl cordon it, and the pod starts elsewhere"
)
_NO_PROGRAM_FIX = "cluster.image has to hold that program: the image of docker/Dockerfile, on HyperPod with `operator: sagemaker` docker/Dockerfile.efa with HYPERPOD_AGENT"
# Events of a claim whose volume is being made.
_PROVISIONING = ("Provisioning", "ExternalProvisioning", "WaitForFirstConsumer", "WaitForPodScheduled")
_PROVISIONING_FIX = "wait: a new Lustre file system takes 20 minutes and more; kubectl describe pvc says more"
_PULL = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable")


def stage_state(job: Manifest | None, pods: Sequence[Manifest], events: Sequence[Manifest]) -> State:
    if job is None:
        return State("absent", "not started")
    condition = {c["type"]: c for c in job.get("status", {}).get("conditions") or [] if c.get("status") == "True"}
    if any(kind in condition for kind in _DONE):
        return State("done", _runtime(job))
    # Pods that save and end may make the job fail meanwhile, which is no reason to start it again.
    if job["metadata"].get("deletionTimestamp"):
        return State("waiting", "its job is being deleted, and its pods save first")
    found = [*_pod_troubles(pods), *_event_troubles(job, pods, events)]
    troubles = sorted(found, key=lambda trouble: -trouble.weight)
    if "Failed" in condition:
        said = condition["Failed"]
        reason = f"{said.get('reason', '')}: {said.get('message', '')}".strip(": ")
        if troubles:
            first = troubles[0]
            return State("failed", first.text, first.fix, first.pod)
        return State("failed", reason or "the job failed", "argosy logs shows the end of its log")
    if "Suspended" in condition or job.get("spec", {}).get("suspend"):
        queue = job["metadata"].get("labels", {}).get("kueue.x-k8s.io/queue-name")
        where = f"in the Kueue queue {queue}" if queue else "suspended"
        return State("waiting", f"{where}, not admitted yet", "kubectl get workloads says what it waits for")
    running = [pod for pod in pods if _phase(pod) == "Running"]
    restarts = _restarts(job, pods)
    again = f", restarted {restarts} times" if restarts > 1 else ", restarted once" if restarts else ""
    if troubles:
        first = troubles[0]
        return State(
            "running" if len(running) == len(pods) and pods else "waiting", first.text + again, first.fix, first.pod
        )
    if pods and len(running) == len(pods):
        return State("running", f"{len(pods)} pod{'s' if len(pods) > 1 else ''}{again}", pod=_first(pods))
    if not pods:
        return State("waiting", f"no pod yet{again}")
    counts = ", ".join(
        f"{sum(_phase(pod) == phase for pod in pods)} {phase.lower()}" for phase in sorted({_phase(p) for p in pods})
    )
    return State("waiting", f"{counts} of {len(pods)} pods{again}", pod=_first(pods))


@dataclass(frozen=True)
class Trouble:
    # The trouble with the largest weight explains most, and is the one reported.
    weight: int
    text: str
    fix: str
    pod: str | None = None


def _pod_troubles(pods: Iterable[Manifest]) -> list[Trouble]:
    return [trouble for pod in pods for trouble in _troubles_of(pod)]


def _troubles_of(pod: Manifest) -> Iterator[Trouble]:
    name, status = pod["metadata"]["name"], pod.get("status", {})
    node = pod.get("spec", {}).get("nodeName")
    on = f"{name} on {node}" if node else name
    if status.get("reason") == "Evicted":
        yield Trouble(
            80, f"{on} was evicted: {status.get('message', '')}", "ask for less, or for nodes with more", name
        )
    for condition in status.get("conditions") or []:
        if condition.get("type") == "DisruptionTarget" and condition.get("status") == "True":
            said = f"{condition.get('reason', '')}: {condition.get('message', '')}".strip(": ")
            yield Trouble(
                50, f"{on} was disrupted ({said})", "nothing: the run goes on elsewhere from its last checkpoint", name
            )
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            yield _unschedulable(name, str(condition.get("message", "")))
    for container in [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]:
        yield from _container_troubles(on, name, pod, container)


def _container_troubles(on: str, name: str, pod: Manifest, container: Manifest) -> Iterator[Trouble]:
    waiting = container.get("state", {}).get("waiting") or {}
    reason, said = waiting.get("reason", ""), waiting.get("message", "")
    if reason in _PULL:
        text = f"the image {container.get('image', '')} cannot be pulled: {said or reason}"
        yield Trouble(
            90,
            text,
            "check cluster.image; cluster.pull_secrets for a private registry, cluster.pull_policy=IfNotPresent for an image loaded on the nodes",
            name,
        )
    elif reason in ("CreateContainerConfigError", "CreateContainerError", "RunContainerError"):
        fix = _NO_PROGRAM_FIX if _lacks_program(said) else "make the Secret or ConfigMap it names"
        yield Trouble(90, f"{on} cannot start: {said or reason}", fix, name)
    for when in ("state", "lastState"):
        ended = container.get(when, {}).get("terminated") or {}
        if not ended or ended.get("exitCode") == 0:
            continue
        code = ended.get("exitCode")
        # A container that was restarted since explains less.
        now = 70 if when == "state" else 30
        if ended.get("reason") == "OOMKilled":
            limit = _memory_limit(pod)
            text = f"{on} ran out of memory and was killed: its limit is {limit}, /dev/shm included"
            yield Trouble(now + 25, text, "cluster.memory=…, or a smaller cluster.shm", name)
        elif _lacks_program(ended.get("message", "")):
            yield Trouble(now + 20, f"{on} cannot start: {ended['message']}", _NO_PROGRAM_FIX, name)
        elif code == EXIT_REFUSED:
            yield Trouble(
                now + 20, f"{on} refused to run (exit code {code}): its log says why", "see the log's last lines", name
            )
        elif code == EXIT_RESUMABLE:
            yield Trouble(
                now - 10, f"{on} was interrupted and can go on (exit code {code})", "launch again to go on", name
            )
        else:
            how = (
                f"was ended by signal {code - 128}"
                if isinstance(code, int) and code > 128
                else f"ended with exit code {code}"
            )
            yield Trouble(now, f"{on} {how}", "see the log's last lines", name)


def _lacks_program(message: str) -> bool:
    return "executable file not found" in message


def _unschedulable(name: str, message: str) -> Trouble:
    if "persistentvolumeclaim" in message.lower():
        fix = "check that cluster.storage.claim exists in the namespace and is Bound: kubectl describe pvc"
        return Trouble(_WAITS_FOR_VOLUME, f"{name} waits for its volume: {message}", fix, name)
    fix = "fewer nodes, another instance, or wait; node labels and taints are cluster.node_selector and cluster.tolerations"
    return Trouble(60, f"no node has room for {name}: {message}", fix, name)


def _event_troubles(job: Manifest, pods: Sequence[Manifest], events: Iterable[Manifest]) -> list[Trouble]:
    """Return the troubles that Warning events report about the run's own objects."""
    mine = {job["metadata"]["name"], *(pod["metadata"]["name"] for pod in pods)}
    claims = _claims(pods)
    # An event outlives its cause by an hour, and a pod that is scheduled has its volume.
    unbound = _claims(pod for pod in pods if any(trouble.weight == _WAITS_FOR_VOLUME for trouble in _troubles_of(pod)))
    pending = {
        pod["metadata"]["name"]: pod.get("spec", {}).get("nodeName", "") for pod in pods if _phase(pod) == "Pending"
    }
    found = []
    for event in events:
        about, said, reason = (
            event.get("involvedObject", {}).get("name", ""),
            event.get("message", ""),
            event.get("reason"),
        )
        if about in unbound and reason in _PROVISIONING:
            found.append(Trouble(86, f"the claim {about} is not bound yet: {said}", _PROVISIONING_FIX))
        if event.get("type") != "Warning":
            continue
        ours = about in mine or any(about.startswith(f"{name}-") for name in mine)
        if ours and "exceeded quota" in said:
            found.append(Trouble(85, f"the namespace's quota is used up: {said}", "free some of it, or ask for less"))
        elif ours and reason in ("FailedMount", "FailedAttachVolume"):
            found.append(
                Trouble(75, f"a volume of {about} cannot be mounted: {said}", "check the claim and its driver")
            )
        elif about in claims and reason in ("ProvisioningFailed", "FailedBinding"):
            fix = "check cluster.storage: class, size, and the rights of its driver"
            found.append(Trouble(88, f"the claim {about} is not bound: {said}", fix))
        elif about in pending and reason == "FailedCreatePodSandBox":
            text = f"the node {pending[about]} cannot make a sandbox for {about}: {said}"
            found.append(Trouble(77, text, _SANDBOX_FIX, about))
        elif (reason == "FailedCreate" and ours) or (about in pending and reason != "FailedScheduling"):
            # That a pod is not scheduled is one of its conditions, and such an event may be older than the schedule.
            fix = f"kubectl get events --field-selector involvedObject.name={about} says more"
            found.append(Trouble(40, f"{about}: {reason}: {said}", fix, about if about in pending else None))
    return found


def _claims(pods: Iterable[Manifest]) -> set[str]:
    return {
        volume["persistentVolumeClaim"]["claimName"]
        for pod in pods
        for volume in pod.get("spec", {}).get("volumes") or []
        if "persistentVolumeClaim" in volume
    }


def _restarts(job: Manifest, pods: Sequence[Manifest]) -> int:
    whole = int(job.get("status", {}).get("restarts") or 0)
    single = [
        int(c.get("restartCount") or 0) for pod in pods for c in pod.get("status", {}).get("containerStatuses") or []
    ]
    return max([whole, *single])


def _phase(pod: Manifest) -> str:
    return str(pod.get("status", {}).get("phase", "Pending"))


def _first(pods: Sequence[Manifest]) -> str:
    return str(pods[0]["metadata"]["name"])


def _memory_limit(pod: Manifest) -> Any:
    return pod["spec"]["containers"][0].get("resources", {}).get("limits", {}).get("memory", "unknown")


def _runtime(job: Manifest) -> str:
    status = job.get("status", {})
    return f"finished at {status['completionTime']}" if status.get("completionTime") else "finished"


def pod_number(pod: Manifest) -> int:
    """Return the node index of a pod in its run, from the labels of its operator or from its name."""
    metadata = pod["metadata"]
    marks = {**metadata.get("annotations", {}), **metadata.get("labels", {})}
    index = marks.get("batch.kubernetes.io/job-completion-index")
    if index is None and "training.kubeflow.org/replica-index" in marks:
        worker = marks.get("training.kubeflow.org/replica-type", "").lower() == "worker"
        return int(marks["training.kubeflow.org/replica-index"]) + int(worker)
    if index is None:
        index = next((part for part in reversed(metadata["name"].split("-")) if part.isdigit()), "0")
    return int(index)
