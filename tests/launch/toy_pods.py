"""A Kubernetes launch target of its own, for test_new_target.py: a kind that some operator brings, made of the one pod body."""

from __future__ import annotations

from argosy.launch.manifests import Kind, Operator
from argosy.launch.placement import Placement
from argosy.launch.pod import PORT, Manifest, job_metadata, pod_template
from argosy.launch.stages import TRAIN
from argosy.launch.targets.kubernetes import KubernetesTarget


class ToyJobTarget(KubernetesTarget):
    name = "toyjob"
    jobs = (
        Kind(
            "toys.example.org/v1",
            "ToyJob",
            "toyjobs",
            operator=Operator("the toy operator", "1.0", "kubectl apply -f toys.yaml"),
        ),
    )

    def train_objects(self, placed: Placement) -> list[Manifest]:
        nodes = placed.cluster.nodes
        env = {"NNODES": str(nodes), "MASTER_ADDR": f"{placed.name}-0.{placed.name}", "MASTER_PORT": str(PORT)}
        job = {
            "apiVersion": self.jobs[0].api_version,
            "kind": self.jobs[0].name,
            "metadata": job_metadata(placed, TRAIN, placed.name),
            "spec": {"nodes": nodes, "template": pod_template(placed, TRAIN, "argosy", env)},
        }
        return [job]


TARGET = ToyJobTarget()
