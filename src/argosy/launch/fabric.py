"""The network between nodes: which resource a pod asks for, and which variables make NCCL use it or fail.

Only variables with a known effect are set. `NCCL_NET` is pinned wherever the fabric has a name there, so that a missing plugin
or device ends the job with an error; without it NCCL falls back to TCP and trains at a tenth of the speed.
"""

from __future__ import annotations

from collections.abc import Mapping

from argosy.config.cluster import ClusterSpec
from argosy.errors import ArgosyError
from argosy.plan.hardware import Instance

EFA_RESOURCE = "vpc.amazonaws.com/efa"
DEVICE_IN_POD, DEVICE_ON_HOST = "mlx5_0:1", "mlx5_ib0:1"

_AZURE_HOPPER_NODES = ("Standard_ND96isr_H100_v5", "Standard_ND96isr_H200_v5")
_AZURE_HOPPER = {
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    "NCCL_IB_PCI_RELAXED_ORDERING": "1",
    "NCCL_IB_QPS_PER_CONNECTION": "4",
    "NCCL_IGNORE_CPU_AFFINITY": "1",
    "NCCL_MIN_NCHANNELS": "32",
    # These virtual machines hide their PCIe topology, so every card counts as near. Pods get a topology file in place of this.
    "NCCL_NET_GDR_LEVEL": "SYS",
    "NCCL_P2P_NET_CHUNKSIZE": "524288",
    "NCCL_PXN_DISABLE": "1",
}
_NETS = {"efa": "Libfabric", "infiniband": "IB", "roce": "IB", "tcp": "Socket"}


def choose_fabric(cluster: ClusterSpec, instance: Instance | None) -> str:
    """Return the network that connects the nodes: `none` for a single node or without GPUs."""
    if cluster.nodes == 1 or cluster.gpus == 0:
        return "none"
    if cluster.fabric != "auto":
        return cluster.fabric
    known = "ethernet" if instance is None else instance.fabric
    if known != "ethernet":
        return known
    what = "nothing is known of the nodes' network" if instance is None else f"{instance.name} has plain ethernet"
    raise ArgosyError(
        "launch.fabric",
        f"{cluster.nodes} nodes have to exchange gradients, and {what}: NCCL would use TCP without saying so",
        key="cluster.fabric",
        value="auto",
        fix="cluster.fabric=tcp if that is meant; efa, infiniband or roce if the nodes have it",
    )


def nic_request(cluster: ClusterSpec, instance: Instance | None, gpus: int, fabric: str) -> tuple[str, int] | None:
    """Return the resource name and the number of network cards a pod requests. Half of a node's GPUs get half of its cards."""
    if fabric in ("none", "tcp"):
        return None
    by_cloud = EFA_RESOURCE if fabric == "efa" else cluster.cloud_facts.infiniband_resource
    name = cluster.nic_resource or by_cloud
    known = None if instance is None else card_count(instance, gpus)
    count = cluster.nics if cluster.nics is not None else known
    if name is None or not count:
        raise ArgosyError(
            "launch.fabric",
            f"a pod on {fabric} has to ask for network cards, and {'their resource name' if name is None else 'their number'} is not known",
            key="cluster.nic_resource" if name is None else "cluster.nics",
            fix="see what the device plugin offers: kubectl describe node, under Allocatable; or cluster.fabric=tcp",
        )
    return name, count


def card_count(instance: Instance, gpus: int) -> int:
    """Return the number of network cards that go with `gpus` of a node's GPUs."""
    return min(instance.nics, -(-instance.nics * gpus // instance.gpus))


def fabric_environment(
    cluster: ClusterSpec, instance: Instance | None, fabric: str, device: str = DEVICE_IN_POD
) -> Mapping[str, str]:
    """Return the environment of NCCL and the libraries below it. `device` is the first InfiniBand device as a process sees it."""
    gloo = {} if cluster.interface is None else {"GLOO_SOCKET_IFNAME": cluster.interface}
    if fabric == "none":
        return gloo
    variables = {"NCCL_NET": _NETS[fabric], "NCCL_SOCKET_IFNAME": cluster.interface or "^lo,docker,veth"} | gloo
    if fabric == "efa":
        variables |= {"NCCL_NET_PLUGIN": "ofi", "FI_EFA_USE_HUGE_PAGE": "0"}
    name = "" if instance is None else instance.name
    if cluster.cloud_facts.hides_topology and fabric == "infiniband" and name in _AZURE_HOPPER_NODES:
        variables |= _AZURE_HOPPER
    if cluster.sharp:
        variables |= _sharp(device)
        # SHARP's plugin brings a transport of another name; preflight checks that NCCL uses it.
        del variables["NCCL_NET"]
    return variables


def _sharp(device: str) -> dict[str, str]:
    return {
        "NCCL_COLLNET_ENABLE": "1",
        "SHARP_COLL_ENABLE_PCI_RELAXED_ORDERING": "1",
        "SHARP_COLL_ENABLE_SAT": "1",
        "SHARP_COLL_LOG_LEVEL": "3",
        "SHARP_SMX_UCX_INTERFACE": device,
        "UCX_NET_DEVICES": device,
        "UCX_TLS": "rc",
    }


def check_sharp(cluster: ClusterSpec, fabric: str) -> None:
    if cluster.sharp and fabric != "infiniband":
        raise ArgosyError(
            "launch.fabric",
            f"SHARP reduces inside InfiniBand switches, and this run's nodes are connected by {fabric}",
            key="cluster.sharp",
            value=True,
            fix="leave cluster.sharp out, or use several nodes on InfiniBand",
        )
