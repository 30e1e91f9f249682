"""The record of a run from its start to its first step, held by the first rank.

A resumed run is compared with the spec that made its checkpoint. The new spec is stored after the first step taken with it: a
start that finds nothing to do, is refused later or dies before its first step changes nothing. A run without a checkpoint has
nothing to be compared with, and its spec is stored at once.

`opening_lines` and `opening_warnings` return the messages of a run before its first step.

`check_continuity` checks that the checkpoints, metrics and events of a run directory belong together. People prune, copy and
restore parts of a run. A missing part of the record is safe and gives a message. Resuming from another run's weights, or mixing
two runs in one record, is refused.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import orjson

from argosy.checkpoint.manifest import read_checkpoint
from argosy.checkpoint.store import listed, step_of
from argosy.config.counts import describe_size
from argosy.config.data_checks import unused_share
from argosy.config.layout import describe_layout
from argosy.config.pipeline import describe_bubble
from argosy.config.resolve import Resolved
from argosy.errors import ArgosyError
from argosy.parallel.mesh import Agreement
from argosy.parallel.parallelize import all_graph_refusal
from argosy.parallel.precision import describe_precision, slow_precision
from argosy.record.heartbeat import Phase
from argosy.record.jsonl import JsonlWriter, Record, now, read_jsonl
from argosy.record.rundir import Facts, RunDir
from argosy.train.attention_report import attention_lines
from argosy.train.device import peak_of
from argosy.train.session import Session


@dataclass
class Opening:
    """The record of one start of a run. `beside` writes the other files that describe the run (tokenizer, prediction) after its
    spec is stored."""

    run: RunDir
    resolved: Resolved
    # The text of the run spec when the run was started.
    source: str | None
    data: Facts
    # None: the run will train on another machine, which is not known here.
    machine: Facts | None
    start: Facts | None = None
    beside: Callable[[], None] = lambda: None
    _lost: str | None = None

    def check(self) -> list[str]:
        """Refuse a run directory that this run cannot resume. Returns messages about the directory."""
        checkpoints = listed(self.run.checkpoints)
        check_owner(self.run, {path.name: _owner(path) for path in checkpoints})
        notes = check_continuity(self.run, [step_of(path) for path in checkpoints])
        if checkpoints:
            step = step_of(checkpoints[0])
            self.changes(step)
            if not self.run.resolved_file.exists():
                notes.append(
                    f"warning: {self.run.resolved_file} is missing: it cannot be told whether keys, data or the machine have changed since "
                    f"step {step}, and the run goes on with what it is given"
                )
        return notes

    def changes(self, step: int) -> list[str]:
        """Describe the differences from the spec that made `step`."""
        if not step:
            return []
        return self.run.compare(self.resolved, self.data, self.machine, step=step)

    def store(self, step: int) -> None:
        """Store the spec, which is valid from the step after `step` on."""
        checkpoints = listed(self.run.checkpoints)
        self.run.store(
            self.resolved, self.source, self.data, self.machine or {}, self.start,
            step=step,
            oldest=min(map(step_of, checkpoints), default=0),
            identity=next(filter(None, map(_owner, checkpoints)), None),
        )  # fmt: skip
        self.beside()

    def store_taken(self, step: int) -> list[str]:
        """Store the spec after a step beyond `step` was taken. A failure is returned as a message, and training goes on."""
        try:
            self.store(step)
        except (ArgosyError, OSError) as error:
            cause = error.cause if isinstance(error, ArgosyError) else str(error)
            return [f"ALERT: the spec of this start could not be stored: {cause}; training goes on"]
        return []

    def look(self, step: int) -> str | None:
        """Return a message if the run directory was deleted, moved or replaced during training, once for each time.

        A deleted directory is made again at once, with its lock and the spec, so that the next save has a place. A directory that
        was moved or replaced is not written to, because another run may be there: the next save stops the run, unless the directory
        is back by then.
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
    """The writer of a run's metrics and events. Only the first rank writes."""

    def __init__(
        self,
        run: RunDir,
        metrics: JsonlWriter,
        events: JsonlWriter,
        *,
        writes: bool,
        on_record: Callable[[Record], None] | None = None,
    ) -> None:
        """Args:
        writes: this is the first rank.
        on_record: called with every record of metrics, after it was written.
        """
        self.run, self._metrics, self._events, self._writes = run, metrics, events, writes
        self._on_record = on_record

    def event(self, kind: str, step: int, **facts: object) -> None:
        if self._writes:
            # 0 is a fact too, such as rank 0.
            told = {name: fact for name, fact in facts.items() if fact or fact == 0}
            self._events.write({"event": kind, "step": step, "time": now(), **told})

    def metrics(self, record: Record) -> None:
        if self._writes:
            self._metrics.write(record)
            if self._on_record is not None:
                self._on_record(record)


class BetweenSteps(Protocol):
    """Work between steps that reaches no training number: text that the model writes, its scores on tasks."""

    # The phase of the heartbeat. Its own, because the stall limit is learnt from the times of a phase.
    phase: Phase

    def due(self, step: int) -> bool: ...

    def run(self, step: int, tokens: int) -> list[str]:
        """Do the work after `step`, when the run has consumed `tokens` tokens. Returns lines for the console."""
        ...

    def close(self) -> None: ...


