"""The trainer's side of checkpoints: which one to resume from, when to save, and how to handle a save that fails.

Every rank saves and loads its own shards, whatever the layouts of the saved and the current run. An asynchronous save takes a
snapshot, for which training waits, and a background thread writes it. The ranks confirm it to each other on a separate process
group. The thread only copies, hashes and writes large blocks, all of which release the GIL. A save that is due while another is
being written is skipped. A save that fails is retried soon, and stops the run only after many failures in a row.
"""

from __future__ import annotations

import errno
import json
import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from argosy.checkpoint.manifest import OPTIMIZER, WEIGHTS, TrainProgress
from argosy.checkpoint.save import Content, Snapshot, contents, write
from argosy.checkpoint.save_plan import Plan, make_plan
from argosy.checkpoint.store import latest, listed, load_into, prune, step_of, sweep
from argosy.config.batches import Batches
from argosy.config.schema import CheckpointSpec
from argosy.config.units import Duration
from argosy.errors import ArgosyError
from argosy.parallel.host_group import make_host_group
from argosy.parallel.mesh import Agreement
from argosy.record.jsonl import now
from argosy.record.rundir import RunDir
from argosy.train.optimizer import Optimizer

# Seconds until the retry of a failed save.
RETRY_S = 60.0
# Seconds until the first save with `every: auto`, which measures the cost of a save.
FIRST_S = 60.0


def first_interval(spec: CheckpointSpec) -> Duration:
    """Return the interval between saves until `auto` has measured one."""
    return Duration(FIRST_S, "seconds") if isinstance(spec.every, str) else spec.every


