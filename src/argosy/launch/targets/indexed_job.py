"""A plain indexed Job for training. It needs no operator, and the process that follows the launch restarts it."""

from __future__ import annotations

from argosy.launch.indexed_jobs import ranks_job
from argosy.launch.manifests import JOB
from argosy.launch.placement import Placement
from argosy.launch.pod import Manifest
from argosy.launch.stages import TRAIN
from argosy.launch.targets.kubernetes import KubernetesTarget


class IndexedJobTarget(KubernetesTarget):
    name = "indexed-job"
    jobs = (JOB,)
    restarts_itself = False

    def train_objects(self, placed: Placement) -> list[Manifest]:
        return ranks_job(placed, TRAIN)


TARGET = IndexedJobTarget()
