"""Training from Python: the run that `argosy train` would make, with a callback."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from argosy.api.run_specs import Metrics, Source, read_metrics, resolved
from argosy.checkpoint.store import listed, step_of
from argosy.errors import EXIT_DONE
from argosy.record.rundir import RunDir
from argosy.supervise.world import find_world
from argosy.train.interrupt import stop_run
from argosy.train.run import TrainOptions, settle, train


class OnRecord(Protocol):
    """A callback of `train_run`: takes a record of metrics, and returns False to stop the run."""

    def __call__(self, record: Mapping[str, Any], /) -> bool | None: ...


@dataclass(frozen=True)
class TrainedRun:
    """A run after `train_run`: finished, or stopped by its callback or a signal and ready to be resumed."""

    directory: Path
    # The step of the newest checkpoint.
    step: int
    finished: bool

    def metrics(self) -> Metrics:
        """Read what the run logged."""
        return read_metrics(self.directory)


def train_run(
    run: Source,
    overrides: Mapping[str, Any] | None = None,
    *,
    on_record: OnRecord | None = None,
    fresh: bool = False,
    archive: bool = False,
    quiet: bool = True,
) -> TrainedRun:
    """Train a run, or resume it from its newest checkpoint, as `argosy train` does.

    Under torchrun every rank calls it, and the first rank calls `on_record`. One process trains on one device. In the
    main thread, Ctrl-C, SIGTERM and SIGUSR1 save a checkpoint and stop the run; elsewhere Python allows no handlers.

    Args:
        run: the path of a run.yaml, or the same keys as a dict.
        overrides: changed keys in dotted form, as `{"train.steps": 100}`.
        on_record: called with each record of metrics: every logged step (`log.every`) and every evaluation. If it
            returns False, the run saves a checkpoint and stops after this step; call `train_run` again to resume. An
            exception that it raises ends the run at once, without a new checkpoint, and reaches the caller.
        fresh: start anew, and refuse a run directory that holds a run.
        archive: with `fresh`, move an earlier run aside instead of refusing.
        quiet: print no step lines.

    Raises:
        ArgosyError: the spec, the data or the machine do not allow this run; nothing was written then.
    """
    source = Path(run) if isinstance(run, str) else run
    world = find_world(os.environ)
    pairs = list((overrides or {}).items())
    settled = settle(resolved(source, overrides), source, pairs, world.size, fresh=fresh)
    listener = None if on_record is None else _stoppable(on_record)
    options = TrainOptions(fresh=fresh, archive=archive, quiet=quiet, on_record=listener)
    code = train(settled, source if isinstance(source, Path) else None, options, world)
    directory = RunDir(Path(settled.spec.runs_dir) / settled.spec.name)
    saved = [step_of(path) for path in listed(directory.checkpoints)]
    return TrainedRun(directory.root, max(saved, default=0), code == EXIT_DONE)


def _stoppable(on_record: OnRecord) -> Callable[[Mapping[str, Any]], None]:
    """Turn False into a request to save and stop, which all ranks follow at the same step."""

    def listen(record: Mapping[str, Any]) -> None:
        if on_record(dict(record)) is False:
            stop_run()

    return listen
