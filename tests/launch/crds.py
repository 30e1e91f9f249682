"""What API servers and operators accept: the schemas of Kubernetes and of the operators' packages, and for kinds that no package
describes, schemas written from their API references: every field known there, and no other."""

from __future__ import annotations

import typing
from typing import Any

import jsonschema
import kubernetes_validate
from kubeflow.training import models as kubeflow_v1
from kubeflow_trainer_api import models as kubeflow_v2
from pydantic import BaseModel

CORE = ("v1", "batch/v1", "apps/v1", "storage.k8s.io/v1", "rbac.authorization.k8s.io/v1", "networking.k8s.io/v1")
ANY: dict[str, Any] = {}
TEXT: dict[str, Any] = {"type": "string"}
NUMBER: dict[str, Any] = {"type": "integer"}
SWITCH: dict[str, Any] = {"type": "boolean"}


def one_of(*values: str) -> dict[str, Any]:
    return {"enum": list(values)}


def listed(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1}


def fields(required: str = "", **known: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": known, "required": required.split(), "additionalProperties": False}


_METADATA = fields(
    "name",
    name={"type": "string", "maxLength": 63, "pattern": r"^[a-z]([a-z0-9-]*[a-z0-9])?$"},
    namespace=TEXT,
    labels={"type": "object", "additionalProperties": TEXT},
    annotations={"type": "object", "additionalProperties": TEXT},
)


def _object(api: str, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    head = {"apiVersion": {"const": api}, "kind": {"const": kind}}
    return fields("apiVersion kind metadata spec", **head, metadata=_METADATA, spec=spec)


_FAILURE_RULE = fields(
    "name action",
    name=TEXT,
    action=one_of(
        "FailJobSet",
        "RestartJobSet",
        "RestartJobSetAndIgnoreMaxRestarts",
        "RestartJob",
        "RestartJobAndIgnoreMaxRestarts",
    ),
    onJobFailureReasons=listed(
        one_of(
            "BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes", "MaxFailedIndexesExceeded", "PodFailurePolicy"
        )
    ),
    onJobFailureMessagePatterns=listed(TEXT),
    targetReplicatedJobs=listed(TEXT),
)
JOB_SET = _object(
    "jobset.x-k8s.io/v1alpha2",
    "JobSet",
    fields(
        "replicatedJobs",
        replicatedJobs=listed(
            fields(
                "name template",
                name=TEXT,
                replicas=NUMBER,
                groupName=TEXT,
                dependsOn=listed(fields("name status", name=TEXT, status=one_of("Ready", "Complete"))),
                template=fields("spec", metadata=ANY, spec=ANY),  # a Job's, checked as one
            )
        ),
        network=fields(enableDNSHostnames=SWITCH, subdomain=TEXT, publishNotReadyAddresses=SWITCH),
        successPolicy=fields("operator", operator=one_of("All", "Any"), targetReplicatedJobs=listed(TEXT)),
        failurePolicy=fields(
            maxRestarts=NUMBER,
            restartStrategy=one_of("Recreate", "BlockingRecreate", "InPlaceRestart"),
            rules=listed(_FAILURE_RULE),
        ),
        suspend=SWITCH,
        coordinator=ANY,
        managedBy=TEXT,
        ttlSecondsAfterFinished=NUMBER,
        volumeClaimPolicies=ANY,
    ),
)
_LOG_RULE = fields(
    "name logPattern",
    name=TEXT,
    logPattern=TEXT,
    expectedStartCutOffInSeconds=NUMBER,
    expectedRecurringFrequencyInSeconds=NUMBER,
    metricThreshold={"type": "number"},
    operator=one_of("gt", "lt", "eq", "gteq", "lteq"),
    metricEvaluationDataPoints=NUMBER,
    stopPattern=TEXT,
)
HYPERPOD_JOB = _object(
    "sagemaker.amazonaws.com/v1",
    "HyperPodPyTorchJob",
    fields(
        "replicaSpecs",
        nprocPerNode=TEXT,
        replicaSpecs=listed(
            fields("name template", name=TEXT, replicas=NUMBER, maxReplicas=NUMBER, spares=NUMBER, template=ANY)
        ),
        runPolicy=fields(
            cleanPodPolicy=one_of("All", "OnlyComplete", "None"),
            jobMaxRetryCount=NUMBER,
            ttlSecondsAfterFinished=NUMBER,
            suspend=SWITCH,
            activeDeadlineSeconds=NUMBER,
            startupDeadlineSeconds=NUMBER,
            faultDeadlineSeconds=NUMBER,
            restartPolicy=ANY,
            logMonitoringConfiguration=listed(_LOG_RULE),
        ),
        elasticPolicy=ANY,
    ),
)
POD_GROUPS = {
    "volcano": _object(
        "scheduling.volcano.sh/v1beta1",
        "PodGroup",
        fields("minMember", minMember=NUMBER, queue=TEXT, priorityClassName=TEXT, minResources=ANY),
    ),
    "coscheduling": _object(
        "scheduling.x-k8s.io/v1alpha1",
        "PodGroup",
        fields("minMember", minMember=NUMBER, minResources=ANY, scheduleTimeoutSeconds=NUMBER),
    ),
}


def check_strictly(document: dict[str, Any], schema: dict[str, Any]) -> None:
    faults = [
        f"{error.json_path}: {error.message}" for error in jsonschema.Draft202012Validator(schema).iter_errors(document)
    ]
    assert not faults, "\n".join(faults)


class Fault(typing.NamedTuple):
    """What a server has against a field. Without a reason it is one of structure, which servers find before anything else."""

    field: str
    message: str
    reason: str = ""


def schema_faults(document: dict[str, Any], schema: dict[str, Any]) -> list[Fault]:
    """Return what a schema has against a document, in the words of a server."""
    return [fault_of(error) for error in jsonschema.Draft202012Validator(schema).iter_errors(document)]


def fault_of(error: jsonschema.ValidationError) -> Fault:
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.absolute_path)
    if error.validator == "additionalProperties":
        [unknown, *_] = [key for key in error.instance if key not in error.schema["properties"]]
        return Fault(f"{path}.{unknown}", "field not declared in schema")
    if error.validator == "type":
        names = {
            "integer": "numeric (int or float)",
            "number": "numeric (int or float)",
            "object": "map",
            "array": "list",
        }
        kinds = error.validator_value if isinstance(error.validator_value, list) else [error.validator_value]
        return Fault(path, f"expected {names.get(kinds[0], kinds[0])}, got &{{{error.instance}}}")
    if error.validator == "enum":
        known = ", ".join(f'"{value}"' for value in error.validator_value)
        return Fault(
            path, f'Unsupported value: "{error.instance}": supported values: {known}', "FieldValueNotSupported"
        )
    if error.validator == "required":
        [missing, *_] = [key for key in error.validator_value if key not in error.instance]
        return Fault(f"{path}.{missing}", "Required value", "FieldValueRequired")
    return Fault(path, f"Invalid value: {error.message}", "FieldValueInvalid")


# Kueue 0.13, as far as docs/guides uses it.
_QUOTA = fields("name nominalQuota", name=TEXT, nominalQuota=ANY, borrowingLimit=ANY, lendingLimit=ANY)
_FLAVOR = fields("name resources", name=TEXT, resources=listed(_QUOTA))
QUEUES = {
    "ResourceFlavor": fields(
        "apiVersion kind metadata", apiVersion=ANY, kind=ANY, metadata=_METADATA,
        spec=fields(nodeLabels=ANY, nodeTaints=ANY, tolerations=ANY, topologyName=TEXT),
    ),
    "ClusterQueue": _object(
        "kueue.x-k8s.io/v1beta1",
        "ClusterQueue",
        fields(
            resourceGroups=listed(
                fields("coveredResources flavors", coveredResources=listed(TEXT), flavors=listed(_FLAVOR))
            ),
            namespaceSelector=ANY, cohort=TEXT, queueingStrategy=TEXT, preemption=ANY, flavorFungibility=ANY,
            admissionChecks=ANY, stopPolicy=TEXT, fairSharing=ANY,
        ),
    ),
    "LocalQueue": _object(
        "kueue.x-k8s.io/v1beta1", "LocalQueue", fields("clusterQueue", clusterQueue=TEXT, stopPolicy=TEXT)
    ),
}  # fmt: skip
_WRITTEN = {"JobSet": JOB_SET, "HyperPodPyTorchJob": HYPERPOD_JOB, **QUEUES}


def check_object(document: dict[str, Any], version: str = "1.35.0") -> None:
    """Hold an object to the schema of its kind: Kubernetes' own, that of the operator's package, or one written here."""
    kind = document["kind"]
    if kind == "PyTorchJob":
        _strict_swagger(document, kubeflow_v1.KubeflowOrgV1PyTorchJob)
    elif kind == "TrainJob":
        _strict_pydantic(document, kubeflow_v2.TrainerV1alpha1TrainJob)
    elif kind == "TrainingRuntime":
        _strict_pydantic(document, kubeflow_v2.TrainerV1alpha1TrainingRuntime)
    elif kind in _WRITTEN:
        check_strictly(document, _WRITTEN[kind])
        # Trainer's package has the models of JobSet's own schema, with the templates of pods down to the leaves.
        if kind == "JobSet":
            _strict_pydantic(document, kubeflow_v2.JobsetV1alpha2JobSet)
    else:
        assert document["apiVersion"] in CORE, f"nothing checks {kind}"
        kubernetes_validate.validate(document, version, strict=True)


def _strict_pydantic(node: Any, annotation: Any) -> None:
    """Every key is a field of the model that comes with the package, down to the leaves."""
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, type(None) | int) or str(origin).endswith("UnionType"):
        [inner] = [a for a in typing.get_args(annotation) if a is not type(None)][:1]
        return _strict_pydantic(node, inner)
    if origin is typing.Annotated:
        return _strict_pydantic(node, typing.get_args(annotation)[0])
    if origin is list:
        return [_strict_pydantic(item, typing.get_args(annotation)[0]) for item in node] and None
    if origin is dict:
        return [_strict_pydantic(item, typing.get_args(annotation)[1]) for item in node.values()] and None
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        if not isinstance(node, dict):
            return None  # a quantity, or a value that may be a number or text
        known = {field.alias or name: field.annotation for name, field in annotation.model_fields.items()}
        for key, value in node.items():
            assert key in known, f"{annotation.__name__} has no {key}"
            _strict_pydantic(value, known[key])
    return None


def _strict_swagger(node: Any, model: Any) -> None:
    """The same for models of the older generator, which name their types as text."""
    known = {model.attribute_map[name]: kind for name, kind in model.openapi_types.items()}
    for key, value in node.items():
        assert key in known, f"{model.__name__} has no {key}"
        kind = known[key]
        inner = kind.removeprefix("dict(str, ").removeprefix("list[").rstrip(")]")
        child = getattr(kubeflow_v1, inner, None)
        if child is None:
            continue  # a pod template or another core type, checked as such elsewhere
        children = value.values() if kind.startswith("dict") else value if kind.startswith("list") else [value]
        for item in children:
            _strict_swagger(item, child)
