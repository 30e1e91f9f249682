"""JobSet: when one pod dies, it recreates all pods, and the ranks resume together from the newest checkpoint.

Failures count towards `cluster.restarts`; disruptions (drains, preemptions, lost nodes) do not. A refusal ends the run at once.
"""

from __future__ import annotations

from argosy.launch.gang import pod_group
from argosy.launch.indexed_jobs import CONTAINER, REFUSED, job_spec
from argosy.launch.manifests import Kind, Operator
from argosy.launch.names import require_room
from argosy.launch.placement import Placement
from argosy.launch.pod import PORT, Manifest, job_metadata, nvlink_domain, pod_template
from argosy.launch.stages import TRAIN
from argosy.launch.targets.kubernetes import KubernetesTarget

GROUP = "node"
# 0.10.0 brought `onJobFailureMessagePatterns`, which tells a refusal from other failures.
_OPERATOR = Operator(
    "JobSet",
    "0.10.0",
    "kubectl apply --server-side -f https://github.com/kubernetes-sigs/jobset/releases/download/v0.12.0/manifests.yaml",
)


class JobSetTarget(KubernetesTarget):
    name = "jobset"
    jobs = (Kind("jobset.x-k8s.io/v1alpha2", "JobSet", "jobsets", operator=_OPERATOR),)

    def train_objects(self, placed: Placement) -> list[Manifest]:
        return _job_set(placed)


TARGET = JobSetTarget()


def _job_set(placed: Placement) -> list[Manifest]:
    name, nodes = placed.name, placed.cluster.nodes
    require_room(name, f"-{GROUP}-0-{nodes - 1}-abcde")
    env = {"NNODES": str(nodes), "MASTER_ADDR": f"{name}-{GROUP}-0-0.{name}", "MASTER_PORT": str(PORT)}
    template = pod_template(placed, TRAIN, CONTAINER, env)
    group = pod_group(placed, TRAIN, name, template)
    return [
        *nvlink_domain(placed),
        *group,
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": job_metadata(placed, TRAIN, name),
            "spec": {
                "network": {"enableDNSHostnames": True, "subdomain": name, "publishNotReadyAddresses": True},
                "ttlSecondsAfterFinished": int(placed.cluster.keep_finished.amount),
            }
            | replicated_jobs(placed, template),
        },
    ]


def replicated_jobs(placed: Placement, template: Manifest) -> Manifest:
    """Return the part of a JobSet's spec that a TrainingRuntime also contains."""
    job = job_spec(template, count=placed.cluster.nodes, retries=0, disruptions_fail=True)
    rules = [
        {
            "name": "refused",
            "action": "FailJobSet",
            "onJobFailureReasons": ["PodFailurePolicy"],
            "onJobFailureMessagePatterns": [f".*exit code {REFUSED}[^0-9].*"],
        },
        {
            "name": "disrupted",
            "action": "RestartJobSetAndIgnoreMaxRestarts",
            "onJobFailureReasons": ["PodFailurePolicy"],
        },
    ]
    return {
        "failurePolicy": {"maxRestarts": placed.cluster.restarts, "rules": rules},
        "replicatedJobs": [{"name": GROUP, "replicas": 1, "template": {"spec": job}}],
    }
