"""The training loop: one step after another, logging, evaluating and saving when due, resuming where it stopped.

A run directory with a checkpoint is always continued. Nothing a step does depends on the process it runs in: sample
order, dropout and learning rate are functions of the step, so a killed and resumed run gives the same bits as one that
was never disturbed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from argosy.checkpoint.assets import copy_assets
from argosy.checkpoint.source import Source, open_source, require_fit, starting_weights
from argosy.checkpoint.store import Checkpoint, Progress, latest, listed, require_names, save, sweep
from argosy.config.checks import check_phases
from argosy.config.counts import describe_size, training_flops_per_token
from argosy.config.resolve import Resolved
from argosy.config.schema import RunSpec
from argosy.config.start import MODEL_FILE
from argosy.config.units import Duration
from argosy.data.loader import Loader
from argosy.errors import EXIT_DONE, EXIT_RESUMABLE, ArgosyError
from argosy.model.init import initial_weights
from argosy.model.moe import describe_load
from argosy.parallel.precision import choose_precision, describe_precision
from argosy.record.console import Console, open_console
from argosy.record.files import replace_file
from argosy.record.jsonl import JsonlWriter, Record, now, read_metrics
from argosy.record.rundir import RunDir
from argosy.train.collection import StepwiseCollection
from argosy.train.device import peak_memory_gib, peak_of, prepare_device
from argosy.train.evaluate import evaluate
from argosy.train.interrupt import Interrupt
from argosy.train.memory import measure_memory
from argosy.train.meter import Meter
from argosy.train.optimizer import Optimizer
from argosy.train.scaler import MINIMUM
from argosy.train.schedule import make_schedule
from argosy.train.session import make_engine, make_model, open_checked_data, stored_weights
from argosy.train.step import take_step
from argosy.train.timer import Timer


@dataclass(frozen=True)
class TrainOptions:
    fresh: bool = False  # start anew; refuse if the run directory holds a run
    archive: bool = False  # with fresh: move the earlier run aside
    quiet: bool = False


def train(resolved: Resolved, source: Path | None, options: TrainOptions) -> int:
    """Train, or go on training, until the run's length is reached. Returns the exit code."""
    trainer = Trainer(resolved.spec)  # refuses whatever can be refused before the run directory is touched
    run = open_run(resolved, options)
    try:
        changes = run.compare(resolved, trainer.data.facts()) if listed(run.checkpoints) else []
        start = trainer.start_from(run)
        run.store(resolved, source, trainer.data.facts(), None if start is None else start.facts())
        if trainer.data.tokenizer is not None:
            name, content = trainer.data.tokenizer.stored()
            replace_file(run.root / name, content)
        if start is not None and trainer.keeps_tokenizer(start):
            copy_assets(start.root, run.root)
        with JsonlWriter(run.metrics) as metrics, JsonlWriter(run.events) as events:
            return trainer.fit(run, metrics, events, changes, options.quiet)
    finally:
        run.close()


def open_run(resolved: Resolved, options: TrainOptions) -> RunDir:
    """The run directory with its lock held, and an earlier run moved aside if that was asked for."""
    run = RunDir(Path(resolved.spec.runs_dir) / resolved.spec.name)
    _check_options(run, options)
    occupied = run.holds_a_run
    run.open_for_training()
    if options.fresh and occupied:
        print(f"the earlier run is now {run.archive()}")
        run.open_for_training()
    return run


def _check_options(run: RunDir, options: TrainOptions) -> None:
    if (run.root / MODEL_FILE).exists():
        raise ArgosyError(
            "run.exists",
            f"{run.root} is an imported model, not a run",
            key="name",
            value=run.root.name,
            fix=f"give the run another name=…, and init_from={run.root} to start from it",
        )
    if options.archive and not options.fresh:
        raise ArgosyError(
            "config.conflict",
            "--archive moves a run aside to start a fresh one",
            key="--archive",
            fix="add --fresh, or leave it out",
        )
    if options.fresh and run.holds_a_run and not options.archive:
        raise ArgosyError(
            "run.exists",
            f"{run.root} already holds a run, and --fresh would start over it",
            key="name",
            value=run.root.name,
            fix="give another name=…, or --fresh --archive to move the earlier run aside; without --fresh it goes on",
        )


