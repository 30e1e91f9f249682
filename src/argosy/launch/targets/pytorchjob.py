"""PyTorchJob (Kubeflow Training Operator 1.x).

The operator requires the container name `pytorch`, tells every pod its node rank and the master's address, and restarts only the
failed pod. The other pods notice the loss, exit and are restarted too; all meet again at the master's address.
"""

from __future__ import annotations

from argosy.launch.manifests import Kind, Operator
from argosy.launch.names import require_room
from argosy.launch.placement import Placement
from argosy.launch.pod import Manifest, job_metadata, nvlink_domain, pod_template
from argosy.launch.stages import TRAIN
from argosy.launch.targets.kubernetes import KubernetesTarget

CONTAINER = "pytorch"
_OPERATOR = Operator(
    "Kubeflow's Training Operator",
    "1.7.0",
    "kubectl apply --server-side -k 'https://github.com/kubeflow/trainer.git/manifests/overlays/standalone?ref=v1.9.4'",
)
PYTORCH_JOB = Kind("kubeflow.org/v1", "PyTorchJob", "pytorchjobs", operator=_OPERATOR)


class PyTorchJobTarget(KubernetesTarget):
    name = "pytorchjob"
    jobs = (PYTORCH_JOB,)

    def train_objects(self, placed: Placement) -> list[Manifest]:
        return pytorch_job(placed)


TARGET = PyTorchJobTarget()


def pytorch_job(placed: Placement) -> list[Manifest]:
    cluster, name = placed.cluster, placed.name
    workers = cluster.nodes - 1
    require_room(name, f"-worker-{max(0, workers - 1)}")
    replica = {"restartPolicy": "OnFailure", "template": _template(placed)}
    replicas = {"Master": {"replicas": 1} | replica}
    if workers:
        replicas["Worker"] = {"replicas": workers} | replica
    policy: Manifest = {
        "backoffLimit": cluster.restarts,
        "cleanPodPolicy": "Running",
        "ttlSecondsAfterFinished": int(cluster.keep_finished.amount),
    }
    if cluster.gang != "off":
        policy["schedulingPolicy"] = {"minAvailable": cluster.nodes}
    job = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": job_metadata(placed, TRAIN, name),
        "spec": {"nprocPerNode": str(placed.ranks), "runPolicy": policy, "pytorchReplicaSpecs": replicas},
    }
    return [*nvlink_domain(placed), job]


def _template(placed: Placement) -> Manifest:
    template = pod_template(placed, TRAIN, CONTAINER)
    # The replica's restartPolicy replaces it.
    del template["spec"]["restartPolicy"]
    return template
