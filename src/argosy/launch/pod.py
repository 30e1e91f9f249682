"""The pod template that all Kubernetes targets share.

A pod runs as an unprivileged user, with requests equal to limits. Its /dev/shm has a size limit and counts as memory. Caches and
dumps go to node-local scratch, the run spec is a mounted file, and secrets are references. Targets add only what their operator needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from argosy.config.cluster import ClusterSpec
from argosy.launch.fabric import DEVICE_IN_POD, fabric_environment
from argosy.launch.placement import Placement
from argosy.launch.stages import SPEC_DIRECTORY, Stage
from argosy.launch.topology import FILE_NAME, topology_file

Manifest = dict[str, Any]
SCRATCH = "/scratch"
PORT = 29500
# A PodMonitor finds the port by this name.
METRICS_PORT = "metrics"
RUN_LABEL = "argosy/run"
STAGE_LABEL = "argosy/stage"
# The annotation with the number of ranks in a pod. It tells which pod has the log of a rank.
RANKS = "argosy/ranks"

# NVIDIA's GPU feature discovery sets this label on nodes with GPUs.
_HAS_GPUS = "nvidia.com/gpu.present"
# Nodes of one NVLink domain share the value of this label.
_CLIQUE = "nvidia.com/gpu.clique"


def labels(placed: Placement, stage: Stage | None = None) -> dict[str, str]:
    """Return the labels by which `argosy status`, `logs`, `stop` and `ls` find the objects of a run."""
    own = {"app.kubernetes.io/managed-by": "argosy", RUN_LABEL: placed.spec.name}
    return own if stage is None else own | {STAGE_LABEL: stage.name}


def job_metadata(placed: Placement, stage: Stage, name: str) -> Manifest:
    """Return the metadata of a stage's job. Kueue reads queue and priority there, not on pods."""
    cluster, marks = placed.cluster, labels(placed, stage)
    if cluster.queue is not None:
        marks["kueue.x-k8s.io/queue-name"] = cluster.queue
        if cluster.priority is not None:
            marks["kueue.x-k8s.io/priority-class"] = cluster.priority
    return {"name": name, "namespace": cluster.namespace, "labels": marks}


def pod_template(placed: Placement, stage: Stage, container: str, env: Mapping[str, str] | None = None) -> Manifest:
    """Return the pod template of a stage. `env` has the target's variables: ranks, and the address of the first one."""
    on_gpus = stage.on_gpus
    cluster = placed.cluster
    spec: Manifest = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": int(cluster.grace.amount),
        "securityContext": _pod_security(cluster, as_root=stage.as_root),
        "containers": [_container(placed, stage, container, env or {})],
        "volumes": _volumes(placed, on_gpus=on_gpus),
    }
    if cluster.pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in cluster.pull_secrets]
    if cluster.queue is None and cluster.priority is not None:
        spec["priorityClassName"] = cluster.priority
    spec |= _placing(placed, stage) if on_gpus else _placing_workers(cluster)
    metadata: Manifest = {"labels": labels(placed, stage)}
    if on_gpus:
        metadata["annotations"] = {RANKS: str(placed.ranks)}
    if cluster.queue is not None and cluster.topology is not None and on_gpus:
        kind = "required" if cluster.topology_required else "preferred"
        metadata["annotations"][f"kueue.x-k8s.io/podset-{kind}-topology"] = cluster.topology
    return {"metadata": metadata, "spec": spec}


def _container(placed: Placement, stage: Stage, name: str, env: Mapping[str, str]) -> Manifest:
    cluster, on_gpus = placed.cluster, stage.on_gpus
    resources = _resources(placed) if on_gpus else {"cpu": str(cluster.data.cpus), "memory": cluster.data.memory}
    body: Manifest = {
        "name": name,
        "image": cluster.image,
        "imagePullPolicy": _pull_policy(cluster),
        "command": [stage.program],
        "args": literal(stage.command(placed)),
        "workingDir": placed.storage.mount,
        "env": _environment(placed, env, on_gpus=on_gpus),
        "resources": {"requests": resources, "limits": resources},
        "securityContext": _container_security(placed, stage),
        "volumeMounts": [
            {"name": "spec", "mountPath": SPEC_DIRECTORY, "readOnly": True},
            {"name": "storage", "mountPath": placed.storage.mount},
            {"name": "scratch", "mountPath": SCRATCH},
            {"name": "tmp", "mountPath": "/tmp"},
            *([{"name": "shm", "mountPath": "/dev/shm"}] if on_gpus else []),
        ],
    }
    listener = placed.spec.log.sinks.prometheus
    if stage.trains and listener is not None:
        body["ports"] = [{"name": METRICS_PORT, "containerPort": int(listener.rpartition(":")[2])}]
    if on_gpus and _shares_nvlink(placed):
        body["resources"] = body["resources"] | {"claims": [{"name": "nvlink-domain"}]}
    return body