def dry_run(resolved: Resolved, options: TrainOptions) -> list[str]:
    """Every check that `train` makes before its first step, and what it would do; nothing is written."""
    spec = resolved.spec
    trainer = Trainer(spec, device="meta")
    run = RunDir(Path(spec.runs_dir) / spec.name)
    _check_options(run, options)
    run.require_writable()
    notes: list[str] = []
    checkpoint = None if options.fresh else latest(run.checkpoints, report=notes.append)
    if checkpoint is not None:
        run.compare(resolved, trainer.data.facts())
    elif (start := trainer.start_from(run)) is not None:
        notes.append(f"weights {start.where}, trained to step {start.step}")
    done = 0 if checkpoint is None else checkpoint.progress.step
    tokens = sum(corpus.split(spec.data.split)["train"].tokens for corpus in trainer.data.corpora)
    left = (
        f"steps {done + 1} to {trainer.steps}"
        if done < trainer.steps
        else f"nothing: all {trainer.steps} steps are done"
    )
    return [
        f"model   {describe_size(spec.model)}",
        f"data    {tokens:,} training tokens, {trainer.stream.epoch_samples:,} samples of {spec.data.seq_len}",
        f"train   {left}, {trainer.batches.describe(spec.data.seq_len)}",
        f"run     {run.root}" + (f" goes on from step {done}" if done else " starts at step 0"),
        *notes,
    ]


