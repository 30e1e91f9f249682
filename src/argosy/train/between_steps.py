"""Work between steps that reaches no training number: text that the model writes, and its scores on tasks.

A run without such work imports nothing of it.
"""

from __future__ import annotations

from typing import Protocol

from argosy.parallel.mesh import Agreement
from argosy.train.opening import Journal
from argosy.train.session import Session


class BetweenSteps(Protocol):
    def due(self, step: int) -> bool: ...

    def run(self, step: int, tokens: int) -> list[str]:
        """Do the work after `step`, when the run has consumed `tokens` tokens. Returns lines for the console."""
        ...

    def close(self) -> None: ...


def open_between_steps(session: Session, journal: Journal, agreement: Agreement) -> list[BetweenSteps]:
    """Return the work that the run spec asks for, ready to be done. All ranks do it together."""
    found: list[BetweenSteps] = []
    spec = session.spec
    if spec.log.samples is not None:
        from argosy.train.text_samples import TextSamples

        found.append(TextSamples(session, spec.log.samples, journal.run, agreement.now))
    if spec.eval is not None and spec.eval.tasks is not None:
        from argosy.train.task_scores import TaskEvaluation

        found.append(TaskEvaluation(session, spec.eval.tasks, journal, agreement))
    return found
