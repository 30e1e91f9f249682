"""The nodes of the cluster under test: which one has room for the pods of a run, and how many pods a run can have there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kubernetes.utils import parse_quantity

HOST_LABEL = "kubernetes.io/hostname"
_BARRED = ("NoSchedule", "NoExecute")
_ENDED = ("Succeeded", "Failed")


@dataclass(frozen=True)
class FreeNode:
    """A node that takes pods: the value of its host name label, and the cores that no pod has requested."""

    host: str
    cores: float


def free_nodes(nodes: Iterable[Any], pods: Iterable[Any]) -> list[FreeNode]:
    """Return the nodes that take pods, the one with the most free cores first.

    Args:
        nodes: all nodes, as the client lists them.
        pods: the pods of all namespaces.
    """
    taken: dict[str, float] = {}
    for pod in pods:
        if pod.status.phase not in _ENDED and pod.spec.node_name:
            taken[pod.spec.node_name] = taken.get(pod.spec.node_name, 0.0) + _requested(pod)
    open_ones = [
        node
        for node in nodes
        if not node.spec.unschedulable and not any(taint.effect in _BARRED for taint in node.spec.taints or [])
    ]
    found = [
        FreeNode(
            str(node.metadata.labels[HOST_LABEL]),
            float(parse_quantity(node.status.allocatable["cpu"])) - taken.get(node.metadata.name, 0.0),
        )
        for node in open_ones
    ]
    assert found, "no node takes pods: each is cordoned or has a taint"
    return sorted(found, key=lambda node: -node.cores)


def pods_of_a_run(nodes: Iterable[FreeNode], *, anywhere: bool) -> int:
    """Return how many pods of one core a run of two ranks can have: two if there is room, else one.

    Args:
        anywhere: pods may run on every node. Otherwise all run on the first one, which has the volume.
    """
    usable = list(nodes) if anywhere else list(nodes)[:1]
    room = sum(int(node.cores + 1e-6) for node in usable)
    named = ", ".join(f"{node.host} {node.cores:.2f}" for node in usable)
    assert room >= 1, f"a pod of a run requests one core, and so many are free: {named}"
    return min(2, room)


def _requested(pod: Any) -> float:
    requests = [
        (container.resources.requests if container.resources else None) or {} for container in pod.spec.containers
    ]
    return float(sum(parse_quantity(one.get("cpu", 0)) for one in requests))
