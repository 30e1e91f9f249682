"""A run placed on a cluster: what every target renders from. `argosy.launch.place` makes it."""

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
    resolved: Resolved
    source: str  # the run spec as it was written
    overrides: tuple[str, ...]  # laid over it: the user's, then the planner's layout
    cluster: ClusterSpec
    instance: Instance | None
    fabric: str
    nics: tuple[str, int] | None
    gpus: int  # of a node
    ranks: int  # on a node
    cpus: int
    memory_gib: int
    shm_gib: int
    prediction: dict[str, Any] | None  # the planner's, of this layout

    @property
    def spec(self) -> RunSpec:
        return self.resolved.spec

    @property
    def name(self) -> str:
        return object_name(self.spec.name)

    @property
    def storage(self) -> StorageSpec:
        """Of a Kubernetes job, which has one."""
        if self.cluster.storage is None:
            raise AssertionError("checked when the run was placed")
        return self.cluster.storage


def gib(quantity: str) -> int:
    """`64Gi` -> 64; less than one is one."""
    return max(1, int(int(quantity[:-2]) * _UNITS[quantity[-2:]]))