class Trainer:
    """Built from the spec and the data alone; a run directory is given to `fit`."""

    def __init__(self, spec: RunSpec, device: str | None = None) -> None:
        self.spec = spec
        self.device = torch.device("meta") if device == "meta" else prepare_device(spec.train)
        self.data = open_checked_data(spec)
        self.stream = self.data.training()
        self.validation = self.data.each("validation") if spec.eval is not None else None
        self.batches = spec.train.batches
        self.steps = self._in_steps(spec.train.length) or 0
        warmup = self._in_steps(spec.optim.warmup) or 0
        decay = 0 if spec.optim.decay is None else self._in_steps(spec.optim.decay) or 0
        check_phases(spec, warmup=warmup, decay=decay, steps=self.steps)
        self.schedule = make_schedule(spec.optim, self.batches, steps=self.steps, warmup=warmup, decay=decay)
        self.model = make_model(spec, self.device)
        self.engine = make_engine(spec, self.model, self.device)
        self.optimizer = Optimizer(self.model, spec.optim)
        self.saves, self.logs = self._timer(spec.checkpoint.every), self._timer(spec.log.every)
        self.evaluations = self._timer(spec.eval.every) if spec.eval is not None else None

    def start_from(self, run: RunDir) -> Source | None:
        """What `init_from` names, where the run has no checkpoint of its own yet."""
        self.start = None
        if self.spec.init_from is not None and not listed(run.checkpoints):
            self.start = open_source(self.spec.init_from)
            require_fit(self.start, self.model, self.spec.model)
        return self.start

    def keeps_tokenizer(self, start: Source) -> bool:
        """Whether the data was made with the tokenizer of the model the run starts from."""
        ours, theirs = self.data.tokenizer, start.tokenizer()
        return ours is None or theirs is None or ours.fingerprint == theirs.fingerprint

    def fit(self, run: RunDir, metrics: JsonlWriter, events: JsonlWriter, changes: list[str], quiet: bool) -> int:
        self.run, self.metrics, self.events = run, metrics, events
        notes: list[str] = []
        first = self._restore(notes)
        if first >= self.steps:
            print(
                f"{run.root}: step {first} is done, and the run was to have {self.steps}; train.steps={first * 2} would go on"
            )
            return EXIT_DONE
        console = open_console(first=first, last=self.steps, quiet=quiet)
        start = None if self.start is None else self.start.facts()
        self._event("resume" if first else "start", first, changes=changes, notes=notes, init_from=start)
        for note in [*notes, *self._opening(first), *(f"changed since the last start: {c}" for c in changes)]:
            console.note(note)
        try:
            with Interrupt() as interrupt:
                self._evaluate_if_missed(first, console)
                last = self._run_steps(first, console, interrupt)
        finally:
            console.close()
        if last < self.steps:
            self._event("interrupted", last, signal=interrupt.asked)
            console.note(f"stopped at step {last} of {self.steps}, saved; run the same command again to go on")
            return EXIT_RESUMABLE
        self._event("done", last)
        return EXIT_DONE

    def _run_steps(self, first: int, console: Console, interrupt: Interrupt) -> int:
        meter = Meter(
            steps=self.steps,
            samples=self.batches.samples(self.steps),
            flops_per_token=training_flops_per_token(self.spec.model, self.spec.data.seq_len, self.data.target_len),
            peak=peak_of(self.device),
        )
        with (
            Loader(
                self.stream,
                batches=self.batches,
                consumed_samples=self.consumed_samples,
                place=self.engine.place,
            ) as loader,
            StepwiseCollection() as collection,
        ):
            memory_told = False
            for step in range(first + 1, self.steps + 1):
                batch = loader.next_batch()
                lr = self.schedule.lr(step - 1)
                result, grad_norm = take_step(self.engine, self.optimizer, batch, step=step, lr=lr)
                self.consumed_samples += len(batch.tokens)
                meter.count(samples=len(batch.tokens), tokens=batch.read_tokens)
                console.advance(step)
                collection.after(step)

                last = step == self.steps or interrupt.asked is not None
                saving = last or self.saves.due(step)
                if last or saving or self.logs.due(step):  # the one place that waits for the device
                    record = meter.record(
                        step=step,
                        loss=float(result.loss_sum) / result.tokens,
                        grad_norm=float(grad_norm),
                        lr=lr,
                        waited_s=loader.waited_s,
                        memory_gib=peak_memory_gib(self.device),
                        samples=self.consumed_samples,
                        tokens=self.consumed_samples * self.spec.data.seq_len,
                    )
                    record |= self.optimizer.report()
                    record |= {name: float(sum_) / result.tokens for name, sum_ in result.metrics.items()}
                    if result.expert_load is not None:
                        record |= describe_load(result.expert_load)
                    loader.waited_s = 0.0
                    self.metrics.write(record)
                    console.step(record)
                    self._require_finite(record)
                    if not memory_told:
                        memory_told = True
                        self._tell_memory(step, console)
                started = time.perf_counter()
                if interrupt.asked is None and self._evaluation_due(step):
                    self._evaluate(step, console)
                if saving or interrupt.asked is not None:  # asked while evaluating: this step is the last
                    self._save(step, console)
                meter.pause(time.perf_counter() - started)
                if last or interrupt.asked is not None:
                    return step
        return self.steps

    def _tell_memory(self, step: int, console: Console) -> None:
        accumulated = self.batches.sizes[-1] > self.spec.parallel.micro_batch
        memory = measure_memory(self.model, self.optimizer, self.device, accumulated=accumulated)
        self._event("memory", step, gib=memory.as_dict())
        console.note(f"memory {memory}")

    def _evaluation_due(self, step: int) -> bool:
        return self.evaluations is not None and (step == self.steps or self.evaluations.due(step))

    def _evaluate_if_missed(self, step: int, console: Console) -> None:
        """An interrupted run saves before it evaluates; what was left out is made up for when it goes on."""
        in_steps = self.spec.eval is not None and self.spec.eval.every.unit != "seconds"
        if step and in_steps and self._evaluation_due(step):
            record = read_metrics(self.run.metrics).get(step, {})
            if "validation_loss" not in record:
                self._evaluate(step, console)

    def _restore(self, notes: list[str]) -> int:
        """Weights and optimiser from the newest good checkpoint, or fresh ones. Returns the steps already done."""
        sweep(self.run.checkpoints)
        checkpoint = latest(self.run.checkpoints, report=notes.append, set_aside=True)
        if checkpoint is None:
            self.optimizer.set_weights(self._fresh_weights(notes))
            self.consumed_samples = 0
            return 0
        self.optimizer.set_weights(stored_weights(self.model, checkpoint).items())
        self._load_optimizer(checkpoint)
        self.consumed_samples = checkpoint.progress.consumed_samples
        notes.append(f"resuming from {checkpoint.path}")
        return checkpoint.progress.step

    def _fresh_weights(self, notes: list[str]) -> Iterator[tuple[str, Tensor]]:
        spec = self.spec
        if self.start is None:
            return initial_weights(self.model, spec.model, spec.train.seed)
        notes.append(f"starting from the weights of {self.start.where}, trained to step {self.start.step}")
        if (more := spec.model.vocab_size - self.start.model.vocab_size) > 0:
            notes.append(f"{more} rows of the vocabulary are new")
        if not self.keeps_tokenizer(self.start):
            notes.append(
                f"the data was not made with the tokenizer of {self.start.where}: its ids mean other text there"
            )
        return starting_weights(self.start, self.model, spec.model, spec.train.seed)

    def _load_optimizer(self, checkpoint: Checkpoint) -> None:
        tensors = checkpoint.optimizer()
        require_names(tensors.keys(), self.optimizer.tensors().keys(), checkpoint.path)
        self.optimizer.load(tensors, checkpoint.progress.optimizer, checkpoint.progress.step)

    def _save(self, step: int, console: Console) -> None:
        self.run.require_ours()
        started = time.perf_counter()
        progress = Progress(step, self.consumed_samples, self.optimizer.numbers())
        weights = self.optimizer.weights()
        path = save(self.run.checkpoints, progress, weights, self.optimizer.tensors(), self.spec.checkpoint.keep)
        seconds = time.perf_counter() - started
        self._event("save", step, path=path.name, seconds=round(seconds, 3))
        console.note(f"saved {path} in {seconds:.1f}s")

    def _evaluate(self, step: int, console: Console) -> None:
        if self.validation is None or self.spec.eval is None:
            return
        batch = self.spec.train.global_batch
        result = evaluate(
            self.engine, self.validation, samples=self.spec.eval.batches * batch, batch=batch, split="validation"
        )
        losses = {"validation_loss": result.loss} | {f"validation_loss/{n}": s.loss for n, s in result.sets.items()}
        losses |= {f"validation_{name}": value for name, value in result.metrics.items()}
        self.metrics.write({"step": step, "time": now(), **losses, "validation_tokens": result.tokens})
        console.note(f"step {step}: {result.describe()}")

    def _require_finite(self, record: Record) -> None:
        step, loss, grad_norm = record["step"], record["loss"], record["grad_norm"]
        if math.isfinite(loss) and math.isfinite(grad_norm):
            return
        if not math.isfinite(grad_norm) and record.get("loss_scale", 0.0) >= MINIMUM:
            return  # the step was skipped, and a lower scale may yet do
        last, scale = self.consumed_samples, record.get("loss_scale")
        self._event("non-finite", step, loss=str(loss), grad_norm=str(grad_norm))
        raise ArgosyError(
            "train.non-finite",
            f"at step {step} (samples {self.batches.samples(step - 1)} to {last - 1}) the loss is {loss} and the gradient norm "
            f"{grad_norm}; nothing was saved since"
            + ("" if scale is None else f". {record['skipped']} steps were skipped, down to a loss scale of {scale:g}"),
            key="optim.lr",
            value=self.spec.optim.lr,
            fix="lower optim.lr or lengthen optim.warmup: the same command would go on from the last checkpoint and, unchanged, "
            "meet the same step" + ("" if scale is None else "; or train.precision=bf16, whose range is wider"),
        )

    def _opening(self, first: int) -> list[str]:
        spec = self.spec
        epochs = ", ".join(
            f"{count:.3g} epochs of {windows.corpus.path}"
            for windows, count in zip(
                self.stream.sets, self.stream.epochs_after(self.batches.samples(self.steps)), strict=True
            )
        )
        accumulation = spec.train.global_batch // spec.parallel.micro_batch
        precision = describe_precision(self.model, choose_precision(spec.train.precision, self.device))
        return [
            f"{self.run.root}: {describe_size(spec.model)} on {self.device} in {precision}",
            f"steps {first + 1} to {self.steps}, {self.batches.describe(spec.data.seq_len)} (batch {spec.train.global_batch} = {accumulation} x "
            f"micro-batch {spec.parallel.micro_batch}, sequences of {spec.data.seq_len}); in all {epochs}",
        ]

    def _event(self, kind: str, step: int, **facts: object) -> None:
        self.events.write({"event": kind, "step": step, "time": now(), **{k: v for k, v in facts.items() if v}})

    def _in_steps(self, duration: Duration) -> int | None:
        return duration.steps(self.batches, seq_len=self.spec.data.seq_len, epoch_samples=self.stream.epoch_samples)

    def _timer(self, every: Duration) -> Timer:
        samples = every.samples(seq_len=self.spec.data.seq_len, epoch_samples=self.stream.epoch_samples)
        return Timer(every, samples, self.batches)