def _pull_policy(cluster: ClusterSpec) -> str:
    """Return when a node pulls the image. A digest is immutable, and a tag may have moved.

    buildah and podman name an image `localhost/…` that no registry has: such an image is on the nodes already, and a pull could only fail.
    """
    if cluster.pull_policy != "auto":
        return cluster.pull_policy
    image = str(cluster.image)
    return "IfNotPresent" if "@" in image or image.startswith("localhost/") else "Always"


def literal(words: Sequence[str]) -> list[str]:
    """Return the arguments escaped. Kubernetes would replace `$(NAME)` with a variable, which may be a secret."""
    return [word.replace("$(", "$$(") for word in words]


def _resources(placed: Placement) -> dict[str, str]:
    wanted = {"cpu": str(placed.cpus), "memory": f"{placed.memory_gib}Gi"}
    if placed.gpus:
        wanted["nvidia.com/gpu"] = str(placed.gpus)
    if placed.nics is not None:
        wanted[placed.nics[0]] = str(placed.nics[1])
    if placed.cluster.huge_pages is not None:
        wanted["hugepages-2Mi"] = placed.cluster.huge_pages
    return wanted


def training_environment(placed: Placement, device: str = DEVICE_IN_POD) -> dict[str, str]:
    """Return the environment of ranks, for Slurm and pods alike. `device` is the first InfiniBand device as a rank sees it."""
    debug = {"NCCL_DEBUG": "WARN"} if placed.gpus else {}
    return debug | dict(fabric_environment(placed.cluster, placed.instance, placed.fabric, device))


def _environment(placed: Placement, env: Mapping[str, str], *, on_gpus: bool) -> list[Manifest]:
    """Return the environment of a container: Argosy's variables, overridden by the user's, then by the target's."""
    variables = {
        "HOME": SCRATCH,
        "HF_HOME": f"{SCRATCH}/huggingface",
        "PYTHONUNBUFFERED": "1",
        "TORCHINDUCTOR_CACHE_DIR": f"{SCRATCH}/inductor",
        "TRITON_CACHE_DIR": f"{SCRATCH}/triton",
    }
    if on_gpus:
        variables |= training_environment(placed)
    if on_gpus and topology_file(placed.cluster, placed.instance, placed.fabric) is not None:
        variables["NCCL_TOPO_FILE"] = f"{SPEC_DIRECTORY}/{FILE_NAME}"
        # Without the file, every card would have to count as near.
        variables.pop("NCCL_NET_GDR_LEVEL", None)
    variables |= placed.cluster.env
    variables |= env
    secrets = placed.cluster.secrets
    plain = [{"name": name, "value": value} for name, value in variables.items() if name not in secrets]
    secret = []
    for name, reference in secrets.items():
        secret_name, _, key = reference.partition("/")
        secret.append({"name": name, "valueFrom": {"secretKeyRef": {"name": secret_name, "key": key}}})
    return [*plain, *secret]


def _volumes(placed: Placement, *, on_gpus: bool) -> list[Manifest]:
    cluster = placed.cluster
    scratch: Manifest = {"emptyDir": {"sizeLimit": cluster.scratch}}
    if cluster.local_disk is not None and on_gpus:
        scratch = {"hostPath": {"path": cluster.local_disk, "type": "Directory"}}
    shm = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{placed.shm_gib}Gi"}}
    return [
        {"name": "spec", "configMap": {"name": f"{placed.name}-spec"}},
        {"name": "storage", "persistentVolumeClaim": {"claimName": placed.storage.claim}},
        {"name": "scratch", **scratch},
        {"name": "tmp", "emptyDir": {"sizeLimit": "10Gi"}},
        *([shm] if on_gpus else []),
    ]


