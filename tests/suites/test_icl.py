"""LLM-Foundry's in-context learning tasks are taken over into the run spec, and prompts are put together as Foundry does it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from argosy.config.foreign.foundry import from_foundry
from argosy.config.foreign.foundry_icl import read_icl_tasks
from argosy.config.suites import IclTaskSpec, IclType, TasksSpec
from argosy.errors import ArgosyError

TASKS: list[dict[str, Any]] = [
    {
        "label": "piqa", "dataset_uri": "eval/piqa.jsonl", "num_fewshot": [0, 2], "icl_task_type": "multiple_choice",
        "continuation_delimiter": "\nAnswer: ", "metric_names": ["InContextLearningMultipleChoiceAccuracy"],
    },
    {"label": "winograd", "dataset_uri": "eval/w.jsonl", "num_fewshot": [0], "icl_task_type": "schema"},
    {"label": "trivia", "dataset_uri": "eval/t.jsonl", "icl_task_type": "generation_task_with_answers", "cot_delimiter": "#"},
    {"label": "code", "dataset_uri": "eval/c.jsonl", "icl_task_type": "code_evaluation"},
]  # fmt: skip
TRAIN: dict[str, Any] = {
    "model": {"name": "mpt_causal_lm", "d_model": 64, "n_heads": 4, "n_layers": 2, "vocab_size": 257},
    "eval_interval": "500ba",
    "icl_tasks": TASKS,
}


def test_tasks_of_a_train_yaml_become_a_section_of_the_run_spec(tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_text(yaml.safe_dump(TRAIN | {"eval_loader": {"dataset": {"local": "corpus", "split": "val"}}}))
    draft = from_foundry(path)
    section = TasksSpec.model_validate(draft.get("eval.tasks"))
    assert str(section.every) == "500ba"
    assert [(task.name, task.type, task.few_shot) for task in section.icl] == [
        ("piqa-0-shot", "multiple_choice", 0),
        ("piqa-2-shot", "multiple_choice", 2),
        ("winograd", "schema", 0),
        ("trivia", "generation", 0),
    ]
    assert section.icl[0].continuation_delimiter == "\nAnswer: "
    assert any("code_evaluation" in item for item in draft.left)
    assert "icl_tasks.trivia.cot_delimiter: #" in draft.left


def test_tasks_that_cannot_be_scored_there_are_listed(tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_text(yaml.safe_dump(TRAIN))
    assert any("no eval_loader" in item for item in from_foundry(path).left)
    path.write_text(yaml.safe_dump(TRAIN | {"icl_tasks": "eval/yamls/tasks.yaml"}))
    assert any("--icl-tasks eval/yamls/tasks.yaml" in item for item in from_foundry(path).left)


def test_a_file_of_tasks_is_read(tmp_path: Path) -> None:
    path = tmp_path / "tasks.yaml"
    path.write_text(yaml.safe_dump({"icl_tasks": TASKS[:2]}))
    sections, left = read_icl_tasks(path)
    assert ([section["name"] for section in sections], left) == (["piqa-0-shot", "piqa-2-shot", "winograd"], [])


def test_the_length_of_an_answer_is_taken_over_and_other_settings_of_generation_are_listed(tmp_path: Path) -> None:
    from argosy.infer.evaluate_tasks import read_icl_tasks as read_specs
    from argosy.suites.icl_tasks import harness_config

    def write(kind: str, **settings: Any) -> Path:
        entry = {"label": "qa", "dataset_uri": "qa.jsonl", "icl_task_type": kind, "generation_kwargs": settings}
        (tmp_path / "tasks.yaml").write_text(yaml.safe_dump({"icl_tasks": [entry]}))
        return tmp_path / "tasks.yaml"

    for name in ("max_new_tokens", "max_gen_toks"):
        path = write(
            "generation_task_with_answers", **{name: 5}, do_sample=False, use_cache=True, top_p=0.9, num_beams=1
        )
        assert read_icl_tasks(path)[1] == []
        [task] = read_specs(path)
        assert harness_config(task)["generation_kwargs"]["max_gen_toks"] == 5
    [section], left = read_icl_tasks(
        write("generation_task_with_answers", do_sample=True, temperature=0.7, num_beams=4)
    )
    assert "tokens" not in section
    assert [item.split(": ")[0].rpartition(".")[2] for item in left] == ["do_sample", "num_beams", "temperature"]
    [section], [item] = read_icl_tasks(write("multiple_choice", max_new_tokens=5))
    assert "tokens" not in section
    assert "only a generation task" in item
    with pytest.raises(ArgosyError, match="greater than or equal to 1") as refused:
        read_specs(write("generation_task_with_answers", max_new_tokens=0))
    assert refused.value.key == "icl_tasks.qa.tokens"


ROWS: dict[IclType, list[dict[str, Any]]] = {
    "multiple_choice": [{"query": f"Q{n}?", "choices": ["yes", "no"], "gold": 1} for n in range(2)],
    "schema": [{"context_options": [f"a{n}", f"b{n}"], "continuation": f"c{n}", "gold": 0} for n in range(2)],
    "language_modeling": [{"context": f"Q{n}?", "continuation": "no"} for n in range(2)],
    "generation": [{"context": f"Q{n}?", "answer": "no", "aliases": ["non"]} for n in range(2)],
}


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("multiple_choice", [("{{n}}\nQ: Q1?\nA: no\n\nQ: Q0?\nA:", " yes"), ("{{n}}\nQ: Q1?\nA: no\n\nQ: Q0?\nA:", " no")]),
        ("schema", [("{{n}}\nQ: a1\nA: c1\n\nQ: a0\nA:", " c0"), ("{{n}}\nQ: a1\nA: c1\n\nQ: b0\nA:", " c0")]),
        ("language_modeling", [("{{n}}\nQ: Q1?\nA: no\n\nQ: Q0?\nA:", " no")]),
        ("generation", [("{{n}}\nQ: Q1?\nA: no\n\nQ: Q0?\nA:",)]),
    ],
)  # fmt: skip
def test_prompts_have_examples_and_delimiters_where_foundry_has_them_and_are_no_templates(
    kind: IclType, expected: list[tuple[str, ...]], tmp_path: Path
) -> None:
    """A template that is not plain text would fail here: `n` and `{% x %}` mean nothing."""
    from argosy.suites.harness_tasks import HarnessTasks
    from argosy.suites.icl_tasks import harness_config

    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[kind]))
    strange = "{% x %}{#\\ "
    task = IclTaskSpec(
        name="piqa", data=str(tmp_path / "rows.jsonl"), type=kind, few_shot=1, prompt=f"{strange}{{{{n}}}}\n",
        question_prelimiter=f"{strange}Q: ", continuation_delimiter="\nA: ", example_delimiter="\n\n",
    )  # fmt: skip
    [loaded] = HarnessTasks([], configs=[harness_config(task)])._loaded["tasks"].values()
    loaded.set_fewshot_seed(seed=1)
    loaded.build_all_requests(limit=1, rank=0, world_size=1)
    found = [tuple(part for part in request.args if isinstance(part, str)) for request in loaded.instances]
    assert [(context.replace(strange, ""), *rest) for context, *rest in found] == expected
    assert all(context.count(strange) == 3 for context, *_ in found)
