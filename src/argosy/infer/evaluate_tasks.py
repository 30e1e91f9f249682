"""`argosy eval --tasks`: the scores of a trained model on tasks of lm-evaluation-harness."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from argosy.config.foreign.foundry_icl import read_icl_tasks as read_sections
from argosy.config.refusals import refusal_of
from argosy.config.suites import IclTaskSpec
from argosy.errors import ArgosyError
from argosy.infer.generate import source_tokenizer
from argosy.infer.loading import Loaded, load_model
from argosy.infer.rank_loading import load_on_ranks
from argosy.suites.harness_tasks import HarnessTasks, TaskScores, require_harness
from argosy.suites.icl_tasks import harness_config
from argosy.supervise.world import World
from argosy.tasks.task_registry import own_task, task_of

if TYPE_CHECKING:
    from argosy.suites.harness_model import TextModel

_log = logging.getLogger(__name__)


def evaluate_tasks(
    where: str,
    names: Sequence[str],
    *,
    icl: Sequence[IclTaskSpec] = (),
    directory: Path | None = None,
    shots: int | None = None,
    limit: int | None = None,
    batch: int = 8,
    device: str | None = None,
    precision: str | None = None,
    layout: Sequence[str] = (),
    world: World | None = None,
) -> tuple[dict[str, TaskScores], int]:
    """Score a model on tasks. Returns the scores by task and the step it was trained to.

    Args:
        icl: further tasks, in LLM-Foundry's form.
        shots: examples before each question of the tasks in `names`. Default: as each task says.
        limit: the first so many samples of each task only.
        batch: texts in a forward pass.
        layout: keys of `parallel` for the ranks of the world, such as "tp=2".
        world: the rank of this process. All ranks return the same. Default: one process.
    """
    require_harness("--tasks")
    if not names and not icl:
        raise ArgosyError("config.bad-value", "no task is named", key="--tasks", fix="--tasks arc_easy,hellaswag")
    from argosy.suites.harness_model import HarnessModel

    configs = [harness_config(task) for task in icl]
    tasks = HarnessTasks(names, configs=configs, directory=directory, shots=shots)
    if world is None or world.size == 1:
        loaded = load_model(where, device=device, precision=precision)
        return tasks.score(HarnessModel(text_model(loaded), batch=batch), limit=limit), loaded.source.step
    from argosy.suites.harness_model import rank_share

    with load_on_ranks(where, layout, world, device) as (loaded, engine, mesh):
        text = replace(text_model(loaded), model=engine.logits, takes_cache=engine.takes_cache)
        model = HarnessModel(text, batch=batch, share=rank_share(engine.model, mesh))
        return tasks.score(model, limit=limit), loaded.source.step


def text_model(loaded: Loaded) -> TextModel:
    """Return a loaded decoder as the harness needs it."""
    from argosy.suites.harness_model import TextModel

    source = loaded.source
    task = own_task(source.model) if loaded.spec is None else task_of(loaded.spec)
    if task.writes != "continuation":
        raise ArgosyError(
            "eval.no-decoder",
            f"{source.where} is not a decoder: tasks are scored by continuing a text",
            key="--tasks",
            fix="leave --tasks out: `argosy eval` computes the loss of any model",
        )
    tokenizer = source_tokenizer(source)
    end = source.eod_id if source.eod_id is not None else tokenizer.eod_id
    start = source.token_ids.get("bos_token_id")
    return TextModel(
        loaded.model,
        tokenizer,
        loaded.device,
        limit=source.model.max_seq_len,
        vocabulary=source.vocabulary(tokenizer),
        end=end,
        start=end if start is None else start,
        opening=source.opening(tokenizer),
        beside=task.prompt_inputs,
    )


def read_icl_tasks(path: Path) -> list[IclTaskSpec]:
    """Return the tasks of an LLM-Foundry file. What has no counterpart is logged."""
    sections, left = read_sections(path)
    for item in left:
        _log.warning("no counterpart: %s", item)
    return [_icl_task(section) for section in sections]


def _icl_task(section: dict[str, Any]) -> IclTaskSpec:
    try:
        return IclTaskSpec.model_validate(section)
    except ValidationError as error:
        raise refusal_of(error, {}, prefix=f"icl_tasks.{section['name']}") from None
