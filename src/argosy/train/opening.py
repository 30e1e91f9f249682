"""The record of a run from its start to its first step, held by the first rank.

What changed is compared with the spec that made the checkpoint the run goes on from. The new spec is stored when a step has really been
taken with it: a start that finds nothing to do, is refused later or dies before its first step changes nothing. A run without a
checkpoint has nothing to be compared with, and its spec is stored at once.

`opening_lines` and `opening_warnings` are what a run says of itself before its first step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from argosy.checkpoint.manifest import read_checkpoint
from argosy.checkpoint.store import listed, step_of
from argosy.config.counts import describe_size
from argosy.config.layout import describe_layout
from argosy.config.pipeline import describe_bubble
from argosy.config.resolve import Resolved
from argosy.errors import ArgosyError
from argosy.parallel.precision import describe_precision, slow_precision
from argosy.record.continuity import check_continuity, check_owner
from argosy.record.jsonl import JsonlWriter, Record, now
from argosy.record.rundir import Facts, RunDir
from argosy.train.session import Session


@dataclass
class Opening:
    """`beside` writes what else describes the run (its tokenizer, the prediction), once its spec is stored."""

    run: RunDir
    resolved: Resolved
    source: str | None  # the text of the run spec, as it was when the run was started
    data: Facts
    machine: Facts | None  # None: the run will go on on another, of which nothing is known
    start: Facts | None = None
    beside: Callable[[], None] = lambda: None
    _lost: str | None = None

    def check(self) -> list[str]:
        """Refuse what cannot go on here. Returns what is worth knowing about the directory."""
        checkpoints = listed(self.run.checkpoints)
        check_owner(self.run, {path.name: _owner(path) for path in checkpoints})
        notes = check_continuity(self.run, [step_of(path) for path in checkpoints])
        if checkpoints:
            self.changes(step_of(checkpoints[0]))
        return notes

    def changes(self, step: int) -> list[str]:
        """What differs from the spec that made `step`, in words."""
        if not step:
            return []
        return self.run.compare(self.resolved, self.data, self.machine, step=step)

    def store(self, step: int) -> None:
        """The spec holds from the step after `step` on."""
        checkpoints = listed(self.run.checkpoints)
        self.run.store(
            self.resolved, self.source, self.data, self.machine or {}, self.start,
            step=step,
            oldest=min(map(step_of, checkpoints), default=0),
            identity=next(filter(None, map(_owner, checkpoints)), None),
        )  # fmt: skip
        self.beside()

    def store_taken(self, step: int) -> list[str]:
        """`store`, once a step after `step` was taken. A failure is told, and training goes on."""
        try:
            self.store(step)
        except (ArgosyError, OSError) as error:
            cause = error.cause if isinstance(error, ArgosyError) else str(error)
            return [f"ALERT: the spec of this start could not be stored: {cause}; training goes on"]
        return []

    def look(self, step: int) -> str | None:
        """What became of the run directory while training, once for each time that something did.

        One that was deleted is made again at once, with its lock and the spec, so that the next save has a place. One that was
        moved or replaced is not written to, since another run may be there: the next save stops the run, unless it is back by then.
        """
        lost, before = self.run.lost(), self._lost
        self._lost = lost
        root = self.run.root
        if lost is None or (lost == "moved" and before == lost):
            return None
        if lost == "moved":
            return (
                f"{root} was moved or replaced while this run trains: nothing can be saved there. Move it back: the next save stops the "
                "run if it is still gone"
            )
        try:
            self.run.recreate()
            self.store(step)
        except (ArgosyError, OSError) as error:
            if before == lost:
                return None
            return f"{root} was deleted while this run trains, and cannot be made again: {error}"
        self._lost = None
        return (
            f"{root} was deleted while this run trains: its checkpoints and its record up to step {step} are gone. The directory is made "
            "again, and the next save goes there; until then a crash loses the run"
        )


class Journal:
    """The metrics and events of a run, which the first rank alone writes."""

    def __init__(self, run: RunDir, metrics: JsonlWriter, events: JsonlWriter, *, writes: bool) -> None:
        self.run, self._metrics, self._events, self._writes = run, metrics, events, writes

    def event(self, kind: str, step: int, **facts: object) -> None:
        if self._writes:
            told = {name: fact for name, fact in facts.items() if fact or fact == 0}  # rank 0 is one too
            self._events.write({"event": kind, "step": step, "time": now(), **told})

    def metrics(self, record: Record) -> None:
        if self._writes:
            self._metrics.write(record)


def _owner(checkpoint: Path) -> str | None:
    """The run that saved it, where it says so."""
    with suppress(ArgosyError, OSError):
        found: Any = read_checkpoint(checkpoint).progress.about.get("run")
        return found if isinstance(found, str) else None
    return None


def opening_lines(session: Session, run: RunDir, first: int) -> list[str]:
    """The model, the layout, the batch and the data of a run that goes on after `first` steps."""
    spec, mesh, batches = session.spec, session.mesh, session.batches
    epochs = ", ".join(
        f"{count:.3g} epochs of {windows.corpus.path}"
        for windows, count in zip(
            session.stream.sets, session.stream.epochs_after(batches.samples(session.steps)), strict=True
        )
    )
    ranks = mesh.data_ranks
    accumulation = spec.train.global_batch // (spec.parallel.micro_batch * ranks)
    shared = f"{ranks} ranks x " if ranks > 1 else ""
    layout = f", {describe_layout(spec.parallel)}" if mesh.world_size > 1 else ""
    precision = describe_precision(session.engine.model, session.precision)
    return [
        f"{run.root}: {describe_size(spec.model)} on {mesh.device} in {precision}{layout}",
        f"steps {first + 1} to {session.steps}, {batches.describe(spec.data.seq_len)} (batch {spec.train.global_batch} = {shared}{accumulation} x "
        f"micro-batch {spec.parallel.micro_batch}, sequences of {spec.data.seq_len}); in all {epochs}",
    ]


def opening_warnings(session: Session) -> Iterator[tuple[str, str, bool]]:
    """(event, text, whether it is a warning) of what makes the run slow."""
    if session.mesh.size("pp") > 1:
        text, long = describe_bubble(session.spec)
        yield "bubble", text, long
    if session.mesh.is_first and (slow := slow_precision(session.spec.train.precision, session.device)):
        yield "precision", slow, True
