"""The validation losses of a run: which checkpoint is the best, and when to stop early.

The best checkpoint is the one with the lowest validation loss among those that exist, as each states it. Early stopping counts
evaluations, whether saved or not, and after a resume begins with those in the run's metrics. The first rank decides, and the others
follow it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from argosy.checkpoint.store import best_checkpoint, validation_loss_of
from argosy.config.schema import RunSpec
from argosy.parallel.mesh import Mesh
from argosy.record.jsonl import read_metrics
from argosy.record.rundir import RunDir


class Verdict(NamedTuple):
    """The consequences of an evaluation."""

    loss: float
    # Save this step: no checkpoint has a lower loss.
    saves: bool
    # This step is the last.
    stops: bool


class Validations:
    def __init__(self, run: RunDir, spec: RunSpec, mesh: Mesh) -> None:
        self._run, self._mesh = run, mesh
        self.keeps_best = spec.checkpoint.best is not None
        self.patience = None if spec.eval is None else spec.eval.patience
        self._min_delta = 0.0 if spec.eval is None else spec.eval.min_delta
        self._losses: list[float] = []

    def begin(self, step: int) -> bool:
        """Read the losses up to `step`, which the run resumes from. Returns True if the run has already stopped early."""
        return self._decide(lambda: self._read(step))

    def judge(self, loss: float) -> Verdict:
        """Record the loss of an evaluation, and return what follows from it."""
        stops = self._decide(lambda: self._add(loss))
        return Verdict(loss, self.keeps_best and self._decide(lambda: loss < self._lowest_saved()), stops)

    @property
    def describe(self) -> str:
        return f"no lower validation loss in {self.patience} evaluations (eval.patience)"

    def _decide(self, question: Callable[[], bool]) -> bool:
        return bool(self._mesh.from_first(lambda: int(question())))

    def _read(self, step: int) -> bool:
        records = read_metrics(self._run.metrics) if self.patience is not None else {}
        # NaN and infinity are null in the record.
        self._losses = [
            math.nan if record["validation_loss"] is None else float(record["validation_loss"])
            for number, record in records.items()
            if number <= step and "validation_loss" in record
        ]
        return self._exhausted()

    def _lowest_saved(self) -> float:
        best = best_checkpoint(self._run.checkpoints)
        return math.inf if best is None else validation_loss_of(best)

    def _add(self, loss: float) -> bool:
        self._losses.append(loss)
        return self._exhausted()

    def _exhausted(self) -> bool:
        """Return whether the last `patience` evaluations are all without a loss lower by `min_delta` than the lowest before."""
        if self.patience is None:
            return False
        lowest, without = math.inf, 0
        for loss in self._losses:
            lowest, without = (loss, 0) if loss < lowest - self._min_delta else (lowest, without + 1)
        return without >= self.patience
