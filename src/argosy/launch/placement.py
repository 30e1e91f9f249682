"""A run placed on a cluster: what every target renders from, with every refusal made before a file is written.

Sizes come from the instance's facts unless the spec overrides them. A layout the spec leaves to Argosy is chosen by the
planner for the GPUs there are, so that the same run with another number of nodes goes on with another layout, and the same
batch and order of samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from argosy.config.cluster import ClusterSpec, StorageSpec
from argosy.config.layout import check_world, describe_layout
from argosy.config.resolve import Resolved, resolve
from argosy.config.schema import RunSpec
from argosy.errors import ArgosyError
from argosy.families.architecture import architecture_of
from argosy.launch.fabric import check_sharp, choose_fabric, nic_request
from argosy.launch.names import object_name
from argosy.launch.secrets import refuse_secrets
from argosy.plan.advise import predict
from argosy.plan.auto import open_layout
from argosy.plan.hardware import Instance, find_instance

KUBERNETES = ("jobset", "indexed-job", "pytorchjob", "trainjob", "hyperpod")
_SHARE = 0.9  # of a node's cores and memory that a pod asks for: the rest is the system's
_MOST_SHM_GIB = 64
_UNITS = {"Mi": 2**-10, "Gi": 1, "Ti": 2**10, "Pi": 2**20}


@dataclass(frozen=True)
class Placement:
    resolved: Resolved
    source: str  # the run spec as it was written
    overrides: tuple[str, ...]  # laid over it: the user's, then the planner's layout
    cluster: ClusterSpec
    instance: Instance | None
    fabric: str
    nics: tuple[str, int] | None
    gpus: int  # of a node
    ranks: int  # on a node
    cpus: int
    memory_gib: int
    shm_gib: int
    prediction: dict[str, Any] | None  # the planner's, of this layout

    @property
    def spec(self) -> RunSpec:
        return self.resolved.spec

    @property
    def name(self) -> str:
        return object_name(self.spec.name)

    @property
    def storage(self) -> StorageSpec:
        """Of a Kubernetes job, which has one."""
        if self.cluster.storage is None:
            raise AssertionError("checked when the run was placed")
        return self.cluster.storage


def place(
    path: Path, overrides: Sequence[str] = (), target: str | None = None, *, oversized: bool = False
) -> Placement:
    """Read a run spec, and put it on its cluster; one that the planner says does not fit there only where `oversized` insists."""
    added = [] if target is None else [f"cluster.target={target}"]
    resolved = resolve(path, [*overrides, *added], elsewhere=True)
    if resolved.spec.cluster is None:
        raise ArgosyError(
            "config.missing-key",
            "the run spec does not say where to launch",
            key="cluster",
            fix="add cluster: {target: jobset, instance: p4d.24xlarge, nodes: 2, storage: CLAIM, image: …}, or pass --target local",
        )
    cluster = resolved.spec.cluster
    if cluster.target == "local" and cluster.nodes > 1:
        raise ArgosyError(
            "config.conflict",
            f"this machine is one node, and the run is meant for {cluster.nodes}",
            key="cluster.nodes",
            value=cluster.nodes,
            origin=resolved.origins.get("cluster.nodes"),
            fix="cluster.nodes=1, with a layout for the ranks of one node (`parallel: auto` finds one)",
        )
    instance = None if cluster.instance is None else find_instance(cluster.instance)
    gpus = _gpus(cluster, instance)
    ranks = cluster.ranks or gpus or 1
    overrides = tuple(overrides)
    source = path.read_text(encoding="utf-8")
    refuse_secrets(source, overrides, resolved.spec)
    planned_on = _planned_on(resolved, instance, cluster, gpus)
    chosen = open_layout(resolved, planned_on, ranks * cluster.nodes)
    if chosen:
        resolved = resolve(path, [*overrides, *added, *chosen], elsewhere=True)
    check_world(
        resolved.spec.parallel,
        ranks * cluster.nodes,
        f"{cluster.nodes} nodes of {ranks} ranks",
        resolved.spec.train.global_batch,
    )
    fabric = choose_fabric(cluster, instance) if cluster.target != "local" else "none"
    check_sharp(cluster, fabric)
    memory = _memory(cluster, instance, gpus)
    placed = Placement(
        resolved=resolved,
        source=source,
        overrides=(*overrides, *chosen),
        cluster=cluster,
        instance=instance,
        fabric=fabric,
        nics=nic_request(cluster, instance, gpus, fabric) if cluster.target in KUBERNETES else None,
        gpus=gpus,
        ranks=ranks,
        cpus=cluster.cpus or int((instance.cpus or 0) * _share(instance, gpus) if instance is not None else 0),
        memory_gib=memory,
        shm_gib=gib(cluster.shm) if cluster.shm else max(1, min(_MOST_SHM_GIB, memory // 8)),
        prediction=None if planned_on is None else predict(resolved.spec, planned_on),
    )
    if cluster.target in KUBERNETES:
        _check_kubernetes(placed)
    if not oversized:
        _check_memory(placed)
    return placed


def _check_memory(placed: Placement) -> None:
    """Refuse a layout that runs out of memory, before nodes are held for it."""
    prediction = placed.prediction
    if prediction is None or prediction["fits"]:
        return
    stage, need = max(enumerate(prediction["memory_gib"]), key=lambda one: float(one[1]["device"]))
    parts = " + ".join(
        f"{name} {value:,.1f}" for name, value in need.items() if name not in ("allocated", "device") and value >= 0.05
    )
    layout, cluster = placed.spec.parallel, placed.cluster
    raise ArgosyError(
        "plan.does-not-fit",
        f"a rank of {'stage ' + str(stage) + ' of ' if layout.pp > 1 else ''}this layout ({describe_layout(layout)}) needs "
        f"{need['device']:,.1f} GiB, and a GPU of {cluster.instance} has {prediction['card_gib']:g}: {parts}",
        key="parallel",
        value=describe_layout(layout),
        origin=placed.resolved.origins.get("parallel.dp_shard"),
        fix="leave `parallel` out, and the planner finds a layout that fits, or says how many GPUs it takes; a smaller "
        "parallel.micro_batch, parallel.recompute=full, more cluster.nodes; --oversized launches it all the same",
    )


def gib(quantity: str) -> int:
    """`64Gi` -> 64; less than one is one."""
    return max(1, int(int(quantity[:-2]) * _UNITS[quantity[-2:]]))


def _gpus(cluster: ClusterSpec, instance: Instance | None) -> int:
    if cluster.gpus is not None:
        if instance is not None and cluster.gpus > instance.gpus:
            raise ArgosyError(
                "launch.resources",
                f"a {instance.name} has {instance.gpus} GPUs, and {cluster.gpus} are asked for",
                key="cluster.gpus",
                value=cluster.gpus,
                fix=f"cluster.gpus={instance.gpus}, or leave it out",
            )
        return cluster.gpus
    if instance is not None:
        return instance.gpus
    if cluster.target == "local":
        return 0
    raise ArgosyError(
        "config.missing-key",
        "nothing says how many GPUs a node has",
        key="cluster.instance",
        fix="cluster.instance=p4d.24xlarge (`argosy plan` knows the names), or cluster.gpus=8, or 0 to train on CPUs",
    )


def _memory(cluster: ClusterSpec, instance: Instance | None, gpus: int) -> int:
    if cluster.memory is not None:
        return gib(cluster.memory)
    return int((instance.ram or 0) * _share(instance, gpus)) if instance is not None else 0


def _share(instance: Instance, gpus: int) -> float:
    """Of a node's cores and memory: with half its GPUs go half of them, so that others can use the rest."""
    return _SHARE * (gpus / instance.gpus if 0 < gpus < instance.gpus else 1)


