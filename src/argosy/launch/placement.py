"""The placement of a run on a cluster, from which every target renders. `argosy.launch.place` creates it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from argosy.config.cluster import ClusterSpec, StorageSpec
from argosy.config.resolve import Resolved
from argosy.config.schema import RunSpec
from argosy.launch.names import object_name
from argosy.plan.hardware import Instance

_UNITS = {"Mi": 2**-10, "Gi": 1, "Ti": 2**10, "Pi": 2**20}


@dataclass(frozen=True)
class Placement:
    """A run on its cluster: everything that targets render from."""

    resolved: Resolved
    # The run spec as the user wrote it.
    source: str
    # `key=value` overrides of the spec: the user's, then the planner's layout.
    overrides: tuple[str, ...]
    cluster: ClusterSpec
    instance: Instance | None
    fabric: str
    nics: tuple[str, int] | None
    gpus: int  # per node
    ranks: int  # per node
    cpus: int
    memory_gib: int
    shm_gib: int
    # The run's stages are pods on Kubernetes.
    in_pods: bool
    # The planner's prediction for this layout.
    prediction: dict[str, Any] | None

    @property
    def spec(self) -> RunSpec:
        return self.resolved.spec

    @property
    def name(self) -> str:
        return object_name(self.spec.name)

    @property
    def storage(self) -> StorageSpec:
        """The shared volume. A run on Kubernetes always has one."""
        if self.cluster.storage is None:
            raise AssertionError("checked when the run was placed")
        return self.cluster.storage


def gib(quantity: str) -> int:
    """Return a Kubernetes quantity in GiB, at least 1: `64Gi` -> 64."""
    return max(1, int(int(quantity[:-2]) * _UNITS[quantity[-2:]]))
