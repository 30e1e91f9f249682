"""The `cluster` section of the run spec: where a run is launched.

One section serves a laptop, Slurm and every kind of Kubernetes job. It names claims, queues, secrets and images. The GPUs,
network cards and memory of an instance type come from the hardware facts, and can be overridden here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from argosy.config.clouds import CLOUDS, Cloud
from argosy.config.model import Section
from argosy.config.targets import TARGETS
from argosy.config.units import Duration as _Duration
from argosy.config.units import DurationField, Positive, PositiveNumber, Whole

if TYPE_CHECKING:
    CloudName = str
    TargetName = str
else:
    CloudName = Literal[tuple(CLOUDS)]
    TargetName = Literal[tuple(TARGETS)]

DnsName = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$")]
Quantity = Annotated[str, Field(pattern=r"^[1-9][0-9]*(Mi|Gi|Ti|Pi)$")]
AbsolutePath = Annotated[str, Field(pattern=r"^/[A-Za-z0-9._/-]+$")]
SecretKey = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]*/[A-Za-z0-9._-]+$")]
# A single interface: Gloo takes neither a list nor an exclusion with `^`.
InterfaceName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]*$")]
VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class StorageSpec(Section):
    """The shared volume that data, runs and checkpoints lie on. Relative paths of the run spec start at its mount."""

    claim: DnsName = Field(description="name of the PersistentVolumeClaim")
    mount: AbsolutePath = Field("/data", description="where every pod sees it")
    kind: Literal["existing", "class", "azure-lustre", "azure-blob", "fsx", "fsx-static"] = Field(
        "existing",
        description="existing: the claim is there. class: claim it from `storage_class`. The others make class and claim of that cloud's store",
    )
    storage_class: str | None = Field(None, description="kind class: the StorageClass to claim from")
    size: Quantity | None = Field(
        None, description="of a claim that is made, as 16Ti; default: the smallest the store has"
    )
    sku: str | None = Field(
        None, description="azure-lustre: AMLFS-Durable-Premium-40, -125, -250, -500; azure-blob: Standard_LRS, …"
    )
    zone: str | None = Field(
        None, coerce_numbers_to_str=True, description="azure-lustre: availability zone; default: 1; an empty text: none"
    )
    subnet: str | None = Field(
        None, description="fsx: the subnet's id; azure-lustre: the subnet's name, default: that of the cluster's nodes"
    )
    vnet: str | None = Field(None, description="azure-lustre: virtual network of the subnet; default: the cluster's")
    vnet_resource_group: str | None = Field(
        None, description="azure-lustre: resource group of the virtual network; default: the cluster's"
    )
    resource_group: str | None = Field(
        None, description="azure-lustre: resource group of the file system; default: that of the cluster's nodes"
    )
    security_groups: list[str] = Field([], description="fsx: ids of security groups")
    throughput: Literal[125, 250, 500, 1000] | None = Field(None, description="fsx: MB/s for each TiB; default: 250")
    volume: str | None = Field(None, description="fsx-static: the file system's id, fs-…")
    dns_name: str | None = Field(None, description="fsx-static: the file system's DNS name")
    mount_name: str | None = Field(None, description="fsx-static: the file system's mount name")
    mount_options: list[str] | None = Field(None, description="in place of the store's own")
    reclaim: Literal["Retain", "Delete"] = Field(
        "Retain",
        description="what becomes of a store that is made when its claim is deleted. Retain: it stays, with all data, and costs money",
    )
    take_ownership: bool = Field(
        False,
        description="make the root of the volume cluster.user's, by one short pod as root with the capability CHOWN alone: "
        "for a new file system whose root belongs to root, as FSx makes them",
    )


class SlurmSpec(Section):
    """Slurm options besides nodes and GPUs."""

    partition: str | None = Field(None, description="--partition")
    account: str | None = Field(None, description="--account")
    qos: str | None = Field(None, description="--qos")
    time: str | None = Field(None, description="--time, as 3-00:00:00")
    container: str | None = Field(None, description="pyxis: an image or .sqsh file; mounts are made for the storage")
    mounts: list[str] = Field([], description="pyxis: further mounts, as /scratch:/scratch")
    setup: list[str] = Field([], description="lines before the job starts, as `source /opt/venv/bin/activate`")
    options: list[str] = Field([], description="further #SBATCH options, as --constraint=h100")


class WorkersSpec(Section):
    """Pods (or Slurm array tasks) that fetch and prepare the data, sharing the work by their index."""

    count: Positive = Field(1, description="how many")
    cpus: Positive = Field(8, description="cores of each")
    memory: Quantity = Field("32Gi", description="memory of each")
    node_selector: dict[str, str] = Field(
        {}, description="labels of the nodes they may use; default: any node, one without GPUs if there is a choice"
    )
    tolerations: list[str] | None = Field(
        None, description="taints that are tolerated, by key; default: those of cluster.tolerations"
    )


class ClusterSpec(Section):
    """The cluster on which `argosy launch` starts a run. Training does not read it."""

    cloud: CloudName = Field("generic", description="chooses resource names, fabric settings, node labels")
    target: TargetName = Field("jobset", description="what starts the pods or processes")
    instance: str | None = Field(None, description="node type, as p4d.24xlarge; `argosy plan` knows the same names")
    nodes: Positive = Field(1, description="how many of them")
    gpus: Whole | None = Field(None, description="GPUs of a node that are used; default: all; 0: train on CPUs")
    ranks: Positive | None = Field(None, description="processes on a node; default: one for each GPU, or one")
    cpus: Positive | None = Field(
        None, description="cores a pod requests; default: 90% of the node's, or of its GPUs' share"
    )
    memory: Quantity | None = Field(None, description="memory a pod requests, shm included; default: as with cores")
    shm: Quantity | None = Field(None, description="/dev/shm; default: an eighth of the memory, 64Gi at most")
    scratch: Quantity = Field("100Gi", description="node-local space at /scratch for caches and dumps")
    local_disk: AbsolutePath | None = Field(
        None,
        description="a directory of the node (hostPath) for /scratch in place of the pod's own, as /mnt/k8s-disks/0",
    )
    image: str | None = Field(None, description="container image, by digest; see docker/")
    pull_secrets: list[DnsName] = Field([], description="names of imagePullSecrets")
    pull_policy: Literal["auto", "Always", "IfNotPresent", "Never"] = Field(
        "auto",
        description="when nodes pull the image, in Kubernetes's words. auto: Always for a tag, which may have moved; IfNotPresent for a "
        "digest and for localhost/… images. IfNotPresent for images loaded on the nodes, as `kind load` does",
    )
    namespace: DnsName = Field("default", description="Kubernetes namespace; it must exist")
    storage: StorageSpec | None = Field(None, description="the shared volume, or the name of an existing claim")
    secrets: dict[VariableName, SecretKey] = Field(
        {}, description="environment variables from Kubernetes Secrets, as {HF_TOKEN: hf-token/token}; never the value"
    )
    env: dict[VariableName, str] = Field({}, description="further environment variables, laid over Argosy's own")
    fabric: Literal["auto", "efa", "infiniband", "roce", "tcp"] = Field(
        "auto", description="auto: the instance's, and a run that would fall back to TCP fails; tcp: on purpose"
    )
    nic_resource: str | None = Field(None, description="resource name of a network card; default: by cloud and fabric")
    nics: Whole | None = Field(None, description="network cards of a pod; default: the instance's")
    interface: InterfaceName | None = Field(None, description="the one network interface for set-up traffic, as eth0")
    sharp: bool = Field(
        False, description="in-network reductions (InfiniBand SHARP); preflight checks that they are used"
    )
    huge_pages: Quantity | None = Field(None, description="hugepages-2Mi of a pod, where the nodes have them")
    host_network: bool = Field(False, description="pods share the node's network")
    privileged: bool = Field(False, description="run as privileged containers; hardly ever needed")
    user: Whole = Field(1000, description="user and group id in the container; 0 (root) only with privileged")
    node_selector: dict[str, str] = Field({}, description="further node labels")
    tolerations: list[str] = Field(["nvidia.com/gpu"], description="taints that are tolerated, by key")
    queue: DnsName | None = Field(None, description="Kueue LocalQueue")
    priority: DnsName | None = Field(None, description="Kueue priority class with a queue, PriorityClass without")
    gang: Literal["off", "volcano", "coscheduling"] = Field(
        "off", description="all pods or none, by a scheduler; Kueue does it by itself"
    )
    topology: str | None = Field(None, description="node label whose value the pods should share; default: by cloud")
    topology_required: bool = Field(False, description="wait rather than spread over several values of that label")
    restarts: Whole = Field(10, description="failures after which the job is given up; disruptions do not count")
    grace: DurationField = Field(_Duration(600.0, "seconds"), description="time to save after SIGTERM, as 10min")
    keep_finished: DurationField = Field(
        _Duration(86400.0, "seconds"), description="how long a finished job stays to be looked at, as 24h"
    )
    preflight: bool = Field(True, description="check every node before training starts")
    allreduce_floor: PositiveNumber | None = Field(
        None, description="GB/s of bus bandwidth that preflight asks for; default: the instance's"
    )
    operator: Literal["kubeflow", "sagemaker"] = Field(
        "kubeflow", description="target hyperpod: PyTorchJob with auto-resume, or HyperPodPyTorchJob"
    )
    spares: Whole = Field(0, description="target hyperpod, operator sagemaker: nodes held in reserve")
    data: WorkersSpec = Field(WorkersSpec(), description="who fetches and prepares")
    slurm: SlurmSpec = Field(SlurmSpec(), description="Slurm's own options")

    @property
    def cloud_facts(self) -> Cloud:
        return CLOUDS[self.cloud]