def _planned_on(resolved: Resolved, instance: Instance | None, cluster: ClusterSpec, gpus: int) -> str | None:
    """The cluster as the planner names it, where it knows the nodes and the model."""
    if instance is None or gpus != instance.gpus or (cluster.ranks or gpus) != gpus:
        return None
    return f"{cluster.nodes}x{instance.name}" if architecture_of(resolved.spec.model).planned else None


def _check_kubernetes(placed: Placement) -> None:
    cluster = placed.cluster
    if cluster.image is None:
        raise ArgosyError(
            "config.missing-key",
            "a pod needs a container image",
            key="cluster.image",
            fix="build docker/Dockerfile, push it, and name it by digest: cluster.image=registry/argosy@sha256:…",
        )
    _check_image(cluster.image)
    if not placed.spec.name[-1].isalnum():
        raise ArgosyError(
            "config.bad-value",
            "the name of a run on Kubernetes is a label of its pods, and a label ends with a letter or a digit",
            key="name",
            value=placed.spec.name,
            fix=f"name={placed.spec.name.rstrip('._-')}",
        )
    if cluster.storage is None:
        raise ArgosyError(
            "config.missing-key",
            "pods are gone when they end, and with them the run: it needs a shared volume",
            key="cluster.storage",
            fix="cluster.storage=CLAIM for an existing claim; or {claim: …, kind: azure-lustre | azure-blob | fsx}",
        )
    if not placed.cpus or placed.memory_gib < 2:
        raise ArgosyError(
            "launch.resources",
            f"cores and memory of {cluster.instance or 'the nodes'} are not known, and a pod without requests is evicted first",
            key="cluster.memory" if placed.cpus else "cluster.cpus",
            fix="cluster.cpus=90 cluster.memory=1800Gi, or a little less than the nodes have",
        )
    if placed.shm_gib >= placed.memory_gib:
        raise ArgosyError(
            "launch.resources",
            f"/dev/shm of {placed.shm_gib} GiB counts as memory, and the pod has {placed.memory_gib} GiB of it",
            key="cluster.shm",
            value=cluster.shm,
            fix=f"cluster.shm={max(1, placed.memory_gib // 8)}Gi",
        )
    if cluster.user == 0 and not cluster.privileged:
        raise ArgosyError(
            "launch.security",
            "pods run as an ordinary user",
            key="cluster.user",
            value=0,
            fix="cluster.user=1000, or cluster.privileged=true if root is meant",
        )
    for name in sorted(cluster.env.keys() & cluster.secrets.keys()):
        raise ArgosyError(
            "config.conflict",
            f"{name} comes from a Secret ({cluster.secrets[name]}) and stands in cluster.env too",
            key=f"cluster.env.{name}",
            fix="leave it out of one of them",
        )
    _check_hyperpod(placed)
    _check_paths(placed)


