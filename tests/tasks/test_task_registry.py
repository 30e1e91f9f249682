"""Every task is registered once, fits some architecture, and a run can ask for any that its model can do and for no other."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from argosy.config.counts import training_flops_per_token
from argosy.config.model import ModelSpec
from argosy.config.resolve import resolve, resolve_model
from argosy.config.schema import DataSpec, RunSpec
from argosy.data.synthetic import synthetic_batch
from argosy.errors import ArgosyError
from argosy.families.architecture import DECODER, ENCODER, ENCODER_DECODER, RETRIEVER
from argosy.families.family_registry import FAMILIES
from argosy.tasks.task_registry import SECTIONS, TASKS, TaskName, run_flops_per_token, task_of, tasks_for

PRESETS = {"gpt2": "causal-lm", "bert-base": "masked-lm", "t5-small": "span-corruption", "ict-base": "inverse-cloze"}


def run(preset: str, *keys: str) -> RunSpec:
    return resolve(
        None, [f"model={preset}", "data.train=corpus", "train.global_batch=4", "train.steps=1", "optim.lr=1e-3", *keys]
    ).spec


def test_the_names_and_sections_of_the_run_spec_are_those_of_the_tasks() -> None:
    assert set(get_args(TaskName)) == set(TASKS)
    assert set(get_args(ModelSpec.model_fields["family"].annotation)) == set(FAMILIES)
    assert set(SECTIONS) < set(DataSpec.model_fields)
    for task in TASKS.values():
        if task.section is not None:
            assert set(task.roles) < set(task.settings_type.model_fields)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_run_that_names_no_task_has_its_architectures_own(preset: str) -> None:
    assert task_of(run(preset)).name == PRESETS[preset]
    assert run(preset).data.task is None
    assert task_of(run(preset, f"data.task={PRESETS[preset]}")).name == PRESETS[preset]


def test_every_architecture_has_a_task() -> None:
    for architecture in (DECODER, ENCODER, RETRIEVER, ENCODER_DECODER):
        assert tasks_for(architecture)


@pytest.mark.parametrize(
    ("preset", "task"),
    [(preset, task) for preset, own in PRESETS.items() for task in TASKS if DECODER not in TASKS[task].architectures and task != own],
)  # fmt: skip
def test_a_task_the_model_cannot_do_is_refused_with_those_it_can(preset: str, task: str) -> None:
    with pytest.raises(ArgosyError, match="is no task for the architecture") as refused:
        run(preset, f"data.task={task}")
    assert PRESETS[preset] in (refused.value.fix or "")


@pytest.mark.parametrize(
    ("preset", "keys", "prompt"),
    [
        ("gpt2", [], "Once upon a time"),
        ("gpt2", ["data.task=prefix-lm"], "Once upon a time"),
        ("bert-base", [], "Once upon a [MASK]"),
        ("bert-base", ["data.bert.mask=<mask>"], "Once upon a <mask>"),
        ("bert-base", ["data.bert.mask=103"], "Once upon a [MASK]"),
        ("t5-small", [], "Once upon a <extra_id_0>"),
        ("ict-base", [], None),
    ],
)
def test_a_task_has_a_prompt_for_what_it_is_trained_to_write(preset: str, keys: list[str], prompt: str | None) -> None:
    spec = run(preset, *keys)
    assert task_of(spec).example_prompt(spec) == prompt


def test_an_unknown_task_is_refused() -> None:
    with pytest.raises(ArgosyError, match="causal-lm"):
        run("gpt2", "data.task=guessing")


@pytest.mark.parametrize("preset", PRESETS)
def test_a_synthetic_batch_has_the_inputs_the_task_gives_its_model(preset: str) -> None:
    inputs: dict[str, set[str]] = {
        "gpt2": set(),
        "bert-base": {"token_types", "padding_mask", "predicted", "pair_labels"},
        "t5-small": {"decoder_tokens"},
        "ict-base": {"padding_mask", "query_tokens", "query_padding_mask"},
    }
    batch: Any = synthetic_batch(run(preset, "data.seq_len=32"))
    assert set(batch.inputs) == inputs[preset]
    assert len(batch.tokens) == 4


def test_the_flops_of_a_run_follow_the_settings_of_its_task() -> None:
    """BERT's output head runs on the tokens that are masked, however many the run spec says."""

    def flops(*keys: str) -> float:
        return run_flops_per_token(run("bert-base", *keys))

    model = resolve_model("bert-base")
    head = model.vocab_size * model.hidden + ENCODER.ends(model).matmul
    assert flops() == training_flops_per_token(model) == flops("data.bert.mask_rate=0.15")
    assert flops("data.bert.mask_rate=0.4") - flops() == pytest.approx(6 * (0.4 - 0.15) * head)
