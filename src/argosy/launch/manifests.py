"""The Kubernetes objects of a launch as one value: shared objects, objects of each stage, and both as YAML files."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import yaml

from argosy.launch.placement import Placement
from argosy.launch.pod import Manifest, labels
from argosy.launch.stages import Stage
from argosy.launch.storage import storage_objects
from argosy.launch.topology import FILE_NAME, topology_file


@dataclass(frozen=True)
class Operator:
    """The software that provides a kind: its name, the oldest version that knows every field used here, and how to install it.

    An operator that `recreates` makes the parts of a job again while the job is being deleted.
    """

    name: str
    least: str
    install: str
    recreates: bool = False


@dataclass(frozen=True)
class Kind:
    """A kind of object. `plural` is its resource name in a Role. `operator` is the software that provides the kind."""

    api_version: str
    name: str
    plural: str = field(default="", compare=False)
    operator: Operator | None = field(default=None, compare=False)

    @property
    def group(self) -> str:
        return self.api_version.rpartition("/")[0]


# The oldest Kubernetes whose Job has every field used here. The chart asks for it too.
KUBERNETES_LEAST = "1.29"
POD, EVENT, SERVICE = Kind("v1", "Pod"), Kind("v1", "Event"), Kind("v1", "Service")
JOB = Kind("batch/v1", "Job", "jobs")
CONFIG_MAP = Kind("v1", "ConfigMap")
CLAIM = Kind("v1", "PersistentVolumeClaim")
LOCAL_QUEUES = (Kind("kueue.x-k8s.io/v1beta2", "LocalQueue"), Kind("kueue.x-k8s.io/v1beta1", "LocalQueue"))
# Companion objects that jobs of any target may need. They are deleted with the jobs.
BESIDE = (
    Kind("resource.nvidia.com/v1beta1", "ComputeDomain"),
    SERVICE,
    Kind("scheduling.volcano.sh/v1beta1", "PodGroup"),
    Kind("scheduling.x-k8s.io/v1alpha1", "PodGroup"),
)


def kind_of(document: Manifest) -> Kind:
    return Kind(document["apiVersion"], document["kind"])


@dataclass(frozen=True)
class Manifests:
    """Every object of a launch. The last object of a stage is its job; the objects before it are what the job needs."""

    storage: list[Manifest]
    spec: list[Manifest]
    stages: dict[Stage, list[Manifest]]

    def files(self) -> dict[str, str]:
        """Return the objects as YAML files, numbered in the order they are applied. Empty files are left out."""
        named = {"00-storage.yaml": self.storage, "10-spec.yaml": self.spec}
        for number, (stage, objects) in enumerate(self.stages.items(), start=2):
            named[f"{number}0-{stage}.yaml"] = objects
        return {name: _as_yaml(objects) for name, objects in named.items() if objects}


def shared_objects(placed: Placement) -> tuple[list[Manifest], list[Manifest]]:
    """Return the objects of the volume and of the run spec, which are applied before every stage."""
    topology = topology_file(placed.cluster, placed.instance, placed.fabric)
    spec = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": f"{placed.name}-spec",
            "namespace": placed.cluster.namespace,
            "labels": labels(placed),
        },
        "data": {"run.yaml": placed.source} | ({} if topology is None else {FILE_NAME: topology}),
    }
    return storage_objects(placed), [spec]


class _Plain(yaml.SafeDumper):
    """A YAML dumper that writes no anchors and keeps multi-line text as literal blocks."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Plain.add_representer(str, _text)


def _as_yaml(objects: list[Manifest]) -> str:
    return yaml.dump_all(objects, Dumper=_Plain, sort_keys=False, width=1000, explicit_start=True)
