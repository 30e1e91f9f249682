"""Scores on tasks while a model trains (`eval.tasks`), in the metrics as `task/NAME/METRIC`.

The model is in evaluation mode, no gradients are kept, and nothing is drawn from a generator of the training. Requests are shared
among the data-parallel ranks, and the ranks of a tensor-, pipeline- or context-parallel group make each pass together, through the
engine that trains. With FSDP all ranks make equally many forward passes, because each gathers parameters from all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch

from argosy.config.suites import TasksSpec
from argosy.errors import ArgosyError
from argosy.parallel.failsafe import OutOfStepError
from argosy.parallel.mesh import Agreement
from argosy.record.heartbeat import Phase
from argosy.record.jsonl import now
from argosy.suites.harness_tasks import HarnessTasks, require_harness
from argosy.tasks.task_registry import task_of
from argosy.train.opening import Journal
from argosy.train.session import Session
from argosy.train.text_samples import text_form

KEY = "eval.tasks"
_log = logging.getLogger(__name__)


class TaskEvaluation:
    """Scores the model when it is due. Tasks and their data are loaded once, before the first step."""

    phase: Phase = "score_tasks"

    def __init__(
        self, session: Session, spec: TasksSpec, journal: Journal, agreement: Agreement, beat: Callable[[], None]
    ) -> None:
        require_harness(KEY)
        from argosy.suites.harness_model import HarnessModel, TextModel, rank_share
        from argosy.suites.icl_tasks import harness_config

        self._session, self._spec, self._journal, self._agreement = session, spec, journal, agreement
        self._timer = session.timer(spec.every, agreement.now)
        directory = None if spec.dir is None else Path(spec.dir)
        configs = [harness_config(task) for task in spec.icl]
        self._tasks = HarnessTasks(spec.names, configs=configs, directory=directory, shots=spec.few_shot, key=KEY)
        data = session.data
        tokenizer = data.require_tokenizer(KEY)
        end = tokenizer.eod_id if data.eod_id is None else data.eod_id
        form = text_form(session, journal.run, tokenizer)
        text = TextModel(
            session.engine.logits,
            tokenizer,
            session.device,
            limit=session.spec.data.seq_len,
            vocabulary=form.vocabulary,
            end=end,
            start=end if form.start is None else form.start,
            opening=form.opening,
            beside=task_of(session.spec).prompt_inputs,
            takes_cache=session.engine.takes_cache,
        )
        share = rank_share(session.engine.model, session.mesh, beat)
        self._model = HarnessModel(text, batch=spec.batch, share=share)

    def due(self, step: int) -> bool:
        # A run that is asked to stop saves instead.
        return self._agreement.asked is None and (step == self._session.steps or self._timer.due(step))

    def run(self, step: int, tokens: int) -> list[str]:
        """Score the weights after `step`. A task that fails is reported, and training goes on.

        Tasks run other people's templates and metrics, which may raise anything, on all ranks alike. After a forward pass that
        failed on one rank all ranks give up together, unless the others wait there for its results: then this rank must end.
        """
        model = self._session.engine.model
        self._session.engine.make_room()
        # Compiled code would be compiled again for each length.
        eager = self._session.spec.parallel.compile != "off"
        model.eval()
        try:
            with torch.compiler.set_stance("force_eager") if eager else nullcontext():
                found = self._tasks.score(self._model, limit=self._spec.limit, resample=False)
        except OutOfStepError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a task raises, training goes on
            cause = error.cause if isinstance(error, ArgosyError) else f"{type(error).__name__}: {error}"
            _log.debug("tasks were not scored", exc_info=True)
            self._journal.event("tasks-failed", step, warning=cause)
            return [f"warning: step {step}: tasks were not scored: {cause}"]
        finally:
            model.train()
        scores = {f"task/{name}/{metric}": v for name, one in found.items() for metric, v in one.metrics.items()}
        self._journal.metrics({"step": step, "time": now(), **scores})
        said = ", ".join(f"{name.removeprefix('task/')} {value:.4f}" for name, value in scores.items())
        return [f"step {step}: {said}"]

    def close(self) -> None:
        """Nothing is open."""
