"""LLM-Foundry's `icl_tasks`, the in-context learning tasks of a train.yaml or of a file of their own, as `eval.tasks.icl`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from argosy.config.foreign.draft import Draft
from argosy.config.suites import ICL_TYPES, IclType
from argosy.config.yaml_reader import read_yaml
from argosy.errors import ArgosyError

# Their key and ours.
_KEYS = {
    "dataset_uri": "data",
    "prompt_string": "prompt",
    "example_delimiter": "example_delimiter",
    "continuation_delimiter": "continuation_delimiter",
    "question_prelimiter": "question_prelimiter",
}
_READ = {"label", "icl_task_type", "num_fewshot", "generation_kwargs", *_KEYS}
# Keys that need no counterpart: the metrics follow from the type.
_NEEDLESS = {"metric_names", "batch_size", "has_categories"}
# Names of the most tokens of an answer in `generation_kwargs`.
_LENGTHS = ("max_new_tokens", "max_gen_toks")
# Settings that change no answer, values that are those of greedy decoding, and settings that only sampling reads.
_UNREAD = {"use_cache", "pad_token_id", *_LENGTHS}
_GREEDY = {"do_sample": False, "num_beams": 1, "temperature": 0}
_SAMPLING = {"temperature", "top_k", "top_p"}


def read_icl_tasks(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the tasks of a file with a list `icl_tasks`, as sections of the run spec, and what has no counterpart."""
    tree = read_yaml(path)[0]
    entries = tree.get("icl_tasks") if isinstance(tree, dict) else None
    if not isinstance(entries, list):
        raise ArgosyError(
            "config.bad-yaml",
            f"{path} has no list `icl_tasks`",
            fix="give a tasks.yaml of LLM-Foundry's scripts/eval/yamls",
        )
    return icl_sections(entries)


def icl_sections(entries: list[Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return tasks as sections of the run spec, one for each number of few-shot examples, and what has no counterpart."""
    left: list[str] = []
    return [section for entry in entries for section in _sections(entry, left)], left


def _sections(entry: Any, left: list[str]) -> Iterator[dict[str, Any]]:
    if not isinstance(entry, dict) or "label" not in entry or "dataset_uri" not in entry:
        left.append(f"icl_tasks: {entry}: a task has a label and a dataset_uri")
        return
    label, kind = str(entry["label"]), ICL_TYPES.get(str(entry.get("icl_task_type")))
    if kind is None:
        left.append(
            f"icl_tasks.{label}: icl_task_type {entry.get('icl_task_type')}: {', '.join(ICL_TYPES)} can be scored"
        )
        return
    left += [f"icl_tasks.{label}.{key}: {entry[key]}" for key in sorted(entry.keys() - _READ - _NEEDLESS)]
    tokens = _tokens(label, kind, entry.get("generation_kwargs"), left)
    shots = entry.get("num_fewshot", [0])
    shots = shots if isinstance(shots, list) else [shots]
    for count in shots:
        section: dict[str, Any] = {ours: entry[theirs] for theirs, ours in _KEYS.items() if theirs in entry}
        name = label if len(shots) == 1 else f"{label}-{count}-shot"
        yield {"name": name, "type": kind, "few_shot": count} | section | tokens


def _tokens(label: str, kind: IclType, settings: Any, left: list[str]) -> dict[str, Any]:
    """Return the most tokens of an answer, if `generation_kwargs` say it. Their other settings that matter go into `left`."""
    if settings is None:
        return {}
    where = f"icl_tasks.{label}.generation_kwargs"
    if kind != "generation" or not isinstance(settings, dict):
        why = "only a generation task writes answers" if kind != "generation" else "not a section"
        left.append(f"{where}: {settings}: {why}")
        return {}
    same = {key for key, value in _GREEDY.items() if key in settings and settings[key] == value}
    unread = _UNREAD | same | (set() if settings.get("do_sample") else _SAMPLING)
    why = f"answers are greedy, and only {_LENGTHS[0]} is taken over"
    left += [f"{where}.{key}: {settings[key]}: {why}" for key in sorted(settings.keys() - unread)]
    length = next((settings[key] for key in _LENGTHS if key in settings), None)
    return {} if length is None else {"tokens": length}


def take_over_icl(draft: Draft, entries: Any) -> None:
    """Add a train.yaml's `icl_tasks` to a draft whose evaluation is already translated."""
    if entries is None:
        return
    if not isinstance(entries, list):
        draft.left.append(
            f"icl_tasks: {entries}: `argosy eval RUN --icl-tasks {entries}` scores the tasks of such a file"
        )
        return
    sections, left = icl_sections(entries)
    draft.left += left
    if draft.get("eval") == "off":
        draft.left.append(
            "icl_tasks: Argosy scores tasks only in a run that evaluates, and this one has no eval_loader"
        )
    elif sections:
        every = draft.get("eval.every")
        draft.set("eval.tasks", {"icl": sections} | ({} if every is None else {"every": every}))
        draft.notes.append("icl_tasks: paths of their data stay as they are, relative to where training starts")
