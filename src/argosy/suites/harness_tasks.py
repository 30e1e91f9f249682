"""Tasks of lm-evaluation-harness, by name or from a local directory, and their scores."""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from argosy.errors import ArgosyError
from argosy.extras import install_extra

if TYPE_CHECKING:
    from argosy.suites.harness_model import HarnessModel

# The seed with which few-shot examples are drawn, the default of the harness.
_SHOTS_SEED = 1234
# Resamples for the standard errors that have no formula. The harness takes 100,000, which takes minutes.
_RESAMPLES = 1000


@dataclass(frozen=True)
class TaskScores:
    """The metrics of one task or group, with their standard errors."""

    metrics: dict[str, float]
    errors: dict[str, float]
    # None: a group, which has no samples of its own.
    samples: int | None
    shots: int | None

    def as_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = dict(self.metrics)
        found |= {f"{name}_stderr": value for name, value in self.errors.items()}
        return found | {"samples": self.samples, "few_shot": self.shots}


def require_harness(key: str) -> None:
    """Refuse to go on without the `eval` extra."""
    if importlib.util.find_spec("lm_eval") is None:
        raise ArgosyError(
            "eval.missing-extra", "tasks are run by lm-evaluation-harness", key=key, fix=install_extra("eval")
        )


class HarnessTasks:
    """Loaded tasks with their data. Loading reads every data set; scoring may then be repeated."""

    def __init__(
        self,
        names: Sequence[str],
        *,
        configs: Sequence[dict[str, Any]] = (),
        directory: Path | None = None,
        shots: int | None = None,
        key: str = "--tasks",
    ) -> None:
        """Args:
        names: tasks, groups or tags, or patterns of these with `*`.
        configs: further tasks, as the contents of task files. Their few-shot examples are their own.
        directory: task files of your own, which take precedence. Paths in them are relative to it.
        shots: few-shot examples before each question. Default: as each task says. A task that says 0 keeps 0.
        key: the setting with the names, for refusals.
        """
        require_harness(key)
        self._key = key
        # Absolute, because tasks are loaded with this as the current directory.
        directory = None if directory is None else directory.absolute()
        manager = _manager(names, directory, key)
        with _in_directory(directory), _load_faults(key):
            self._loaded = manager.load([*names, *configs])
        self._require_text()
        complete = {config["task"] for config in configs}
        for name, task in self._loaded["tasks"].items():
            own = task.get_config("num_fewshot")
            if name not in complete:
                task.set_config(key="num_fewshot", value=(own or 0) if shots is None or own == 0 else shots)

    def score(self, model: HarnessModel, *, limit: int | None = None, resample: bool = True) -> dict[str, TaskScores]:
        """Return the scores of every task and group.

        Args:
            limit: the first so many samples of each task only.
            resample: compute standard errors that have no formula, by resampling.
        """
        from lm_eval.evaluator import evaluate

        for task in self._loaded["tasks"].values():
            # Every call draws the same few-shot examples.
            task.set_fewshot_seed(seed=_SHOTS_SEED)
        with _quiet_harness():
            found = evaluate(
                lm=model,
                task_dict=self._loaded,
                limit=limit,
                bootstrap_iters=_RESAMPLES if resample else 0,
                log_samples=False,
            )
        return {name: _scores(name, values, found) for name, values in found["results"].items()}

    def _require_text(self) -> None:
        for name, task in self._loaded["tasks"].items():
            asks = {"UNSAFE_CODE": "runs the code that a model writes", "MULTIMODAL": "shows pictures or sound"}
            for mark, what in asks.items():
                if getattr(task, mark, False):
                    raise ArgosyError(
                        "eval.bad-task", f"the task {name} {what}", key=self._key, value=name, fix="leave it out"
                    )


def _scores(name: str, values: dict[str, Any], found: dict[str, Any]) -> TaskScores:
    """Return the scores of one task from the results of the harness, whose keys are `metric,filter`."""
    metrics: dict[str, float] = {}
    errors: dict[str, float] = {}
    for key, value in values.items():
        metric, comma, kind = key.partition(",")
        if not comma or not isinstance(value, int | float) or isinstance(value, bool):
            continue
        into, metric = (errors, metric.removesuffix("_stderr")) if metric.endswith("_stderr") else (metrics, metric)
        into[metric if kind == "none" else f"{metric}:{kind}"] = float(value)
    counted = found.get("n-samples", {}).get(name)
    shots = found.get("n-shot", {}).get(name)
    return TaskScores(metrics, errors, None if counted is None else int(counted["effective"]), shots)


def _manager(names: Sequence[str], directory: Path | None, key: str) -> Any:
    """Return a manager that knows the names. The thousands of tasks of the harness are read only if one of them is asked for."""
    from lm_eval.tasks import TaskManager

    if directory is None and not names:
        return TaskManager(include_defaults=False)
    if directory is not None:
        if not directory.is_dir():
            raise ArgosyError(
                "data.not-found",
                f"{directory} is not a directory",
                key="--task-dir" if key == "--tasks" else f"{key}.dir",
                fix="name a directory of task files",
            )
        own = TaskManager(include_path=str(directory), include_defaults=False)
        if not _unknown(own, names):
            return own
    manager = TaskManager(include_path=None if directory is None else str(directory))
    if missing := _unknown(manager, names):
        close = difflib.get_close_matches(missing[0], manager.all_tasks, n=3)
        raise ArgosyError(
            "eval.unknown-task",
            f"there is no task {', '.join(missing)}",
            key=key,
            value=",".join(names),
            fix=f"did you mean {', '.join(close)}?"
            if close
            else "`lm-eval ls tasks` lists those of the harness; --task-dir adds your own",
        )
    return manager


def _unknown(manager: Any, names: Sequence[str]) -> list[str]:
    return [name for name in names if not manager.match_tasks([name])]


@contextlib.contextmanager
def _in_directory(directory: Path | None) -> Iterator[None]:
    """Resolve relative paths against the directory: the data files that task files name."""
    with contextlib.nullcontext() if directory is None else contextlib.chdir(directory):
        yield


@contextlib.contextmanager
def _quiet_harness() -> Iterator[None]:
    """Show only errors of the harness, which reports every setting as a warning, and no progress bars of short steps."""
    import datasets
    from lm_eval.api import task

    logger, bar = logging.getLogger("lm_eval"), task.tqdm
    level, hidden = logger.level, datasets.are_progress_bars_disabled()
    logger.setLevel(logging.ERROR)
    task.tqdm = partial(bar, disable=True)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        logger.setLevel(level)
        task.tqdm = bar
        if not hidden:
            datasets.enable_progress_bars()


@contextlib.contextmanager
def _load_faults(key: str) -> Iterator[None]:
    """Turn whatever loading a task raises into a refusal. Tasks are other people's files, code and data."""
    try:
        with _quiet_harness():
            yield
    except Exception as error:
        raise ArgosyError(
            "eval.bad-task",
            f"a task cannot be loaded: {type(error).__name__}: {error}",
            key=key,
            fix="data sets of the harness come from the Hugging Face Hub: fetch them where there is a network, or use task files "
            "of your own (--task-dir, eval.tasks.dir); `argosy --debug` shows where it failed",
        ) from error
