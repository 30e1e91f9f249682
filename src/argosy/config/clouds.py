"""The registry of clouds: the names that `cluster.cloud` takes, and what differs between their nodes.

It stands below the schema, which takes its choices from it. Whatever depends on the cloud is a field here, so that no other code compares
the names of clouds.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cloud:
    """The nodes of one cloud."""

    # Precedes the instance type in the nodes' label node.kubernetes.io/instance-type. None: their label is not known.
    instance_prefix: str | None = None
    # The node label whose value is the same for nodes that are close in the network.
    near_label: str | None = None
    # The label, and its value, of nodes that are fit for pods.
    healthy_label: tuple[str, str] | None = None
    # The resource name of an InfiniBand card.
    infiniband_resource: str | None = None
    # Nodes are virtual machines that hide their PCIe topology.
    hides_topology: bool = False
    # Faulty nodes are replaced, and jobs that ask for it are resumed.
    auto_resume: bool = False


_NEAR_ON_AWS = "topology.k8s.aws/network-node-layer-2"
CLOUDS: dict[str, Cloud] = {
    "generic": Cloud(),
    "aks": Cloud(instance_prefix="", near_label="ib/torset", infiniband_resource="rdma/ib", hides_topology=True),
    "eks": Cloud(instance_prefix="", near_label=_NEAR_ON_AWS),
    "hyperpod": Cloud(
        instance_prefix="ml.",
        near_label=_NEAR_ON_AWS,
        healthy_label=("sagemaker.amazonaws.com/node-health-status", "Schedulable"),
        auto_resume=True,
    ),
}
