"""The planner's answers for the dashboard: those of `argosy plan` for a preset or for a run that the dashboard shows.

A browser names presets, runs and clusters, never files.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from pydantic import ValidationError
from starlette.datastructures import QueryParams

from argosy.config.schema import RunSpec
from argosy.errors import ArgosyError
from argosy.families.family_registry import ALIASES, PRESETS
from argosy.plan.advise import Advice, Question, answer
from argosy.plan.clusters import compare
from argosy.plan.hardware import facts
from argosy.watch.run_list import Run

# What a run is called where a preset could stand.
_RUN = "run:"
_TOP = 12
# Clusters of one request: each is a search of up to a second, or ten of them with a limit of days.
_MOST_CLUSTERS = 8


def choices(runs: list[Run]) -> dict[str, Any]:
    """Return the models and clusters that the planner's page offers."""
    known = facts()
    clusters = [f"1x{name}" for name in known.instances] + [f"8x{name}" for name in known.gpus]
    own = [_RUN + run.name for run in runs if run.spec()]
    return {"models": [*sorted([*PRESETS, *ALIASES]), *own], "clusters": clusters}


def plan(query: QueryParams, find: Callable[[str], Run]) -> dict[str, Any]:
    """Answer for one cluster as `argosy plan --json` does, or for several clusters or a limit of days as a comparison."""
    target = _target(query.get("model", ""), find)
    number = {key: _number(query, key) for key in ("price", "spot", "within")}
    if number["spot"] is not None and not 0.01 <= number["spot"] <= 1:
        raise _unreadable("spot", query["spot"], "a share of the on-demand price from 0.01 to 1, as 0.4")

    def ask(cluster: str | None) -> Advice:
        question = Question.read(
            target, [], cluster=cluster, global_batch=_whole(query, "global_batch"), seq_len=_whole(query, "seq_len"),
            tokens=query.get("tokens") or None, precision=query.get("precision") or None, what_if=query.get("what_if") or None,
            price=number["price"], hardware=None, spot=number["spot"],
        )  # fmt: skip
        return answer(question, top=_TOP)

    clusters = [name for name in query.getlist("cluster") if name.strip()]
    if len(clusters) > _MOST_CLUSTERS:
        raise _unreadable("cluster", ", ".join(clusters), f"at most {_MOST_CLUSTERS} clusters")
    if len(clusters) > 1 or number["within"]:
        names = clusters or [ask(None).question.cluster.name]
        return compare(names, ask, number["within"] or None).as_dict()
    return ask(clusters[0] if clusters else None).as_dict()


def _target(model: str, find: Callable[[str], Run]) -> str | RunSpec:
    if model.startswith(_RUN):
        try:
            return RunSpec.model_validate(find(model.removeprefix(_RUN)).spec())
        except ValidationError:
            raise ArgosyError(
                "plan.bad-question",
                f"{model} has no run spec that this version can read",
                key="model",
                fix="choose another of the list",
            ) from None
    if model not in PRESETS and model not in ALIASES:
        raise ArgosyError(
            "config.unknown-preset", f"there is no model preset {model!r}", key="model", fix="choose one of the list"
        )
    return model


def _whole(query: QueryParams, key: str) -> int | None:
    text = query.get(key, "").strip()
    if not text:
        return None
    if re.fullmatch(r"0*[1-9][0-9]{0,9}", text) is None:
        raise _unreadable(key, text, "a whole number from 1 to 9,999,999,999")
    return int(text)


def _number(query: QueryParams, key: str) -> float | None:
    text = query.get(key, "").strip()
    if not text:
        return None
    if re.fullmatch(r"[0-9]{0,9}\.?[0-9]{0,9}", text) is None or text == ".":
        raise _unreadable(key, text, "a number, as 12.5")
    return float(text)


def _unreadable(key: str, text: str, wanted: str) -> ArgosyError:
    return ArgosyError(
        "plan.bad-question",
        f"{text[:40]!r} is not {wanted}",
        key=key,
        value=text[:40],
        fix=f"write {wanted}, or leave it out",
    )
