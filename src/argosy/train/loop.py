"""The training loop: one step after another, logging, evaluating and saving when due, resuming where it stopped.

A run directory with a checkpoint is always continued. Nothing a step does depends on the process it runs in: sample
order, dropout and learning rate are functions of the step, so a killed and resumed run gives the same bits as one that
was never disturbed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import Tensor

from argosy.checkpoint.source import Source, open_source, require_fit, starting_weights
from argosy.checkpoint.store import listed
from argosy.config.counts import describe_size, training_flops_per_token
from argosy.config.layout import describe_layout
from argosy.config.lr_phases import check_phases
from argosy.config.pipeline import describe_bubble
from argosy.config.schema import RunSpec
from argosy.config.units import Duration
from argosy.console.training_lines import Console, open_console
from argosy.data.loader import Loader
from argosy.errors import EXIT_DONE, EXIT_RESUMABLE
from argosy.model.init import initial_weights
from argosy.parallel.agreement import Agreement
from argosy.parallel.mesh import Mesh
from argosy.parallel.precision import choose_precision, describe_precision, slow_precision
from argosy.record.heartbeat import Heartbeat, Phase
from argosy.record.jsonl import JsonlWriter, Record, now, read_metrics
from argosy.record.rundir import RunDir
from argosy.train.collection import StepwiseCollection
from argosy.train.device import peak_of
from argosy.train.device_memory import measure_memory
from argosy.train.interrupt import Interrupt
from argosy.train.meter import Meter
from argosy.train.opening import Opening
from argosy.train.optimizer import Optimizer
from argosy.train.profile_steps import Profiling, Window
from argosy.train.replica_check import Replicas
from argosy.train.rewind import (
    Rewind,
    describe_skips,
    passing,
    require_finite,
    require_rewinds_left,
    watch_numbers,
)
from argosy.train.saving import Saving, first_interval
from argosy.train.schedule import Schedule, make_schedule
from argosy.train.schedule_change import schedule_notes
from argosy.train.session import make_engine, make_model, open_checked_data, parameter_names, whole_model
from argosy.train.step import Step, take_step
from argosy.train.telemetry import Taken, Telemetry
from argosy.train.timer import Timer
from argosy.train.validation import evaluate


class Trainer:
    """Built from the spec and the data alone; a run directory is given to `fit`."""

    def __init__(self, spec: RunSpec, mesh: Mesh, heartbeat: Heartbeat | None = None) -> None:
        self.spec, self.mesh, self.device = spec, mesh, mesh.device
        self.data = open_checked_data(spec)
        self.stream = self.data.training()
        self.validation = self.data.each("validation") if spec.eval is not None else None
        self.batches = spec.train.batches
        self.steps = self._in_steps(spec.train.length) or 0
        self.schedule = self._schedule(spec)
        self.model = make_model(spec, mesh)
        self.engine = make_engine(spec, self.model, mesh)
        scaled = choose_precision(spec.train.precision, self.device) == "fp16"
        names = parameter_names(spec) if mesh.size("pp") > 1 else None
        guessing = math.log(spec.model.vocab_size)
        self.optimizer = Optimizer(
            self.model, spec.optim, scaled=scaled, guard=spec.guard, guessing=guessing, names=names
        )
        self.agreement, self.heartbeat = Agreement(mesh), heartbeat or Heartbeat(mesh.rank)
        self.saves, self.logs = self._timer(first_interval(spec.checkpoint)), self._timer(spec.log.every)
        self.evaluations = self._timer(spec.eval.every) if spec.eval is not None else None
        self.replicas = Replicas(spec.guard, mesh, self.optimizer, self._timer)
        self.profile: Window | None = None  # steps to look at with torch's profiler

    def _schedule(self, spec: RunSpec) -> Schedule:
        """The learning-rate schedule of a spec for this data: this run's, or the one it had before."""
        steps = self._in_steps(spec.train.length) or 0
        epoch_samples = self.stream.epoch_samples
        check_phases(spec, steps=steps, epoch_samples=epoch_samples)
        return make_schedule(spec, steps=steps, epoch_samples=epoch_samples)

    def schedule_notes(self, run: RunDir, step: int, changes: list[str]) -> list[str]:
        """What the changes do to the learning rate of a run that goes on after `step` steps."""
        before = run.spec_at(step) if changes else None
        if before is None:
            return []
        return schedule_notes(self._schedule(before), self.schedule, self.spec.optim, step, changes)

    def start_from(self, run: RunDir) -> Source | None:
        """What `init_from` names, where the run has no checkpoint of its own yet."""
        self.start = None
        if self.spec.init_from is not None and not listed(run.checkpoints):
            self.start = open_source(self.spec.init_from)
            require_fit(self.start, whole_model(self.spec), self.spec.model)
        return self.start

    def fit(
        self,
        run: RunDir,
        metrics: JsonlWriter,
        events: JsonlWriter,
        opened: tuple[Opening, list[str]] | None,
        *,
        quiet: bool,
        ends_process: bool = False,
    ) -> int:
        """Train to the end of the run or to a signal. `opened`: on the first rank, the run's record and what is worth saying of it."""
        self.run, self.metrics, self.events = run, metrics, events
        self.opening: Opening | None = None if opened is None else opened[0]
        notes: list[str] = [] if opened is None else opened[1]
        self.saving = Saving(run, self.spec.checkpoint, self.optimizer, self.saves, self.agreement, self._event)
        self.heartbeat.enter("load")
        first = self._restore(notes)
        self.heartbeat.begin(first)
        changes = [] if self.opening is None else self.opening.changes(first)
        notes += self.schedule_notes(run, first, changes)
        if first >= self.steps:
            if self.mesh.is_first:
                print(
                    f"{run.root}: step {first} is done, and the run was to have {self.steps}; "
                    f"train.steps={first * 2} would go on"
                )
            return EXIT_DONE
        console = open_console(first=first, last=self.steps, quiet=quiet or not self.mesh.is_first)
        start = None if self.start is None else self.start.facts()
        self._event("resume" if first else "start", first, changes=changes, notes=notes, init_from=start)
        self._tell([*notes, *self._opening(first), *(f"changed since the last start: {c}" for c in changes)], console)
        self._tell([] if self.profile is None else self.profile.passed(first), console)
        self._tell_bubble(first, console)
        self._tell_slow_precision(first, console)
        try:
            with Interrupt(quiet=not self.mesh.is_first, hold=ends_process) as interrupt:
                self.agreement.listen(interrupt)
                self.saving.prepare()
                self._evaluate_if_missed(first, console)
                last = self._run(first, console)
                interrupt.settle()
                self.agreement.close()
        finally:
            self.saving.close()
            console.close()
        self._tell_skips(last, console)
        if last < self.steps:
            self._event("interrupted", last, signal=self.agreement.asked)
            console.note(f"stopped at step {last} of {self.steps}, saved; run the same command again to go on")
            return EXIT_RESUMABLE
        self._event("done", last)
        return EXIT_DONE

    def _run(self, first: int, console: Console) -> int:
        rewound = False
        while True:
            self.telemetry = self._telemetry(first, rewound)
            try:
                return self._run_steps(first, console)
            except Rewind as rewind:
                first, rewound = self._rewind(rewind, console), True

    def _tell_bubble(self, step: int, console: Console) -> None:
        if self.mesh.size("pp") > 1:
            text, long = describe_bubble(self.spec)
            console.note(f"warning: {text}" if long else text)
            if long:
                self._event("bubble", step, warning=text)

    def _tell_slow_precision(self, step: int, console: Console) -> None:
        if self.mesh.is_first and (text := slow_precision(self.spec.train.precision, self.device)):
            console.note(f"warning: {text}")
            self._event("precision", step, warning=text)

    def _telemetry(self, first: int, rewound: bool) -> Telemetry:
        meter = Meter(
            steps=self.steps,
            samples=self.batches.samples(self.steps),
            flops_per_token=training_flops_per_token(self.spec.model, self.spec.data.seq_len, self.data.target_len),
            peak=peak_of(self.device),
            devices=self.mesh.world_size,
        )
        telemetry = Telemetry(self.spec, self.run, self.mesh, meter, first=first, rewound=rewound)
        self.engine.enter = telemetry.phases.enter
        return telemetry

    def _run_steps(self, first: int, console: Console) -> int:
        with (
            Loader(
                self.stream,
                batches=self.batches,
                consumed_samples=self.consumed_samples,
                rank=self.mesh.data_rank,
                ranks=self.mesh.data_ranks,
                place=self.engine.place,
                position=self._position,
            ) as loader,
            StepwiseCollection() as collection,
            self.telemetry as telemetry,
        ):
            profiling = Profiling(self.profile, self.run.root, self.device, self.mesh.rank)
            for step in range(first + 1, self.steps + 1):
                profiling.before(step)
                self.heartbeat.enter("data", step)
                batch = loader.next_batch()
                lr = self.schedule.lr(step - 1)
                done = take_step(self.engine, self.optimizer, batch, step=step, lr=lr, enter=self._enter)
                ranks = self.mesh.data_ranks
                self.consumed_samples += len(batch.tokens) * ranks
                telemetry.after_step(samples=len(batch.tokens) * ranks, tokens=batch.read_tokens * ranks)
                for line in profiling.after(step, last=step == self.steps):
                    console.note(line)
                console.advance(step)
                collection.after(step)
                if step == first + 1:
                    self._tell(self._store_changes(first), console)
                    self._tell_memory(step, console)

                self.agreement.after_step()
                last = step == self.steps or self.agreement.asked is not None
                self._tell([*self.saving.poll(), *self.engine.news()], console)
                saving = last or self.saving.due(step)
                if last or saving or self.logs.due(step):  # the one place that waits for the device
                    self._log(step, done, lr, loader, console)
                    saving = (not self._skipping(step, console) and saving) or last
                self.replicas.check(step, saving)
                if self.agreement.asked is None and self._evaluation_due(step):
                    with telemetry.pause("evaluation"):
                        self._evaluate(step, console)
                if saving or self.agreement.asked is not None:  # asked while evaluating: this step is the last
                    with telemetry.pause("save"):
                        self._save(step, console, last=last or self.agreement.asked is not None)
                if last or self.agreement.asked is not None:
                    return step
        return self.steps

    def _enter(self, phase: Phase) -> None:
        self.heartbeat.enter(phase)
        self.telemetry.phases.enter(phase)

    def _log(self, step: int, done: Step, lr: float, loader: Loader, console: Console) -> None:
        """Wait for the device, and put the step on the record."""
        self._look_after_directory(step, console)
        tokens = self.consumed_samples * self.spec.data.seq_len
        record, alerts = self.telemetry.record(
            Taken(step, done, lr, waited_s=loader.waited_s, samples=self.consumed_samples, tokens=tokens)
        )
        record |= self.optimizer.report()
        loader.waited_s, self.loss = 0.0, record["loss"]
        self._record(record)
        console.step(record)
        for alert in alerts:
            self._event("alert", step, **alert)
            console.note(f"alert at step {step}: {alert['text']}")
        if self.optimizer.guard is None:
            require_finite(record, self.spec)

    def _store_changes(self, first: int) -> list[str]:
        """The spec of a run that goes on is stored once a step was taken with it; that of a new one was stored when it began."""
        return self.opening.store_taken(first) if self.opening is not None and first else []

    def _look_after_directory(self, step: int, console: Console) -> None:
        text = None if self.opening is None else self.opening.look(step - 1)
        if text is not None:
            self._event("alert", step, alert="directory", text=text)
            console.note(f"ALERT at step {step}: {text}")

    def _skipping(self, step: int, console: Console) -> bool:
        """Whether this step was left out for its numbers, which is put on the record: nothing is saved in such a streak, so that
        the newest checkpoint is from before it."""
        guard = self.optimizer.guard
        return guard is not None and watch_numbers(guard, step, self.batches, self._event, console.note) > 0

    def _tell_skips(self, step: int, console: Console) -> None:
        guard = self.optimizer.guard
        if guard is not None and (text := describe_skips(guard, step)) is not None:
            console.note(text)

    def _rewind(self, rewind: Rewind, console: Console) -> int:
        """Back to the newest checkpoint. Returns its step."""
        guard = self.optimizer.guard
        if guard is None:
            raise rewind
        require_rewinds_left(guard, rewind, self.spec)
        rewinds, passed, skipped = guard.rewinds + 1, passing(guard, rewind, self.batches), guard.skipped
        notes: list[str] = []
        self.heartbeat.enter("load")
        self.optimizer.reset()
        first = self._restore(notes)
        guard.rewound(rewinds, passed, skipped)
        self.heartbeat.begin(first)
        self._event("rewind", rewind.step, to=first, reason=rewind.reason, ranks=rewind.ranks, passed=passed)
        for note in (f"step {rewind.step} ({rewind.reason}): rewound to step {first}", *notes):
            console.note(note)
        return first

    def _position(self, consumed_samples: int) -> int:
        guard = self.optimizer.guard
        return consumed_samples if guard is None else guard.position(consumed_samples)

    def _tell_memory(self, step: int, console: Console) -> None:
        accumulated = self.engine.accumulates(self.batches.sizes[-1] // self.mesh.data_ranks)
        self.telemetry.memory = memory = measure_memory(
            self.model, self.optimizer, self.device, accumulated=accumulated
        )
        self._event("memory", step, gib=memory.as_dict())
        console.note(f"memory {memory}")

    def _evaluation_due(self, step: int) -> bool:
        return self.evaluations is not None and (step == self.steps or self.evaluations.due(step))

    def _evaluate_if_missed(self, step: int, console: Console) -> None:
        """An interrupted run saves before it evaluates; what was left out is made up for when it goes on."""
        in_steps = self.spec.eval is not None and self.spec.eval.every.unit != "seconds"
        if step and in_steps and self._evaluation_due(step):
            missed = self.mesh.from_first(lambda: "validation_loss" not in read_metrics(self.run.metrics).get(step, {}))
            if missed:
                self._evaluate(step, console)

    def _restore(self, notes: list[str]) -> int:
        """Weights and optimiser from the newest good checkpoint, or fresh ones. Returns the steps already done."""
        progress = self.saving.restore(notes)
        if progress is None:
            self.optimizer.set_weights(self._fresh_weights(notes))
        self.consumed_samples = 0 if progress is None else progress.consumed_samples
        return 0 if progress is None else progress.step

    def _fresh_weights(self, notes: list[str]) -> Iterator[tuple[str, Tensor]]:
        spec = self.spec
        if self.start is None:
            return initial_weights(self.model, spec.model, spec.train.seed)
        notes.append(f"starting from the weights of {self.start.where}, trained to step {self.start.step}")
        if (more := spec.model.vocab_size - self.start.model.vocab_size) > 0:
            notes.append(f"{more} rows of the vocabulary are new")
        if not self.start.reads(self.data.tokenizer):
            notes.append(self.start.misread())
        return starting_weights(self.start, self.model, spec.model, spec.train.seed)

    def _save(self, step: int, console: Console, *, last: bool) -> None:
        self.heartbeat.enter(
            "last_save" if last else "save", step
        )  # which waits for the files, and may take much longer
        tokens = self.consumed_samples * self.spec.data.seq_len
        about = {"tokens": tokens, "loss": self.loss, "layout": describe_layout(self.spec.parallel)}
        if self.mesh.is_first:
            about["run"] = self.run.identity
        self._tell(self.saving.save(step, self.consumed_samples, last=last, **about), console)

    def _tell(self, notes: list[str], console: Console) -> None:
        for note in notes:
            console.note(note)

    def _evaluate(self, step: int, console: Console) -> None:
        if self.validation is None or self.spec.eval is None:
            return
        self.heartbeat.enter("evaluate", step)
        batch = self.spec.train.global_batch
        result = evaluate(
            self.engine, self.validation, samples=self.spec.eval.batches * batch, batch=batch, split="validation"
        )
        losses = {"validation_loss": result.loss} | {f"validation_loss/{n}": s.loss for n, s in result.sets.items()}
        losses |= {f"validation_{name}": value for name, value in result.metrics.items()}
        self._record({"step": step, "time": now(), **losses, "validation_tokens": result.tokens})
        console.note(f"step {step}: {result.describe()}")

    def _opening(self, first: int) -> list[str]:
        spec = self.spec
        epochs = ", ".join(
            f"{count:.3g} epochs of {windows.corpus.path}"
            for windows, count in zip(
                self.stream.sets, self.stream.epochs_after(self.batches.samples(self.steps)), strict=True
            )
        )
        ranks = self.mesh.data_ranks
        accumulation = spec.train.global_batch // (spec.parallel.micro_batch * ranks)
        shared = f"{ranks} ranks x " if ranks > 1 else ""
        layout = f", {describe_layout(spec.parallel)}" if self.mesh.world_size > 1 else ""
        precision = describe_precision(self.model, choose_precision(spec.train.precision, self.device))
        return [
            f"{self.run.root}: {describe_size(spec.model)} on {self.device} in {precision}{layout}",
            f"steps {first + 1} to {self.steps}, {self.batches.describe(spec.data.seq_len)} (batch {spec.train.global_batch} = {shared}{accumulation} x "
            f"micro-batch {spec.parallel.micro_batch}, sequences of {spec.data.seq_len}); in all {epochs}",
        ]

    def _event(self, kind: str, step: int, **facts: object) -> None:
        if self.mesh.is_first:
            told = {name: fact for name, fact in facts.items() if fact or fact == 0}  # rank 0 is one too
            self.events.write({"event": kind, "step": step, "time": now(), **told})

    def _record(self, record: Record) -> None:
        if self.mesh.is_first:
            self.metrics.write(record)

    def _in_steps(self, duration: Duration) -> int | None:
        samples = self.stream.epoch_samples
        return duration.steps(self.batches, seq_len=self.spec.data.seq_len, epoch_samples=samples)

    def _timer(self, every: Duration) -> Timer:
        samples = every.samples(seq_len=self.spec.data.seq_len, epoch_samples=self.stream.epoch_samples)
        return Timer(every, samples, self.batches, self.agreement.now)
