"""The trainer's side of checkpoints: which one to go on from, and what is saved when.

Every rank saves what it holds and reads what it holds, whatever the layout was and is. The ranks talk about it on a process
group of their own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from argosy.checkpoint.load import load_into
from argosy.checkpoint.manifest import Progress
from argosy.checkpoint.save import save
from argosy.checkpoint.store import latest, sweep
from argosy.config.schema import CheckpointSpec
from argosy.parallel.team import make_team
from argosy.record.jsonl import now
from argosy.record.rundir import RunDir
from argosy.train.optimizer import Optimizer


class Saving:
    def __init__(self, run: RunDir, spec: CheckpointSpec, optimizer: Optimizer, event: Callable[..., None]) -> None:
        """`event(kind, step, **facts)` puts something on the record."""
        self._run, self._spec, self._optimizer, self._event = run, spec, optimizer, event
        self._team = make_team()

    def restore(self, notes: list[str]) -> Progress | None:
        """Weights and optimiser from the newest good checkpoint, and where it stands; None where there is none."""
        if self._team.is_first:
            sweep(self._run.checkpoints)
        checkpoint = latest(self._run.checkpoints, report=notes.append, set_aside=True, team=self._team)
        if checkpoint is None:
            return None
        optimizer, progress = self._optimizer, checkpoint.progress
        load_into(checkpoint.weights(), optimizer.weights(), checkpoint.path, self._team)
        load_into(checkpoint.optimizer(), optimizer.tensors(), checkpoint.path, self._team)
        optimizer.write_parameters()
        optimizer.set_numbers(progress.optimizer, progress.step)
        notes.append(f"resuming from {checkpoint.path}")
        return progress

    def save(self, step: int, consumed_samples: int, **about: Any) -> str:
        """Returns what to tell. `about` is for people who look at the checkpoint."""
        optimizer = self._optimizer
        if self._team.is_first:
            self._run.require_ours()
        started = time.perf_counter()
        progress = Progress(step, consumed_samples, optimizer.numbers(), {"time": now(), **about})
        weights, state, keep = optimizer.weights(), optimizer.tensors(), self._spec.keep
        path = save(self._run.checkpoints, progress, weights, state, keep, self._team)
        seconds = time.perf_counter() - started
        self._event("save", step, path=path.name, seconds=round(seconds, 3))
        return f"saved {path} in {seconds:.1f}s"
