"""The `eval.tasks` section of the run spec: tasks that a model is scored on while it trains."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from argosy.config.model import Section
from argosy.config.units import Duration, DurationField, Positive, Whole

# Types of in-context learning tasks, and the other names that LLM-Foundry has given them.
IclType = Literal["multiple_choice", "schema", "language_modeling", "generation"]
ICL_TYPES: dict[str, IclType] = {
    "multiple_choice": "multiple_choice",
    "schema": "schema",
    "language_modeling": "language_modeling",
    "generation": "generation",
    "generation_task_with_answers": "generation",
    "question_answering": "generation",
}


class IclTaskSpec(Section):
    """One in-context learning task of LLM-Foundry: a JSONL file and how its rows become prompts."""

    name: str = Field(description="the task's name in the metrics")
    data: str = Field(
        description="JSONL file: query, choices, gold (multiple_choice); context_options, continuation, gold (schema); context, "
        "continuation (language_modeling); context, answer, aliases (generation)"
    )
    type: IclType = Field(description="what is scored")
    few_shot: Whole = Field(0, description="examples before each question, from the same file")
    prompt: str = Field("", description="text before the first example")
    example_delimiter: str = Field("\n", description="text between examples; it also ends a generated answer")
    continuation_delimiter: str = Field(" ", description="text between a question and its answer")
    question_prelimiter: str = Field("", description="text before every question")
    tokens: Positive = Field(64, description="generation: most tokens of an answer")


class TasksSpec(Section):
    """Scores on tasks of lm-evaluation-harness while training (extra `eval`). They change no number of the training."""

    names: list[str] = Field([], description="tasks, groups or tags of the harness, or of the files in `dir`")
    icl: list[IclTaskSpec] = Field([], description="in-context learning tasks in LLM-Foundry's JSONL form")
    every: DurationField = Field(Duration(1000.0, "steps"), description="how often; also after the last step")
    dir: str | None = Field(
        None, description="directory with task files of your own; data files that they name are relative to it"
    )
    few_shot: Whole | None = Field(None, description="examples before each question; default: as each task says")
    limit: Positive | None = Field(None, description="score only the first so many samples of each task")
    batch: Positive = Field(8, description="texts in a forward pass of a rank")
