"""SageMaker HyperPod. `cluster.operator` chooses a PyTorchJob that HyperPod resumes, or a HyperPodPyTorchJob of HyperPod's operator.

HyperPod's operator runs an agent in each pod and watches the log for hangs. The agent (`hyperpodrun`, instead of `--nproc`) starts
the ranks and gets the rendezvous address from the operator. In each pod it reads the output of the first local rank from a log file,
which `--tee` and `--log-dir` make it keep. It reports a hang when no step line has arrived for a time derived from the planner's step
time. Therefore the first rank of every node prints step lines.
"""

from __future__ import annotations

from collections.abc import Sequence

from argosy.config.cluster import ClusterSpec
from argosy.config.units import Duration
from argosy.console.training_lines import EVERY_NODE, STEP_LINE, STEP_LINES
from argosy.errors import ArgosyError
from argosy.launch.manifests import Kind, Operator
from argosy.launch.names import require_room
from argosy.launch.placement import Placement
from argosy.launch.pod import Manifest, job_metadata, literal, nvlink_domain, pod_template
from argosy.launch.stages import SPEC_FILE, TRAIN
from argosy.launch.target import Right
from argosy.launch.targets.kubernetes import KubernetesTarget
from argosy.launch.targets.pytorchjob import PYTORCH_JOB, pytorch_job

AGENT = "hyperpodrun"
AGENT_PORT = 8080
AGENT_LOGS = "/tmp/hyperpod"
# The agent writes here. It needs a volume, because the root file system is read-only.
AGENT_STATE = "/opt/ml/input/config"
CONTAINER = "argosy"
# Seconds for pulling images, loading data and the first compilation.
_START_S = 3600
_LEAST_SILENCE_S = 600
_HYPERPOD_JOB = Kind(
    "sagemaker.amazonaws.com/v1",
    "HyperPodPyTorchJob",
    "hyperpodpytorchjobs",
    operator=Operator(
        "SageMaker HyperPod's training operator",
        "1.0.0",
        "aws eks create-addon --cluster-name CLUSTER --addon-name amazon-sagemaker-hyperpod-training-operator",
    ),
)


class HyperPodTarget(KubernetesTarget):
    name = "hyperpod"
    jobs = (PYTORCH_JOB, _HYPERPOD_JOB)

    def check(self, placed: Placement) -> None:
        super().check(placed)
        _check_hyperpod(placed.cluster)

    def train_objects(self, placed: Placement) -> list[Manifest]:
        return _resumed_job(placed) if _resumes(placed.cluster) else _hyperpod_job(placed)

    def programs(self, cluster: ClusterSpec) -> Sequence[str]:
        return () if _resumes(cluster) else (AGENT,)

    def rights(self, cluster: ClusterSpec) -> Sequence[Right]:
        used = PYTORCH_JOB if _resumes(cluster) else _HYPERPOD_JOB
        return [right for right in super().rights(cluster) if right.resource == used.plural]


TARGET = HyperPodTarget()


def _resumes(cluster: ClusterSpec) -> bool:
    return cluster.operator == "kubeflow"


def _check_hyperpod(cluster: ClusterSpec) -> None:
    if not cluster.cloud_facts.auto_resume:
        raise ArgosyError(
            "config.conflict",
            f"the target hyperpod needs SageMaker HyperPod's operator, and the cloud is {cluster.cloud}",
            key="cluster.cloud",
            value=cluster.cloud,
            fix="cluster.cloud=hyperpod, or the target jobset or pytorchjob",
        )
    if _resumes(cluster) and not cluster.namespace.startswith(("hyperpod", "kubeflow")):
        raise ArgosyError(
            "launch.namespace",
            "HyperPod resumes PyTorchJobs only in the namespace kubeflow, or in ones whose name begins with hyperpod",
            key="cluster.namespace",
            value=cluster.namespace,
            fix="cluster.namespace=hyperpod-ns-TEAM, or cluster.operator=sagemaker",
        )
    if not _resumes(cluster) and cluster.gang != "off":
        raise ArgosyError(
            "config.conflict",
            f"nothing groups the pods of a HyperPodPyTorchJob for {cluster.gang}: HyperPod's task governance is Kueue",
            key="cluster.gang",
            value=cluster.gang,
            fix="cluster.queue=hyperpod-ns-TEAM-localqueue in place of it",
        )


