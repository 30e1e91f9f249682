"""HyperPodPyTorchJob: SageMaker HyperPod's own operator, its agent in each pod, and a watch on the log for runs that hang.

The agent (`hyperpodrun`, in place of `--nproc`) is told by the operator where to meet. A run that has printed no line about a step
for long is restarted; how long follows from the planner's step time.
"""

from __future__ import annotations

from argosy.launch.names import require_room
from argosy.launch.placement import Placement
from argosy.launch.pod import Manifest, job_metadata, nvlink_domain, pod_template
from argosy.launch.stages import SPEC_FILE
from argosy.record.console import STEP_LINE

AGENT_PORT = 8080
CONTAINER = "argosy"
_START_S = 3600  # images, data, first compilation
_LEAST_SILENCE_S = 600


def hyperpod_job(placed: Placement) -> list[Manifest]:
    cluster, name = placed.cluster, placed.name
    require_room(name, f"-pods-{cluster.nodes + cluster.spares - 1}")
    template = pod_template(placed, "train", CONTAINER)
    template["spec"]["restartPolicy"] = "OnFailure"
    container = template["spec"]["containers"][0]
    container["command"] = ["hyperpodrun"]
    container["args"] = [
        f"--nnodes={cluster.nodes}",
        f"--nproc-per-node={placed.ranks}",
        f"--server-port={AGENT_PORT}",
        "--shutdown-signal=SIGTERM",
        f"--shutdown-timeout={int(cluster.grace.amount)}",
        "-m",
        "argosy",
        "train",
        SPEC_FILE,
        *placed.overrides,
    ]
    container.setdefault("ports", []).append({"containerPort": AGENT_PORT, "name": "agent"})
    replicas = {"name": "pods", "replicas": cluster.nodes, "spares": cluster.spares, "template": template}
    job = {
        "apiVersion": "sagemaker.amazonaws.com/v1",
        "kind": "HyperPodPyTorchJob",
        "metadata": job_metadata(placed, "train", name),
        "spec": {"nprocPerNode": str(placed.ranks), "replicaSpecs": [replicas], "runPolicy": _policy(placed)},
    }
    return [*nvlink_domain(placed), job]


def _policy(placed: Placement) -> Manifest:
    hang = {
        "name": "steps",
        "logPattern": f".*{STEP_LINE}.*",
        "expectedStartCutOffInSeconds": _START_S,
        "expectedRecurringFrequencyInSeconds": _silence(placed),
    }
    return {
        "cleanPodPolicy": "All",
        "jobMaxRetryCount": placed.cluster.restarts,
        "ttlSecondsAfterFinished": int(placed.cluster.keep_finished.amount),
        "logMonitoringConfiguration": [hang],
    }


def _silence(placed: Placement) -> int:
    """Seconds without a line that mean a hang: ten times what lies between two lines."""
    every = placed.spec.log.every
    if every.unit == "seconds":
        return max(_LEAST_SILENCE_S, int(10 * every.amount))
    steps = every.steps(placed.spec.train.batches, seq_len=placed.spec.data.seq_len) or 1
    seconds = 60.0 if placed.prediction is None else float(placed.prediction["step_s"])
    return max(_LEAST_SILENCE_S, int(10 * steps * seconds))