def _check_image(image: str) -> None:
    """A name that means another image tomorrow gives the pods of one run different ones."""
    name, _, digest = image.partition("@")
    _, _, tag = name.rpartition("/")[2].partition(":")
    if not digest and tag in ("", "latest"):
        raise ArgosyError(
            "launch.image",
            f"{image} is another image whenever somebody pushes one"
            + ("" if tag else ": without a tag it means :latest"),
            key="cluster.image",
            value=image,
            fix="name it by the digest that docker push prints: registry/argosy@sha256:…; a tag of your own will do",
        )


def _check_hyperpod(placed: Placement) -> None:
    cluster = placed.cluster
    if cluster.target != "hyperpod":
        return
    if cluster.cloud != "hyperpod":
        raise ArgosyError(
            "config.conflict",
            f"the target hyperpod needs SageMaker HyperPod's operator, and the cloud is {cluster.cloud}",
            key="cluster.cloud",
            value=cluster.cloud,
            fix="cluster.cloud=hyperpod, or the target jobset or pytorchjob",
        )
    if cluster.operator == "kubeflow" and not cluster.namespace.startswith(("hyperpod", "kubeflow")):
        raise ArgosyError(
            "launch.namespace",
            "HyperPod resumes PyTorchJobs only in the namespace kubeflow, or in ones whose name begins with hyperpod",
            key="cluster.namespace",
            value=cluster.namespace,
            fix="cluster.namespace=hyperpod-ns-TEAM, or cluster.operator=sagemaker",
        )
    if cluster.operator == "sagemaker" and cluster.gang != "off":
        raise ArgosyError(
            "config.conflict",
            f"nothing groups the pods of a HyperPodPyTorchJob for {cluster.gang}: HyperPod's task governance is Kueue",
            key="cluster.gang",
            value=cluster.gang,
            fix="cluster.queue=hyperpod-ns-TEAM-localqueue in place of it",
        )


def _check_paths(placed: Placement) -> None:
    """What has to outlive a pod has to lie on the shared volume; relative paths do."""
    mount, spec = PurePosixPath(placed.storage.mount), placed.spec
    paths = {"runs_dir": spec.runs_dir} | {
        f"data.train.{n}.path": source.path.removeprefix("file://") for n, source in enumerate(spec.data.train)
    }
    for key, path in paths.items():
        if path.startswith("/") and mount not in (PurePosixPath(path), *PurePosixPath(path).parents):
            raise ArgosyError(
                "launch.not-shared",
                f"{path} is inside the pod and gone when it ends: the shared volume is mounted at {mount}",
                key=key,
                value=path,
                origin=placed.resolved.origins.get(key),
                fix=f"a path under {mount}, or a relative one, which starts there",
            )
