"""Whether ranks that hold the same parameters still hold the same bits: memory and arithmetic can go wrong without a word.

Their digests are compared every so often (`guard.replica_check`) and before each save, so that no checkpoint is made of a run
that has come apart. Where they differ the run is rewound to one that had not.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from argosy.config.survival import GuardSpec
from argosy.config.units import Duration
from argosy.parallel.mesh import Mesh
from argosy.parallel.replicas import odd_replicas
from argosy.parallel.shards import local
from argosy.train.optimizer import Optimizer
from argosy.train.rewind import Rewind
from argosy.train.timer import Timer


class Replicas:
    def __init__(
        self, spec: GuardSpec | None, mesh: Mesh, optimizer: Optimizer, timer: Callable[[Duration], Timer]
    ) -> None:
        self._mesh, self._optimizer = mesh, optimizer
        every = None if spec is None else spec.replica_check
        self._group = None if every is None or mesh.size("dp_replicate") == 1 else mesh.along("dp_replicate")
        self._timer = None if every is None else timer(every)

    def check(self, step: int, saving: bool) -> None:
        if self._group is None or self._timer is None or not (self._timer.due(step) or saving):
            return
        weights = self._optimizer.weights().values()
        flags = torch.zeros(self._mesh.world_size)
        flags[odd_replicas([local(weight) for weight in weights], self._group.get_group())] = 1
        dist.all_reduce(flags)  # all ranks go back, not only those that saw it
        if flags.any():
            raise Rewind(step, "replica-mismatch", ranks=tuple(flags.nonzero().flatten().tolist()))