def _pod_security(cluster: ClusterSpec, *, as_root: bool) -> Manifest:
    if as_root:
        return {"runAsUser": 0, "runAsGroup": 0, "seccompProfile": {"type": "RuntimeDefault"}}
    user = cluster.user
    return {
        "runAsNonRoot": user != 0,
        "runAsUser": user,
        "runAsGroup": user,
        "fsGroup": user,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def _container_security(placed: Placement, stage: Stage) -> Manifest:
    if placed.cluster.privileged and stage.on_gpus:
        return {"privileged": True}
    capabilities: Manifest = {"drop": ["ALL"]}
    if stage.as_root:
        capabilities["add"] = ["CHOWN"]
    return {"allowPrivilegeEscalation": False, "capabilities": capabilities, "readOnlyRootFilesystem": True}


def _placing(placed: Placement, stage: Stage) -> Manifest:
    """Return the scheduling fields of a pod: nodes of the right type, one pod per node, close to each other."""
    cluster = placed.cluster
    selector = dict(cluster.node_selector)
    prefix = cluster.cloud_facts.instance_prefix
    if cluster.instance is not None and prefix is not None:
        # Run specs may name an instance as SageMaker does, on any cloud.
        bare = cluster.instance.removeprefix("ml.")
        selector = {"node.kubernetes.io/instance-type": prefix + bare} | selector
    placing: Manifest = {"nodeSelector": selector} if selector else {}
    placing["tolerations"] = _tolerations(cluster.tolerations)
    placing["affinity"] = _affinity(placed, stage)
    if cluster.host_network:
        placing |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    if cluster.gang != "off":
        placing["schedulerName"] = "volcano" if cluster.gang == "volcano" else "scheduler-plugins-scheduler"
    if _shares_nvlink(placed):
        placing["resourceClaims"] = [
            {"name": "nvlink-domain", "resourceClaimTemplateName": f"{placed.name}-nvlink-domain"}
        ]
    return {key: value for key, value in placing.items() if value}


def _placing_workers(cluster: ClusterSpec) -> Manifest:
    """Return the scheduling fields of data pods. GPU nodes serve too, for clusters that have no others, but others come first."""
    workers = cluster.data
    without_gpus = {"key": _HAS_GPUS, "operator": "DoesNotExist"}
    preferred = {"weight": 100, "preference": {"matchExpressions": [without_gpus]}}
    placing: Manifest = {
        "nodeSelector": dict(workers.node_selector),
        "tolerations": _tolerations(cluster.tolerations if workers.tolerations is None else workers.tolerations),
        "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [preferred]}},
    }
    return {key: value for key, value in placing.items() if value}


def _tolerations(keys: Sequence[str]) -> list[Manifest]:
    return [{"key": key, "operator": "Exists"} for key in keys]


def _affinity(placed: Placement, stage: Stage) -> Manifest:
    cluster = placed.cluster
    mates = {"labelSelector": {"matchLabels": labels(placed, stage)}}
    affinity: Manifest = {}
    if cluster.nodes > 1 and placed.gpus:
        apart = [mates | {"topologyKey": "kubernetes.io/hostname"}]
        affinity["podAntiAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": apart}
    near = _near(placed)
    # With Kueue, an annotation asks for the topology instead.
    if near is not None and cluster.queue is None and cluster.nodes > 1:
        together = mates | {"topologyKey": near}
        if cluster.topology_required or near == _CLIQUE:
            affinity["podAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": [together]}
        else:
            preferred = {"weight": 100, "podAffinityTerm": together}
            affinity["podAffinity"] = {"preferredDuringSchedulingIgnoredDuringExecution": [preferred]}
    if cluster.cloud_facts.healthy_label is not None:
        label, value = cluster.cloud_facts.healthy_label
        healthy = {"key": label, "operator": "In", "values": [value]}
        terms = {"nodeSelectorTerms": [{"matchExpressions": [healthy]}]}
        affinity["nodeAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": terms}
    return affinity


def _near(placed: Placement) -> str | None:
    if placed.cluster.topology is not None:
        return placed.cluster.topology
    if _shares_nvlink(placed):
        return _CLIQUE
    return placed.cluster.cloud_facts.near_label if placed.cluster.nodes > 1 and placed.gpus else None


def _shares_nvlink(placed: Placement) -> bool:
    """Return whether the nodes form one rack-wide NVLink domain. They then need a claim on the channel to each other's memory."""
    instance = placed.instance
    return instance is not None and 1 < placed.cluster.nodes <= instance.nvlink_nodes and placed.gpus > 0


def nvlink_domain(placed: Placement) -> list[Manifest]:
    if not _shares_nvlink(placed):
        return []
    name = f"{placed.name}-nvlink-domain"
    return [
        {
            "apiVersion": "resource.nvidia.com/v1beta1",
            "kind": "ComputeDomain",
            "metadata": {"name": name, "namespace": placed.cluster.namespace, "labels": labels(placed)},
            "spec": {"numNodes": placed.cluster.nodes, "channel": {"resourceClaimTemplate": {"name": name}}},
        }
    ]
