"""TrainJob (Kubeflow Trainer 2.x) with its own TrainingRuntime, which contains the pod template.

The runtime is a JobSet template, so a restart restarts all pods. Fields that later versions renamed (pod overrides, patches) are not
used. Neither is `resourcesPerNode`, which replaces or drops parts of a pod's resources in some versions.
"""

from __future__ import annotations

from argosy.launch.indexed_jobs import STOP_WHEN_REFUSED
from argosy.launch.manifests import Kind, Operator
from argosy.launch.names import require_room
from argosy.launch.placement import Placement
from argosy.launch.pod import Manifest, job_metadata, labels, nvlink_domain, pod_template
from argosy.launch.stages import TRAIN
from argosy.launch.targets.jobset import GROUP, replicated_jobs
from argosy.launch.targets.kubernetes import KubernetesTarget

CONTAINER = "node"
_API = "trainer.kubeflow.org/v1alpha1"
# 2.1.0 contains the template of JobSet 0.10.
_OPERATOR = Operator(
    "Kubeflow Trainer",
    "2.1.0",
    "kubectl apply --server-side -k 'https://github.com/kubeflow/trainer.git/manifests/overlays/manager?ref=v2.3.0'",
    recreates=True,
)


class TrainJobTarget(KubernetesTarget):
    name = "trainjob"
    jobs = (Kind(_API, "TrainJob", "trainjobs", operator=_OPERATOR),)
    beside = (Kind(_API, "TrainingRuntime", "trainingruntimes", operator=_OPERATOR),)

    def train_objects(self, placed: Placement) -> list[Manifest]:
        return _train_job(placed)


TARGET = TrainJobTarget()


def _train_job(placed: Placement) -> list[Manifest]:
    cluster, name = placed.cluster, placed.name
    require_room(name, f"-{GROUP}-0-{cluster.nodes - 1}-abcde")
    runtime = f"{name}-runtime"
    require_room(name, "-runtime")
    policies: Manifest = {"mlPolicy": {"numNodes": cluster.nodes, "torch": {}}}
    if cluster.gang == "coscheduling":
        policies["podGroupPolicy"] = {"coscheduling": {"scheduleTimeoutSeconds": 600}}
    elif cluster.gang == "volcano":
        policies["podGroupPolicy"] = {"volcano": {}}
    return [
        *nvlink_domain(placed),
        {
            "apiVersion": _API,
            "kind": "TrainingRuntime",
            "metadata": {
                "name": runtime,
                "namespace": cluster.namespace,
                "labels": labels(placed, TRAIN) | {"trainer.kubeflow.org/framework": "torch"},
            },
            "spec": policies | {"template": {"spec": _job_set_spec(placed)}},
        },
        {
            "apiVersion": _API,
            "kind": "TrainJob",
            "metadata": job_metadata(placed, TRAIN, name),
            "spec": {
                "runtimeRef": {
                    "apiGroup": "trainer.kubeflow.org",
                    "kind": "TrainingRuntime",
                    "name": runtime,
                },
                "trainer": {"numNodes": cluster.nodes, "numProcPerNode": placed.ranks},
            },
        },
    ]


def _job_set_spec(placed: Placement) -> Manifest:
    spec = replicated_jobs(placed, pod_template(placed, TRAIN, CONTAINER))
    template = spec["replicatedJobs"][0]["template"]
    template["metadata"] = {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}
    named = STOP_WHEN_REFUSED["onExitCodes"] | {"containerName": CONTAINER}
    rules = template["spec"]["podFailurePolicy"]["rules"]
    template["spec"]["podFailurePolicy"] = {"rules": [STOP_WHEN_REFUSED | {"onExitCodes": named}, *rules[1:]]}
    return spec
