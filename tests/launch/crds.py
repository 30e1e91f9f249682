"""Schemas of the kinds no package describes, written from their API references: every field known there, and no other."""

from __future__ import annotations

from typing import Any

import jsonschema

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
