"""Gang scheduling: either all pods of a run get nodes, or none holds a node while waiting."""

from __future__ import annotations

from argosy.launch.placement import Placement
from argosy.launch.pod import Manifest, labels
from argosy.launch.stages import Stage


def pod_group(placed: Placement, stage: Stage, name: str, template: Manifest) -> list[Manifest]:
    """Return the PodGroup of the chosen scheduler, if any, and mark the pod template as its member."""
    cluster = placed.cluster
    metadata = {"name": name, "namespace": cluster.namespace, "labels": labels(placed, stage)}
    if cluster.gang == "volcano":
        template["metadata"].setdefault("annotations", {})["scheduling.k8s.io/group-name"] = name
        api = "scheduling.volcano.sh/v1beta1"
        return [{"apiVersion": api, "kind": "PodGroup", "metadata": metadata, "spec": {"minMember": cluster.nodes}}]
    if cluster.gang == "coscheduling":
        template["metadata"]["labels"]["scheduling.x-k8s.io/pod-group"] = name
        spec = {"minMember": cluster.nodes, "scheduleTimeoutSeconds": 600}
        api = "scheduling.x-k8s.io/v1alpha1"
        return [{"apiVersion": api, "kind": "PodGroup", "metadata": metadata, "spec": spec}]
    return []
