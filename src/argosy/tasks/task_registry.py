"""The registry of tasks: their objects, their names in `data.task`, and their sections of `data`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from argosy.config.counts import training_flops_per_token
from argosy.config.model import ModelSpec, Section
from argosy.errors import ArgosyError
from argosy.families.architecture import Architecture, architecture_of
from argosy.tasks.causal_lm import CausalLM
from argosy.tasks.dpo import DpoSpec, PreferenceTuning
from argosy.tasks.inverse_cloze import IctSpec, InverseClozeTask
from argosy.tasks.masked_lm import BertSpec, MaskedLMTask
from argosy.tasks.prefix_lm import PrefixLM, PrefixSpec
from argosy.tasks.sft import SftSpec, SupervisedFineTuning
from argosy.tasks.span_corruption import SpanCorruptionTask, T5Spec
from argosy.tasks.task import Run, Task

# The first task that fits an architecture is its default.
TASKS: dict[str, Task[Any]] = {
    task.name: task
    for task in (
        CausalLM(), PrefixLM(), SupervisedFineTuning(), PreferenceTuning(), MaskedLMTask(), SpanCorruptionTask(), InverseClozeTask(),
    )
}  # fmt: skip
TaskName = Literal["causal-lm", "prefix-lm", "sft", "dpo", "masked-lm", "span-corruption", "inverse-cloze"]


class TaskSections(Section):
    """The keys of `data` for tasks: the chosen task, and the settings of each."""

    task: TaskName | None = Field(
        None, description="what the model is trained on; unless given, its architecture's own task"
    )
    prefix: PrefixSpec | None = Field(
        None, description="prefix language modelling (a decoder's samples, with `task: prefix-lm`)"
    )
    sft: SftSpec | None = Field(
        None, description="supervised fine-tuning on conversations (a decoder's samples, with `task: sft`)"
    )
    dpo: DpoSpec | None = Field(
        None, description="preference tuning on pairs of answers (a decoder's samples, with `task: dpo`)"
    )
    bert: BertSpec | None = Field(None, description="masked language modelling (an encoder's samples)")
    t5: T5Spec | None = Field(None, description="span corruption (an encoder-decoder's samples)")
    ict: IctSpec | None = Field(None, description="inverse cloze (a retriever's samples)")


SECTIONS = tuple(task.section for task in TASKS.values() if task.section is not None)


def tasks_for(architecture: Architecture) -> list[Task[Any]]:
    """Return the tasks an architecture can be trained on, its default first."""
    return [task for task in TASKS.values() if architecture in task.architectures]


def section_for(model: Mapping[str, Any], task: object) -> str | None:
    """Return the section of `data` with the settings of a run's task, given its unchecked `model` and `data.task`."""
    keys: dict[str, Any] = {key: model.get(key) for key in ("architecture", "retrieval")}
    try:
        fits = tasks_for(architecture_of(ModelSpec.model_construct(**keys)))
    except (KeyError, TypeError):
        # The schema refuses the architecture later.
        return None
    return next((fit for fit in fits if fit.name == task), fits[0]).section


def named_task(name: str, key: str) -> Task[Any]:
    """Return the task of a name that the user gave as `key`."""
    if name not in TASKS:
        raise ArgosyError(
            "config.bad-value",
            f"there is no task {name!r}",
            key=key,
            value=name,
            fix=f"{key} {', '.join(TASKS)}: one of these",
        )
    return TASKS[name]


def own_task(model: ModelSpec) -> Task[Any]:
    """Return the task a model is trained on unless the run sets another."""
    return tasks_for(architecture_of(model))[0]


def masks_vary(run: Run) -> bool:
    """Return whether the attention mask depends on the batch."""
    return bool(run.data.document_mask) or bool(task_of(run).mask_inputs)


def run_flops_per_token(run: Run) -> float:
    """Return the training FLOPs per token of a run, with the lengths and shares that the settings of its task give."""
    task = task_of(run)
    return training_flops_per_token(run.model, run.data.seq_len, task.target_len(run), task.predicted_share(run))


def task_of(run: Run) -> Task[Any]:
    """Return the task of a run.

    Raises:
        ArgosyError: the task does not fit the model; the message lists those that do.
    """
    if run.data.task is None:
        return own_task(run.model)
    architecture = architecture_of(run.model)
    task = TASKS[run.data.task]
    if architecture not in task.architectures:
        fits = [other.name for other in tasks_for(architecture)]
        raise ArgosyError(
            "config.conflict",
            f"{task.name} is no task for the architecture {architecture.name}",
            key="data.task",
            value=task.name,
            fix=f"data.task={' or '.join(fits)}, or choose another model",
        )
    return task
