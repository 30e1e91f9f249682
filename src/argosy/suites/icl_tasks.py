"""In-context learning tasks of LLM-Foundry as task configs of lm-evaluation-harness.

Prompts are put together as Foundry does it: the prompt string, examples with a delimiter between, and the question. Three things
differ. Few-shot examples are those that the harness draws. Choices are compared by their log-likelihood (`acc`) and by that per byte
(`acc_norm`), where Foundry compares log-likelihoods per token. A generated answer is compared without case and punctuation.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

from argosy.config.suites import IclTaskSpec, IclType

_ACCURACIES = [{"metric": "acc"}, {"metric": "acc_norm"}]


class _Prompts:
    """Puts the prompts of a task together with functions: the harness would run a template as code.

    White space at the end of the continuation delimiter belongs to the continuation, as Foundry and the harness have it.
    """

    def __init__(self, task: IclTaskSpec) -> None:
        self._before, self._after = task.question_prelimiter, task.continuation_delimiter.rstrip()
        self.space = task.continuation_delimiter[len(self._after) :]

    def question(self, text: str) -> str:
        return f"{self._before}{text}{self._after}"


def _multiple_choice(task: IclTaskSpec, prompts: _Prompts) -> dict[str, Any]:
    return {
        "output_type": "multiple_choice",
        "doc_to_text": lambda row: prompts.question(row["query"]),
        "doc_to_choice": "choices",
        "doc_to_target": lambda row: int(row["gold"]),
        "metric_list": _ACCURACIES,
    }


def _schema(task: IclTaskSpec, prompts: _Prompts) -> dict[str, Any]:
    """Contexts compete for one continuation: the harness's form for this has the choices as inputs, and the text is a number."""
    return {
        "output_type": "multiple_choice",
        "doc_to_text": lambda row: int(row["gold"]),
        "doc_to_choice": lambda row: [prompts.question(context) for context in row["context_options"]],
        "doc_to_target": "continuation",
        "metric_list": [{"metric": "acc"}],
    }


def _language_modeling(task: IclTaskSpec, prompts: _Prompts) -> dict[str, Any]:
    return {
        "output_type": "loglikelihood",
        "doc_to_text": lambda row: prompts.question(row["context"]),
        # The harness puts its delimiter into the examples only.
        "doc_to_target": lambda row: prompts.space + row["continuation"],
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}, {"metric": "perplexity"}],
    }


def _generation(task: IclTaskSpec, prompts: _Prompts) -> dict[str, Any]:
    return {
        "output_type": "generate_until",
        "doc_to_text": lambda row: prompts.question(row["context"]),
        "doc_to_target": lambda row: [row["answer"], *(row.get("aliases") or [])],
        "generation_kwargs": {"until": [task.example_delimiter], "max_gen_toks": task.tokens, "do_sample": False},
        "filter_list": [{"name": "none", "filter": [{"function": "remove_whitespace"}, {"function": "take_first"}]}],
        "metric_list": [{"metric": "exact_match", "ignore_case": True, "ignore_punctuation": True}],
    }


_FORMS: dict[IclType, Callable[[IclTaskSpec, _Prompts], dict[str, Any]]] = {
    "multiple_choice": _multiple_choice,
    "schema": _schema,
    "language_modeling": _language_modeling,
    "generation": _generation,
}


def harness_config(task: IclTaskSpec) -> dict[str, Any]:
    """Return the config with which the harness runs a task."""
    prompts = _Prompts(task)
    common = {
        "task": task.name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(Path(task.data).absolute())}},
        "test_split": "test",
        "fewshot_split": "test",
        "num_fewshot": task.few_shot,
        "description": _literal(task.prompt),
        "target_delimiter": prompts.space,
        "fewshot_delimiter": task.example_delimiter,
    }
    return common | _FORMS[task.type](task, prompts)


def _literal(text: str) -> str:
    """Return a template that renders as `text`: the harness takes no function for a description."""
    return "{{ " + orjson.dumps(text).decode().replace("{", "\\u007b").replace("}", "\\u007d") + " }}"