def open_between_steps(
    session: Session, journal: Journal, agreement: Agreement, beat: Callable[[], None]
) -> list[BetweenSteps]:
    """Return the work that the run spec asks for, ready to be done. All ranks do it together. Long work calls `beat` often.

    A run without such work imports nothing of it.
    """
    found: list[BetweenSteps] = []
    spec = session.spec
    if spec.log.samples is not None:
        from argosy.train.text_samples import TextSamples

        found.append(TextSamples(session, spec.log.samples, journal.run, agreement.now))
    if spec.eval is not None and spec.eval.tasks is not None:
        from argosy.train.task_scores import TaskEvaluation

        found.append(TaskEvaluation(session, spec.eval.tasks, journal, agreement, beat))
    return found


def _owner(checkpoint: Path) -> str | None:
    """Return the identity of the run that saved a checkpoint; None if it is not recorded."""
    with suppress(ArgosyError, OSError):
        found: Any = read_checkpoint(checkpoint).progress.about.get("run")
        return found if isinstance(found, str) else None
    return None


def opening_lines(session: Session, run: RunDir, first: int) -> list[str]:
    """Describe the model, the layout, the batch and the data of a run that resumes after `first` steps."""
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
    peak = peak_of(session.device)
    return [
        f"{run.root}: {describe_size(spec.model)} on {mesh.device} in {precision}{layout}",
        f"steps {first + 1} to {session.steps}, {batches.describe(spec.data.seq_len)} (batch {spec.train.global_batch} = {shared}{accumulation} x "
        f"micro-batch {spec.parallel.micro_batch}, sequences of {spec.data.seq_len}); in all {epochs}",
        *(attention_lines(spec, session.precision, mesh.device) if mesh.device.type == "cuda" else ()),
        *(
            []
            if peak is None
            else [f"MFU is the share of the {peak.name}'s dense 16-bit peak, {peak.tflops:g} TFLOP/s"]
        ),
    ]


def opening_warnings(session: Session) -> Iterator[tuple[str, str, bool]]:
    """Yield (event, text, True if it is a warning) for each thing that makes the run slow or wastes data."""
    if session.mesh.is_first and (unused := unused_share(session.spec)) is not None:
        yield "split", unused, True
    if session.mesh.size("pp") > 1:
        text, long = describe_bubble(session.spec)
        yield "bubble", text, long
    if session.mesh.is_first and (slow := slow_precision(session.spec.train.precision, session.device)):
        yield "precision", slow, True
    asked = session.spec.parallel.graph == "on"
    why = all_graph_refusal(session.spec, session.precision, session.mesh) if asked else None
    if session.mesh.is_first and why is not None:
        yield "graph", f"parallel.graph=on, but no CUDA graph is captured: {why}", True


# Bytes read from the end of a metrics file: more than one record.
_END = 1 << 20


def check_continuity(run: RunDir, steps: Sequence[int]) -> list[str]:
    """Return messages about gaps in the record, for the user to see before the run resumes.

    Args:
        steps: the steps of the checkpoints that exist, newest first.

    Raises:
        ArgosyError: the events say that checkpoints were saved, and none exists.
    """
    saved = max((e["step"] for e in _last_saves(run.events)), default=0)
    logged = last_step(run.metrics)
    if not steps:
        if saved:
            raise ArgosyError(
                "run.checkpoints-gone",
                f"{run.root} had saved step {saved} (events.jsonl), and {run.checkpoints.name}/ holds no checkpoint: starting at step 1 "
                f"would mix two runs in one record" + (f", whose metrics go to step {logged}" if logged else ""),
                key="name",
                value=run.root.name,
                fix=f"put the checkpoints back into {run.checkpoints}; or --fresh --archive to move this record aside and begin "
                "anew; or give another name=…",
            )
        return [f"steps 1 to {logged} of an earlier start were never saved, and are taken again"] if logged else []
    newest = steps[0]
    if saved > newest:
        return [
            f"warning: step {saved} was saved once, and the newest checkpoint is step {newest}: steps {newest + 1} to "
            f"{max(saved, logged)} are taken again"
        ]
    if logged < newest:
        ends = f"ends at step {logged}" if logged else "is missing or empty"
        return [
            f"warning: metrics.jsonl {ends}, and the checkpoint is of step {newest}: what was logged between is lost"
        ]
    return []


def check_owner(run: RunDir, owners: Mapping[str, str | None]) -> None:
    """Refuse checkpoints of another run. `owners` maps a checkpoint's name to the identity of the run that saved it, or None."""
    ours = run.identity
    for name, owner in owners.items():
        if ours is not None and owner is not None and owner != ours:
            raise ArgosyError(
                "run.changed",
                f"{run.checkpoints / name} was saved by another run: going on from it would mix two runs in one record",
                key="name",
                value=run.root.name,
                fix=f"move it away; to start from its weights give another name=… and init_from={run.checkpoints / name}; if this is the "
                f"run it belongs to, delete {run.resolved_file}, and the next start writes it anew",
            )


def last_step(path: Path) -> int:
    """Return the step of the last complete record of a metrics file, or 0 if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _END))
            lines = file.read().splitlines()
    except OSError:
        return 0
    for line in reversed(lines):
        try:
            return int(orjson.loads(line)["step"])
        except (ValueError, KeyError, TypeError):
            continue
    return 0


def _last_saves(events: Path) -> list[dict[str, int]]:
    """Return the newest save event, as a list of at most one. Earlier ones may be of steps that were rewound."""
    saves = [e for e in read_jsonl(events) if e.get("event") == "save" and isinstance(e.get("step"), int)]
    return saves[-1:]