def _resumed_job(placed: Placement) -> list[Manifest]:
    """Return a PyTorchJob that HyperPod resumes after it has replaced a faulty node. It needs Training Operator 1.7.0 to 1.8.1."""
    *before, job = pytorch_job(placed)
    job["metadata"]["annotations"] = {
        "sagemaker.amazonaws.com/enable-job-auto-resume": "true",
        "sagemaker.amazonaws.com/job-max-retry-count": str(placed.cluster.restarts),
    }
    return [*before, job]


def _hyperpod_job(placed: Placement) -> list[Manifest]:
    cluster, name = placed.cluster, placed.name
    require_room(name, f"-pods-{cluster.nodes + cluster.spares - 1}")
    env = {"NNODES": str(cluster.nodes), STEP_LINES: EVERY_NODE}
    template = pod_template(placed, TRAIN, CONTAINER, env)
    template["spec"]["restartPolicy"] = "OnFailure"
    container = template["spec"]["containers"][0]
    container["command"] = [AGENT]
    container["args"] = [
        f"--nnodes={cluster.nodes}",
        f"--nproc-per-node={placed.ranks}",
        f"--server-port={AGENT_PORT}",
        "--tee=3",
        f"--log-dir={AGENT_LOGS}",
        "--shutdown-signal=SIGTERM",
        f"--shutdown-timeout={int(cluster.grace.amount)}",
        "-m",
        "argosy",
        "train",
        SPEC_FILE,
        *literal(placed.overrides),
    ]
    container.setdefault("ports", []).append({"containerPort": AGENT_PORT, "name": "agent"})
    container["volumeMounts"].append({"name": "agent", "mountPath": AGENT_STATE})
    template["spec"]["volumes"].append({"name": "agent", "emptyDir": {"sizeLimit": "1Gi"}})
    replicas = {"name": "pods", "replicas": cluster.nodes, "spares": cluster.spares, "template": template}
    job = {
        "apiVersion": "sagemaker.amazonaws.com/v1",
        "kind": "HyperPodPyTorchJob",
        "metadata": job_metadata(placed, TRAIN, name),
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
    last = _in_steps(placed, placed.spec.train.length)
    # After the last step the run saves, which may take long.
    if last is not None:
        hang["stopPattern"] = f".*{STEP_LINE.replace('[0-9]+', str(last))}.*"
    return {
        "cleanPodPolicy": "All",
        "jobMaxRetryCount": placed.cluster.restarts,
        "ttlSecondsAfterFinished": int(placed.cluster.keep_finished.amount),
        "logMonitoringConfiguration": [hang],
    }


def _silence(placed: Placement) -> int:
    """Return the seconds without a step line that count as a hang: ten times the interval between lines, plus an evaluation."""
    spec, every = placed.spec, placed.spec.log.every
    seconds = 60.0 if placed.prediction is None else float(placed.prediction["step_s"])
    # An upper bound: an evaluation batch costs less than a step.
    evaluation = 0.0 if spec.eval is None else spec.eval.batches * seconds
    between = every.amount if every.unit == "seconds" else seconds * (_in_steps(placed, every) or 1)
    return max(_LEAST_SILENCE_S, int(10 * between + evaluation))


def _in_steps(placed: Placement, duration: Duration) -> int | None:
    """Return a duration in steps. None: it is in epochs, and the size of the corpus is not known yet."""
    return duration.steps(placed.spec.train.batches, seq_len=placed.spec.data.seq_len)
