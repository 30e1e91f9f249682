"""Indexed Jobs of plain Kubernetes, without an operator. Every target uses them for data stages and preflight, some for training.

Kubernetes tells each pod its index, and a headless Service gives the first pod a DNS name. A failed pod ends the whole Job, since
ranks cannot continue without each other; `argosy launch` (or the chart's conductor) restarts it.
"""

from __future__ import annotations

from typing import Any

from argosy.launch.gang import pod_group
from argosy.launch.names import require_room
from argosy.launch.placement import Placement
from argosy.launch.pod import PORT, Manifest, job_metadata, labels, nvlink_domain, pod_template
from argosy.launch.stages import Stage

CONTAINER = "argosy"
# The exit code of a refusal: a retry cannot help.
REFUSED = 2

STOP_WHEN_REFUSED: dict[str, Any] = {
    "action": "FailJob",
    "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": [REFUSED]},
}


def data_job(placed: Placement, stage: Stage) -> list[Manifest]:
    """Return the Job of a data stage. Its workers split the work by index, and each is retried a few times."""
    workers = 1 if stage.as_root else placed.cluster.data.count
    name = f"{placed.name}-{stage}"
    require_room(placed.name, f"-{stage}-{workers - 1}-abcde")
    env = {"ARGOSY_WORKERS": str(workers)}
    job = _job(placed, stage, name, pod_template(placed, stage, CONTAINER, env), count=workers, retries=3 * workers)
    return [job]


def ranks_job(placed: Placement, stage: Stage) -> list[Manifest]:
    """Return the objects of a stage whose pods form one group of ranks: training or preflight."""
    name = placed.name if stage.trains else f"{placed.name}-{stage}"
    nodes = placed.cluster.nodes
    require_room(name, f"-{nodes - 1}-abcde")
    env = {"NNODES": str(nodes), "MASTER_ADDR": f"{name}-0.{name}", "MASTER_PORT": str(PORT)}
    template = pod_template(placed, stage, CONTAINER, env)
    template["spec"]["subdomain"] = name
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "namespace": placed.cluster.namespace, "labels": labels(placed, stage)},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"batch.kubernetes.io/job-name": name},
        },
    }
    group = pod_group(placed, stage, name, template)
    return [*nvlink_domain(placed), *group, service, _job(placed, stage, name, template, count=nodes, retries=0)]


def _job(placed: Placement, stage: Stage, name: str, template: Manifest, *, count: int, retries: int) -> Manifest:
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": job_metadata(placed, stage, name),
        "spec": job_spec(template, count=count, retries=retries, disruptions_fail=stage.on_gpus)
        | {"ttlSecondsAfterFinished": int(placed.cluster.keep_finished.amount)},
    }


def job_spec(template: Manifest, *, count: int, retries: int, disruptions_fail: bool) -> Manifest:
    """Return the spec of an indexed Job. With `disruptions_fail`, a drained or preempted pod ends the Job, so that all pods restart together."""
    disrupted = {
        "action": "FailJob" if disruptions_fail else "Ignore",
        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
    }
    return {
        "completionMode": "Indexed",
        "completions": count,
        "parallelism": count,
        "backoffLimit": retries,
        "podFailurePolicy": {"rules": [STOP_WHEN_REFUSED, disrupted]},
        "template": template,
    }
