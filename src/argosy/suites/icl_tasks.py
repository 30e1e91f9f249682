"""In-context learning tasks of LLM-Foundry as task configs of lm-evaluation-harness.

Prompts are put together as Foundry does it: the prompt string, examples with a delimiter between, and the question. Three things
differ. Few-shot examples are those that the harness draws. Choices are compared by their log-likelihood (`acc`) and by that per byte
(`acc_norm`), where Foundry compares log-likelihoods per token. A generated answer is compared without case and punctuation.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from argosy.config.suites import IclTaskSpec, IclType

_ACCURACIES = [{"metric": "acc"}, {"metric": "acc_norm"}]


def _multiple_choice(task: IclTaskSpec) -> dict[str, Any]:
    return {
        "output_type": "multiple_choice",
        "doc_to_text": "{{query}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{gold}}",
        "metric_list": _ACCURACIES,
    }


def _schema(task: IclTaskSpec) -> dict[str, Any]:
    """Contexts compete for one continuation: the harness's form for this has the choices as inputs."""
    return {
        "output_type": "multiple_choice",
        "doc_to_text": "{{gold}}",
        "doc_to_choice": "{{context_options}}",
        "doc_to_target": "{{continuation}}",
        "metric_list": [{"metric": "acc"}],
    }


def _language_modeling(task: IclTaskSpec) -> dict[str, Any]:
    return {
        "output_type": "loglikelihood",
        "doc_to_text": "{{context}}",
        "doc_to_target": "{{continuation}}",
        "metric_list": [{"metric": "acc"}, {"metric": "perplexity"}],
    }


def _generation(task: IclTaskSpec) -> dict[str, Any]:
    return {
        "output_type": "generate_until",
        "doc_to_text": "{{context}}",
        "doc_to_target": "{{[answer] + (aliases or [])}}",
        "generation_kwargs": {"until": [task.example_delimiter], "max_gen_toks": task.tokens, "do_sample": False},
        "filter_list": [{"name": "none", "filter": [{"function": "remove_whitespace"}, {"function": "take_first"}]}],
        "metric_list": [{"metric": "exact_match", "ignore_case": True, "ignore_punctuation": True}],
    }


_FORMS: dict[IclType, Callable[[IclTaskSpec], dict[str, Any]]] = {
    "multiple_choice": _multiple_choice,
    "schema": _schema,
    "language_modeling": _language_modeling,
    "generation": _generation,
}


def harness_config(task: IclTaskSpec) -> dict[str, Any]:
    """Return the config with which the harness runs a task."""
    form = _FORMS[task.type](task)
    if task.question_prelimiter:
        form["doc_to_text"] = task.question_prelimiter + form["doc_to_text"]
    return form | {
        "task": task.name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(Path(task.data).absolute())}},
        "test_split": "test",
        "fewshot_split": "test",
        "num_fewshot": task.few_shot,
        "description": task.prompt,
        "target_delimiter": task.continuation_delimiter,
        "fewshot_delimiter": task.example_delimiter,
    }
