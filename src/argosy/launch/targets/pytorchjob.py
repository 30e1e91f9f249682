"""PyTorchJob (Kubeflow Training Operator 1.x), and HyperPod's auto-resume on top of it.

The operator names the container `pytorch`, tells every pod its rank as a node and where the master listens, and restarts a
failed pod alone. The others notice that it is gone, end, and are restarted too: they meet again at the master's address.
"""

from __future__ import annotations

from argosy.launch.names import require_room
from argosy.launch.placement import Placement
from argosy.launch.pod import Manifest, job_metadata, nvlink_domain, pod_template

CONTAINER = "pytorch"


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
        "metadata": job_metadata(placed, "train", name),
        "spec": {"nprocPerNode": str(placed.ranks), "runPolicy": policy, "pytorchReplicaSpecs": replicas},
    }
    return [*nvlink_domain(placed), job]


def _template(placed: Placement) -> Manifest:
    template = pod_template(placed, "train", CONTAINER)
    del template["spec"]["restartPolicy"]  # the replica's takes its place
    return template


def resumed_by_hyperpod(placed: Placement) -> list[Manifest]:
    """The same, resumed by HyperPod when it has replaced a faulty node. It takes operators 1.7.0 to 1.8.1."""
    *before, job = pytorch_job(placed)
    job["metadata"]["annotations"] = {
        "sagemaker.amazonaws.com/enable-job-auto-resume": "true",
        "sagemaker.amazonaws.com/job-max-retry-count": str(placed.cluster.restarts),
    }
    return [*before, job]
