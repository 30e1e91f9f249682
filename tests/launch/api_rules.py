"""What the emulated API server knows of kinds, and what it has against a request, in the words of real servers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import NamedTuple
from urllib.parse import parse_qs, urlsplit

import jsonschema
import kubernetes_validate
from api_statuses import deleted, failure, invalid
from api_store import ConflictingFields, Object, now
from crds import HYPERPOD_JOB, JOB_SET, Fault, fault_of, schema_faults

DISCOVERY = re.compile(r"/version|/apis(/[^/]+/[^/]+)?|/api/v1")
OPERATORS = {"jobsets": JOB_SET, "hyperpodpytorchjobs": HYPERPOD_JOB}
# Group and version to (kind, plural). Kinds in CLUSTER_WIDE have no namespace.
KINDS = {
    "v1": [
        ("ConfigMap", "configmaps"),
        ("Event", "events"),
        ("PersistentVolume", "persistentvolumes"),
        ("PersistentVolumeClaim", "persistentvolumeclaims"),
        ("Pod", "pods"),
        ("Pod", "pods/log"),
        ("Service", "services"),
    ],
    "storage.k8s.io/v1": [("StorageClass", "storageclasses")],
    "authorization.k8s.io/v1": [("SelfSubjectAccessReview", "selfsubjectaccessreviews")],
    "kueue.x-k8s.io/v1beta1": [("LocalQueue", "localqueues")],
    "batch/v1": [("Job", "jobs")],
    "jobset.x-k8s.io/v1alpha2": [("JobSet", "jobsets")],
    "kubeflow.org/v1": [("PyTorchJob", "pytorchjobs")],
    "trainer.kubeflow.org/v1alpha1": [("TrainJob", "trainjobs"), ("TrainingRuntime", "trainingruntimes")],
    "sagemaker.amazonaws.com/v1": [("HyperPodPyTorchJob", "hyperpodpytorchjobs")],
    "resource.nvidia.com/v1beta1": [("ComputeDomain", "computedomains")],
    "scheduling.volcano.sh/v1beta1": [("PodGroup", "podgroups")],
    "scheduling.x-k8s.io/v1alpha1": [("PodGroup", "podgroups")],
}
# Jobs, whose pods go with them.
OWNERS = ("jobs", "jobsets", "pytorchjobs", "trainjobs", "hyperpodpytorchjobs")
CLUSTER_WIDE = ("PersistentVolume", "StorageClass", "SelfSubjectAccessReview")
CORE = ("v1", "batch/v1", "storage.k8s.io/v1")
VERBS = ("create", "delete", "deletecollection", "get", "list", "patch", "update", "watch")
ONLY = {"pods/log": ("get",), "selfsubjectaccessreviews": ("create",)}
_FIELDS = {
    "events": ("type", "reason", "involvedObject.name"),
    "pods": ("metadata.name", "spec.nodeName", "status.phase"),
}
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_NAME_RULE = (
    "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and end with an "
    f"alphanumeric character (e.g. 'example.com', regex used for validation is '{_NAME.pattern}')"
)


class Asked(NamedTuple):
    """What a request is about."""

    api_version: str
    namespace: str
    plural: str
    name: str | None
    part: str | None
    query: dict[str, str]

    @property
    def group(self) -> str:
        return self.api_version.rpartition("/")[0]

    @property
    def kind(self) -> str | None:
        """The kind of a resource, or None if the server does not know it."""
        return next((kind for kind, plural in KINDS.get(self.api_version, []) if plural == self.plural), None)


def what_is_asked(path: str) -> Asked:
    parts = urlsplit(path)
    query = {key: values[0] for key, values in parse_qs(parts.query).items()}
    words = parts.path.strip("/").split("/")
    cut = 2 if words[0] == "api" else 3
    version, rest, namespace = "/".join(words[1:cut]), words[cut:], ""
    if rest[0] == "namespaces":
        namespace, rest = rest[1], rest[2:]
    return Asked(version, namespace, rest[0], *[*rest[1:3], None, None][:2], query)  # type: ignore[arg-type]


def conflict(error: ConflictingFields) -> Object:
    causes = [
        {"reason": "FieldManagerConflict", "message": f'conflict with "{error.manager}"', "field": field}
        for field in error.fields
    ]
    count = f"{len(causes)} conflict{'s' if len(causes) > 1 else ''}"
    said = f'Apply failed with {count}: conflict with "{error.manager}": {", ".join(error.fields)}'
    return failure(409, said, {"causes": causes})


def document_fault(asked: Asked, document: Object, missing: set[str], there: Object | None) -> Object | None:
    """Return what the server has against a document that is applied, or None.

    Args:
        missing: fields that an operator of the cluster is too old for.
        there: the object that the cluster has under this name.
    """
    text, name = json.dumps(document), str(asked.name)
    faults = [Fault(f".spec.{field}", "field not declared in schema") for field in missing if f'"{field}"' in text]
    if asked.plural in OPERATORS:
        faults += schema_faults(document, OPERATORS[asked.plural])
    elif asked.api_version in CORE:
        faults += _core_faults(document)
    for fault in faults:
        if fault.reason:
            return invalid(asked.group, asked.kind, name, fault.field.lstrip("."), fault.message, fault.reason)
        what = f"{asked.namespace}/{name}; {asked.api_version}, Kind={asked.kind}"
        said = f"failed to create typed patch object ({what}): {fault.field}: {fault.message}"
        return failure(500, said, reason="")
    return _value_fault(asked, there, document)


def _core_faults(document: Object) -> list[Fault]:
    """Return what the schema of a kind of Kubernetes has against a document."""
    try:
        kubernetes_validate.validate(document, "1.34.0", strict=True)
    except jsonschema.ValidationError as error:
        return [fault_of(error)]
    return []


def _value_fault(asked: Asked, there: Object | None, document: Object) -> Object | None:
    """Return a fault that is in no schema: a name, an empty list of containers, a change of what cannot be changed."""
    name, spec = str(asked.name), document.get("spec", {})
    about = asked.group, asked.kind, name
    if not _NAME.fullmatch(name):
        return invalid(*about, "metadata.name", f'Invalid value: "{name}": {_NAME_RULE}')
    if spec.get("containers") == []:
        return invalid(*about, "spec.containers", "Required value", "FieldValueRequired")
    if spec.get("backoffLimit", 0) < 0:
        return invalid(
            *about, "spec.backoffLimit", f"Invalid value: {spec['backoffLimit']}: must be greater than or equal to 0"
        )
    old = (there or {}).get("spec", {})
    for field in ("completions",) if asked.kind == "Job" and there is not None else ():
        if old.get(field) != spec.get(field):
            return invalid(*about, f"spec.{field}", f"Invalid value: {spec.get(field)}: field is immutable")
    return None


def deletion(asked: Asked, gone: Object) -> Object:
    """Return the answer to a deletion. What goes only after all it owns is shown as it is until then."""
    if asked.query.get("propagationPolicy") != "Foreground":
        return deleted(asked.group, asked.plural, str(asked.name), gone["metadata"]["uid"])
    marks = {"deletionTimestamp": now(), "deletionGracePeriodSeconds": 0, "finalizers": ["foregroundDeletion"]}
    return gone | {"metadata": gone["metadata"] | marks}


def chooser(asked: Asked) -> Callable[[Object], bool]:
    wanted = dict(part.split("=") for part in asked.query.get("labelSelector", "").split(",") if part)
    name = re.search(r"metadata\.name=([^,]+)", asked.query.get("fieldSelector", ""))
    return lambda item: (
        wanted.items() <= item["metadata"].get("labels", {}).items()
        and (name is None or item["metadata"]["name"] == name[1])
    )


def field_fault(asked: Asked) -> Object | None:
    """Return the refusal of a field selector that the kind does not have."""
    asked_for = [part.partition("=")[0] for part in asked.query.get("fieldSelector", "").split(",") if part]
    odd = [field for field in asked_for if field not in _FIELDS.get(asked.plural, ())]
    return failure(400, f"field label not supported: {odd[0]}") if odd else None