class Timer:
    """A timer that is due every so many steps, samples or seconds. An interval in samples is due at the step that takes its last
    sample."""

    def __init__(
        self, every: Duration, samples: int | None, batches: Batches, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._every, self._samples, self._batches = every, samples, batches
        self._clock, self._last = clock, clock()

    def every(self, seconds: float) -> None:
        """Change the interval to `seconds`, counted from when the timer was last due."""
        self._every, self._samples = Duration(seconds, "seconds"), None

    def due(self, step: int) -> bool:
        if self._every.unit == "steps":
            return step % int(self._every.amount) == 0
        if self._samples is not None:
            before, after = self._batches.samples(step - 1), self._batches.samples(step)
            return after // self._samples > before // self._samples
        if self._clock() - self._last < self._every.amount:
            return False
        self._last = self._clock()
        return True


@dataclass
class _Writing:
    """A save that is being written."""

    # The number of this save among those that this process has begun.
    number: int
    step: int
    # How long training waited, and how long writing took. At the end all ranks have the times of the first.
    stall_s: float
    write_s: float = 0.0
    thread: threading.Thread | None = None
    path: Path | None = None
    error: BaseException | None = None


class Saving:
    """The checkpoints of a run: restores the newest, saves when one is due, and retries saves that fail."""

    def __init__(
        self,
        run: RunDir,
        spec: CheckpointSpec,
        optimizer: Optimizer,
        timer: Timer,
        agreement: Agreement,
        event: Callable[..., None],
    ) -> None:
        """`event(kind, step, **facts)` writes an event of the run."""
        self._run, self._spec, self._optimizer, self._event = run, spec, optimizer, event
        self._timer, self._agreement = timer, agreement
        self._team, self._snapshot = make_host_group(), Snapshot()
        self._plan: Plan | None = None
        self._writing: _Writing | None = None
        self._begun = self._ended = self._failures = 0
        self._retry_at = math.inf
        agreement.follow(lambda: self._ended)

    def restore(self, notes: list[str]) -> TrainProgress | None:
        """Load weights and optimiser from the newest good checkpoint and return its progress; None if there is no checkpoint."""
        self.finish()
        if self._team.is_first:
            sweep(self._run.checkpoints)
        checkpoint = latest(self._run.checkpoints, report=notes.append, set_aside=True, hosts=self._team)
        if checkpoint is None:
            return None
        optimizer, progress = self._optimizer, checkpoint.progress
        load_into(checkpoint.weights(), optimizer.weights(), checkpoint.path, self._team)
        load_into(checkpoint.optimizer(), optimizer.tensors(), checkpoint.path, self._team)
        optimizer.write_parameters()
        optimizer.set_numbers(progress.optimizer, progress.step)
        notes.append(f"resuming from {checkpoint.path}")
        return progress

    def prepare(self) -> None:
        """Prepare the first save before the first step."""
        if self._spec.mode == "async":
            self._snapshot.prepare(self._files())

    def _files(self) -> dict[str, Content]:
        """Return the files that this rank writes, sharing the tensors' memory."""
        groups = {WEIGHTS: self._optimizer.weights(), OPTIMIZER: self._optimizer.tensors()}
        if self._plan is None:
            self._plan = make_plan(groups, self._team)
        return contents(self._plan, groups, self._team)

    def due(self, step: int) -> bool:
        return self._timer.due(step) or self._agreement.now() >= self._retry_at

    def save(self, step: int, consumed_samples: int, *, last: bool, waits: bool = False, **about: Any) -> list[str]:
        """Save this step. Returns messages for the user.

        Args:
            last: this is the last save of the run: wait for it, and raise if it fails.
            waits: wait for a save that is still being written, instead of skipping this one.
            about: facts for people who look at the checkpoint.
        """
        if self._writing is not None and not (last or waits):
            self._event("save-skipped", step, writing=self._writing.step)
            return [f"step {step} is not saved: step {self._writing.step} is still being written"]
        notes = self.finish()
        if self._team.is_first:
            self._run.require_ours()
        started = time.perf_counter()
        progress = TrainProgress(step, consumed_samples, self._optimizer.numbers(), {"time": now(), **about})
        files = self._files()
        beside = self._spec.mode == "async" and not last
        if beside:
            files = self._snapshot.take(files)
        self._begun += 1
        self._writing = writing = _Writing(self._begun, step, time.perf_counter() - started)
        if beside:
            writing.thread = threading.Thread(target=self._write, args=(writing, progress, files), daemon=True)
            writing.thread.start()
            return notes
        self._write(writing, progress, files)
        return notes + self._settle(last=last)

    def poll(self) -> list[str]:
        """Finish the save being written if all ranks know that it has ended. Returns messages for the user."""
        if self._writing is None or self._agreement.saves < self._writing.number:
            return []
        return self._settle()

    def finish(self) -> list[str]:
        """Wait for the save being written, if there is one."""
        return [] if self._writing is None else self._settle()

    def close(self) -> None:
        """End the work beside training. Wait up to `RETRY_S` for the save being written, if the run has failed; its errors are ignored."""
        self._snapshot.pause(RETRY_S)
        if self._writing is not None and self._writing.thread is not None:
            self._writing.thread.join(RETRY_S)

    def _write(self, writing: _Writing, progress: TrainProgress, files: dict[str, Content]) -> None:
        started = time.perf_counter()
        try:
            if self._plan is None:
                raise AssertionError("a save begins with a plan")
            writing.path = write(self._run.checkpoints, progress, files, self._plan, self._team)
            if self._team.is_first:
                self._prune(self._spec.keep, progress.step)
            writing.write_s = time.perf_counter() - started
            times = json.loads(self._team.tell(json.dumps([writing.stall_s, writing.write_s]).encode()))
            writing.stall_s, writing.write_s = times
        except BaseException as error:  # noqa: BLE001 - told to the thread that trains, which raises it
            writing.error = error
        finally:
            self._ended += 1

    def _settle(self, *, last: bool = False) -> list[str]:
        writing, self._writing = self._writing, None
        if writing is None:
            return []
        if writing.thread is not None:
            writing.thread.join()
        if writing.error is not None:
            return self._failed(writing.step, writing.error, last)
        self._failures, self._retry_at = 0, math.inf
        if self._spec.every == "auto":
            self._timer.every(max(math.sqrt(2 * writing.stall_s * self._spec.mtbf.amount), 2 * writing.write_s))
        stall = {"stall_s": round(writing.stall_s, 3)} if writing.thread is not None else {}
        name = "" if writing.path is None else writing.path.name
        self._event("save", writing.step, path=name, seconds=round(writing.write_s, 3), **stall)
        waited = f" (training waited {writing.stall_s:.2f}s)" if stall else ""
        return [f"saved {writing.path} in {writing.write_s:.1f}s{waited}"]

    def _failed(self, step: int, error: BaseException, last: bool) -> list[str]:
        if not isinstance(error, ArgosyError):
            raise error
        self._failures += 1
        self._event("save-failed", step, cause=error.cause, in_a_row=self._failures)
        if last:
            raise error
        if self._failures >= self._spec.max_failures:
            raise ArgosyError(
                error.code,
                f"{self._failures} saves failed one after the other, the last so: {error.cause}",
                key="checkpoint.max_failures",
                value=self._spec.max_failures,
                fix=error.fix,
            )
        if os.strerror(errno.ENOSPC) in error.cause and self._team.is_first:
            self._make_room()
        self._retry_at = self._agreement.now() + RETRY_S
        return [f"ALERT: {error.cause}; training goes on, and tries again in {RETRY_S:.0f}s"]

    def _make_room(self) -> None:
        """Remove the checkpoints that the next good save would remove, but keep at least one."""
        found = listed(self._run.checkpoints)
        if found:
            self._prune(max(1, self._spec.keep - 1), step_of(found[0]))

    def _prune(self, keep: int, newest: int) -> None:
        spec = self._spec
        prune(self._run.checkpoints, keep, newest, spec.keep_every, keep_best=spec.best is not None)
