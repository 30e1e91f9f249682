"""The training loop: takes steps, logs, evaluates and saves when due, and resumes from the last checkpoint.

A run directory with a checkpoint is always resumed. A step does not depend on the process it runs in: sample order, dropout and
learning rate are functions of the step, so a killed and resumed run gives the same bits as one that was never interrupted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from torch import Tensor

from argosy.checkpoint.source import Source, starting_weights
from argosy.config.layout import describe_layout
from argosy.console.output import say
from argosy.console.training_lines import Console, open_console, stopped_line
from argosy.data.loader import Loader
from argosy.errors import EXIT_DONE, EXIT_RESUMABLE
from argosy.model.build import initial_weights
from argosy.parallel.mesh import Agreement
from argosy.parallel.shards import span_of
from argosy.record.heartbeat import Heartbeat, Phase
from argosy.record.jsonl import now, read_metrics
from argosy.tasks.task_registry import run_flops_per_token, task_of
from argosy.train.closing import closing_lines, nothing_left
from argosy.train.device import measure_memory, peak_of
from argosy.train.interrupt import Interrupt
from argosy.train.opening import Journal, Opening, open_between_steps, opening_lines, opening_warnings
from argosy.train.rewind import (
    ReplicaCheck,
    Rewind,
    describe_skips,
    passing,
    require_finite,
    require_rewinds_left,
    watch_numbers,
)
from argosy.train.saving import Saving, first_interval
from argosy.train.session import Session
from argosy.train.step import Step, StepwiseCollection, evaluate, take_step
from argosy.train.telemetry import Meter, Taken, Telemetry
from argosy.train.validations import Validations, Verdict

if TYPE_CHECKING:
    from argosy.train.profile_steps import Profiling, Window


class Trainer:
    """The trainer of a session in an open run directory, from the last checkpoint to the end of the run."""

    def __init__(
        self,
        session: Session,
        journal: Journal,
        heartbeat: Heartbeat,
        *,
        opening: Opening | None = None,
        start: Source | None = None,
        profile: Window | None = None,
    ) -> None:
        """Args:
        opening: on the first rank, the record of this start.
        start: the weights that `init_from` names, if the run has no checkpoint.
        profile: steps to profile with torch's profiler.
        """
        spec = session.spec
        self.session, self.journal, self.run, self.heartbeat = session, journal, journal.run, heartbeat
        self.opening, self.start, self.profile = opening, start, profile
        self.agreement = Agreement(session.mesh)
        clock = self.agreement.now
        self.logs = session.timer(spec.log.every, clock)
        self.evaluations = None if spec.eval is None else session.timer(spec.eval.every, clock)
        self.replicas = ReplicaCheck(
            spec.guard, session.mesh, session.optimizer, lambda every: session.timer(every, clock)
        )
        saves = session.timer(first_interval(spec.checkpoint), clock)
        self.stopped_early = False
        self.saving = Saving(self.run, spec.checkpoint, session.optimizer, saves, self.agreement, self.journal.event)
        self.validations = Validations(self.run, spec, session.mesh)
        self.between_steps = open_between_steps(session, journal, self.agreement, heartbeat.beat)
        self.consumed_samples = 0

    def fit(self, notes: Iterable[str] = (), *, quiet: bool, ends_process: bool = False) -> int:
        """Train to the end of the run or to a signal. Returns the exit code. `notes` are messages about the run directory."""
        session, first_rank = self.session, self.session.mesh.is_first
        said = list(notes)
        self.heartbeat.enter("load")
        first = self._restore(said)
        self.heartbeat.begin(first)
        changes = [] if self.opening is None else self.opening.changes(first)
        said += session.schedule_notes(self.run, first, changes)
        if self.validations.begin(first) or first >= session.steps:
            if first_rank and not quiet:
                say(nothing_left(self.run, first, session.steps, self.validations))
            return EXIT_DONE
        console = open_console(first=first, last=session.steps, quiet=quiet or not first_rank)
        self._announce(first, said, changes, console)
        try:
            with Interrupt(quiet=not (first_rank and ends_process), hold=ends_process) as interrupt:
                self.agreement.listen(interrupt)
                self.saving.prepare()
                self._evaluate_if_missed(first, console)
                last = self._run(first, console)
                interrupt.settle()
                self.agreement.close()
        finally:
            self.saving.close()
            console.close()
            for work in self.between_steps:
                work.close()
        self._tell_skips(last, console)
        if last < session.steps and not self.stopped_early:
            self.journal.event("interrupted", last, signal=self.agreement.asked)
            console.note(stopped_line(last, session.steps))
            return EXIT_RESUMABLE
        if self.stopped_early:
            self.journal.event("early-stop", last, reason=self.validations.describe)
            console.note(f"stopped early at step {last} of {session.steps}: {self.validations.describe}")
        self.journal.event("done", last)
        if first_rank and not quiet:
            tell(closing_lines(self.run, first, session.data), console)
        return EXIT_DONE

    def _announce(self, first: int, notes: list[str], changes: list[str], console: Console) -> None:
        start = None if self.start is None else self.start.facts()
        self.journal.event("resume" if first else "start", first, changes=changes, notes=notes, init_from=start)
        tell([*notes, *opening_lines(self.session, self.run, first)], console)
        tell([f"changed since the last start: {change}" for change in changes], console)
        tell([] if self.profile is None else self.profile.passed(first), console)
        for event, text, warns in opening_warnings(self.session):
            console.note(f"warning: {text}" if warns else text)
            if warns:
                self.journal.event(event, first, warning=text)

    def _run(self, first: int, console: Console) -> int:
        rewound = False
        while True:
            try:
                return StepLoop(self, console, first, rewound=rewound).run()
            except Rewind as rewind:
                first, rewound = self._rewind(rewind, console), True

    def _rewind(self, rewind: Rewind, console: Console) -> int:
        """Go back to the newest checkpoint. Returns its step."""
        guard = self.session.optimizer.guard
        if guard is None:
            raise rewind
        require_rewinds_left(guard, rewind, self.session.spec)
        passed, skipped = passing(guard, rewind, self.session.batches), guard.skipped
        rewinds = guard.rewinds + 1
        notes: list[str] = []
        self.heartbeat.enter("load")
        self.session.optimizer.reset()
        first = self._restore(notes)
        guard.rewound(rewinds, passed, skipped)
        self.validations.begin(first)
        self.heartbeat.begin(first)
        self.journal.event("rewind", rewind.step, to=first, reason=rewind.reason, ranks=rewind.ranks, passed=passed)
        tell([f"step {rewind.step} ({rewind.reason}): rewound to step {first}", *notes], console)
        return first

    def _restore(self, notes: list[str]) -> int:
        """Load weights and optimiser from the newest good checkpoint, or initialise them. Returns the number of steps done."""
        progress = self.saving.restore(notes)
        if progress is None:
            self.session.optimizer.set_weights(fresh_weights(self.session, self.start, notes))
        self.consumed_samples = 0 if progress is None else progress.consumed_samples
        return 0 if progress is None else progress.step

    def evaluation_due(self, step: int) -> bool:
        return self.evaluations is not None and (step == self.session.steps or self.evaluations.due(step))

    def _evaluate_if_missed(self, step: int, console: Console) -> None:
        """Evaluate if the last step was due for it but was not evaluated: an interrupted run saves without evaluating."""
        spec = self.session.spec
        in_steps = spec.eval is not None and spec.eval.every.unit != "seconds"
        if step and in_steps and self.evaluation_due(step):
            metrics = self.run.metrics
            missed = self.session.mesh.from_first(lambda: "validation_loss" not in read_metrics(metrics).get(step, {}))
            if missed:
                self.validations.judge(self.evaluate(step, console))

    def evaluate(self, step: int, console: Console) -> float:
        """Evaluate after `step` and write the validation losses to the metrics. Returns the loss of all sources together."""
        spec, validation = self.session.spec, self.session.validation
        if validation is None or spec.eval is None:
            raise AssertionError("no evaluation is due in a run that does not evaluate")
        self.heartbeat.enter("evaluate", step)
        batch = spec.train.global_batch
        samples = spec.eval.batches * batch
        result = evaluate(
            self.session.engine, validation, task_of(spec), samples=samples, batch=batch, split="validation"
        )
        losses = {"validation_loss": result.loss} | {f"validation_loss/{n}": s.loss for n, s in result.sets.items()}
        losses |= {f"validation_{name}": value for name, value in result.metrics.items()}
        self.journal.metrics({"step": step, "time": now(), **losses, "validation_tokens": result.tokens})
        console.note(f"step {step}: {result.describe()}")
        return result.loss

    def _tell_skips(self, step: int, console: Console) -> None:
        guard = self.session.optimizer.guard
        if guard is not None and (text := describe_skips(guard, step)) is not None:
            console.note(text)


class StepLoop:
    """The steps of a trainer from a restored step to the end of the run, a signal or a rewind."""

    def __init__(self, trainer: Trainer, console: Console, first: int, *, rewound: bool) -> None:
        session = trainer.session
        self._trainer, self._session, self._console, self._first = trainer, session, console, first
        self._journal, self._heartbeat = trainer.journal, trainer.heartbeat
        self._agreement, self._saving = trainer.agreement, trainer.saving
        self._engine, self._optimizer = session.engine, session.optimizer
        self._telemetry = _telemetry(trainer, first, rewound)
        self._engine.on_phase = self._telemetry.phases.enter
        # The loss of the last logged step.
        self._loss: float | None = None

    def run(self) -> int:
        """Take the steps. Returns the last step taken."""
        session, trainer = self._session, self._trainer
        with (
            Loader(
                session.stream,
                batches=session.batches,
                consumed_samples=trainer.consumed_samples,
                rank=session.mesh.data_rank,
                ranks=session.mesh.data_ranks,
                place=self._engine.place,
                position=self._position,
            ) as loader,
            StepwiseCollection() as collection,
            self._telemetry,
        ):
            profiling = self._profiling()
            for step in range(self._first + 1, session.steps + 1):
                if profiling is not None:
                    profiling.before(step)
                self._heartbeat.enter("data", step)
                batch = loader.next_batch()
                lr = session.schedule.lr(step - 1)
                done = take_step(self._engine, self._optimizer, batch, step=step, lr=lr, enter=self._enter)
                ranks = session.mesh.data_ranks
                trainer.consumed_samples += len(batch.tokens) * ranks
                self._telemetry.after_step(samples=len(batch.tokens) * ranks, tokens=batch.read_tokens * ranks)
                if profiling is not None:
                    tell(profiling.after(step, last=step == session.steps), self._console)
                self._console.advance(step)
                collection.after(step)
                if self._after_step(step, done, lr, loader):
                    return step
        return session.steps

    def _profiling(self) -> Profiling | None:
        if self._trainer.profile is None:
            return None
        from argosy.train.profile_steps import Profiling

        return Profiling(self._trainer.profile, self._trainer.run.root, self._session.mesh)

    def _after_step(self, step: int, done: Step, lr: float, loader: Loader) -> bool:
        """Log, check, evaluate and save if due. Returns True if this step was the last."""
        agreement, trainer = self._agreement, self._trainer
        if step == self._first + 1:
            tell(self._store_changes(), self._console)
            self._tell_memory(step)
        agreement.after_step()
        last = step == self._session.steps or agreement.asked is not None
        tell([*self._saving.poll(), *self._engine.news()], self._console)
        saving = last or self._saving.due(step)
        evaluating = agreement.asked is None and trainer.evaluation_due(step)
        skipping = False
        # Only logging waits for the device.
        if last or saving or trainer.logs.due(step) or (evaluating and trainer.validations.keeps_best):
            self._log(step, done, lr, loader)
            skipping = self._skipping(step)
            saving = (not skipping and saving) or last
        trainer.replicas.check(step, saving)
        verdict = self._evaluate(step) if evaluating else None
        for work in (work for work in trainer.between_steps if work.due(step)):
            self._heartbeat.enter(work.phase, step)
            with self._telemetry.pause("evaluation"):
                tell(work.run(step, trainer.consumed_samples * self._session.spec.data.seq_len), self._console)
        best = verdict is not None and verdict.saves and not skipping
        # A stop was requested during the evaluation: this step is the last.
        last = last or agreement.asked is not None or trainer.stopped_early
        if saving or best or last:
            with self._telemetry.pause("save"):
                self._save(step, verdict, last=last)
        return last

    def _evaluate(self, step: int) -> Verdict:
        with self._telemetry.pause("evaluation"):
            verdict = self._trainer.validations.judge(self._trainer.evaluate(step, self._console))
        self._trainer.stopped_early = verdict.stops and step < self._session.steps
        return verdict

    def _enter(self, phase: Phase) -> None:
        self._heartbeat.enter(phase)
        self._telemetry.phases.enter(phase)

    def _position(self, consumed_samples: int) -> int:
        guard = self._optimizer.guard
        return consumed_samples if guard is None else guard.position(consumed_samples)

    def _log(self, step: int, done: Step, lr: float, loader: Loader) -> None:
        """Wait for the device, and write the step to the metrics."""
        self._look_after_directory(step)
        samples = self._trainer.consumed_samples
        tokens = samples * self._session.spec.data.seq_len
        record, alerts = self._telemetry.record(
            Taken(step, done, lr, waited_s=loader.waited_s, samples=samples, tokens=tokens)
        )
        record |= self._optimizer.report()
        loader.waited_s, self._loss = 0.0, record["loss"]
        self._journal.metrics(record)
        self._console.step(record)
        for alert in alerts:
            self._journal.event("alert", step, **alert)
            self._console.note(f"alert at step {step}: {alert['text']}")
        if self._optimizer.guard is None:
            require_finite(record, self._session.spec)

    def _store_changes(self) -> list[str]:
        """Store the spec of a resumed run, after its first step. The spec of a new run was stored when it began."""
        opening = self._trainer.opening
        return opening.store_taken(self._first) if opening is not None and self._first else []

    def _look_after_directory(self, step: int) -> None:
        opening = self._trainer.opening
        text = None if opening is None else opening.look(step - 1)
        if text is not None:
            self._journal.event("alert", step, alert="directory", text=text)
            self._console.note(f"ALERT at step {step}: {text}")

    def _skipping(self, step: int) -> bool:
        """Record skipped steps. Returns True if this step was skipped by the guard: nothing is saved in a streak of skipped steps,
        so that the newest checkpoint is from before it."""
        guard, batches = self._optimizer.guard, self._session.batches
        return guard is not None and watch_numbers(guard, step, batches, self._journal.event, self._console.note) > 0

    def _tell_memory(self, step: int) -> None:
        session = self._session
        accumulated = self._engine.accumulates(session.batches.sizes[-1] // session.mesh.data_ranks)
        memory = measure_memory(self._engine.model, self._optimizer, session.device, accumulated=accumulated)
        self._telemetry.memory = memory
        self._journal.event("memory", step, gib=memory.as_dict())
        self._console.note(f"memory {memory}")

    def _save(self, step: int, verdict: Verdict | None, *, last: bool) -> None:
        # The last save waits for the files, and may take much longer.
        self._heartbeat.enter("last_save" if last else "save", step)
        spec, samples = self._session.spec, self._trainer.consumed_samples
        about = {
            "tokens": samples * spec.data.seq_len,
            "loss": self._loss,
            "layout": describe_layout(spec.parallel),
        }
        if verdict is not None:
            about["validation_loss"] = verdict.loss
        if self._session.mesh.is_first:
            about["run"] = self._trainer.run.identity
        waits = verdict is not None and verdict.saves
        tell(self._saving.save(step, samples, last=last, waits=waits, **about), self._console)


def tell(notes: Iterable[str], console: Console) -> None:
    for note in notes:
        console.note(note)


def fresh_weights(session: Session, start: Source | None, notes: list[str]) -> Iterator[tuple[str, Tensor]]:
    """Return the weights a run begins with: those of `start`, or initial ones drawn from the seed. Adds messages to `notes`."""
    spec, model = session.spec, session.engine.model
    if start is None:
        if session.mesh.is_first:
            notes += filter(None, [session.data.unused_vocabulary()])
        return initial_weights(model, spec.model, spec.train.seed, span_of)
    notes.append(f"starting from the weights of {start.where}, trained to step {start.step}")
    if (more := spec.model.vocab_size - start.model.vocab_size) > 0:
        notes.append(f"{more} rows of the vocabulary are new")
    if not start.reads(session.data.tokenizer):
        notes.append(start.misread())
    return starting_weights(start, model, spec.model, spec.train.seed)


def _telemetry(trainer: Trainer, first: int, rewound: bool) -> Telemetry:
    session = trainer.session
    spec = session.spec
    meter = Meter(
        steps=session.steps,
        samples=session.batches.samples(session.steps),
        flops_per_token=run_flops_per_token(spec),
        peak=peak_of(session.device),
        devices=session.mesh.world_size,
    )
    return Telemetry(spec, trainer.run, session.mesh, meter, first=first, rewound=rewound)
