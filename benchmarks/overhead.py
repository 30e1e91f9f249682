"""What measuring and sinks cost: the steps of one run, in short blocks with everything on and with everything off by turns (bar: 1%).

Both kinds of block are in one process, a second or so each, in the order off on on off: whatever speeds the machine up or slows it
down does so for both, and each block is compared with its neighbour. On: marks in every step, a log every ten, alerts, and the
process that carries the record to TensorBoard, Prometheus and W&B (offline). Off: none of these, that process stopped. What
is told is the trimmed mean over the pairs, with a 95% interval, of wall time and of the trainer's own processor time; an interval
wider than the bar means that the machine is too busy to tell, and that is said too.

    python benchmarks/overhead.py [KEY=VALUE ...]         SECONDS=120 BLOCK=100 LOG=10

The default is a tiny model on the CPU, the hard case, since its steps are short; `train.device=cuda model=gpt2 data.seq_len=1024`
is a larger one on a GPU. Overrides are those of a run spec.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from argosy.config.resolve import resolve
from argosy.config.watching import AlertsSpec
from argosy.record.alerts import Alerts
from argosy.record.jsonl import JsonlWriter, Record
from argosy.train import run as training
from argosy.train.loop import Trainer
from argosy.train.phases import Phases

SECONDS, BLOCK, LOG = (int(os.environ.get(name, default)) for name, default in (("SECONDS", 120), ("BLOCK", 100), ("LOG", 10)))  # fmt: skip
WARM_BLOCKS, FEWEST, TRIM = 4, 16, 0.2
BAR = 0.01
SPEC = [
    "name=overhead", "model={family: llama, layers: 2, hidden: 128, heads: 4, vocab_size: 512}", "data.split=[100,0,0]",
    "data.seq_len=64", "train.global_batch=8", "train.steps=100000000", "optim.lr=1e-4", "optim.schedule=constant", "eval=off",
    "checkpoint.every=10d", f"log.every={LOG}", "log.sinks.tensorboard=true", "log.sinks.prometheus=0", "log.sinks.wandb=overhead",
]  # fmt: skip


class Enough(Exception):
    """The time is up."""


class Blocks:
    """In the place of the timer that says when a log is due: it is asked after every step."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._courier = trainer, -1
        self._on, self._number, self._deadline = True, 0, math.inf
        self._since: tuple[float, float] | None = None
        self.measured: list[tuple[bool, float, float]] = []  # on or off; wall and processor seconds

    def due(self, step: int) -> bool:
        if step % BLOCK == 0:
            self._turn()
        return self._on and step % LOG == 0

    def _turn(self) -> None:
        if self._trainer.device.type == "cuda":
            torch.cuda.synchronize(self._trainer.device)
        now = time.perf_counter(), time.process_time()
        if self._number == 0:
            self._deadline = time.monotonic() + SECONDS
        if self._since is not None and self._number >= WARM_BLOCKS:
            self.measured.append((self._on, now[0] - self._since[0], now[1] - self._since[1]))
        if time.monotonic() > self._deadline and len(self.measured) >= FEWEST and len(self.measured) % 4 == 0:
            self._switch(True)  # so that the courier can end
            raise Enough
        self._number += 1
        self._switch(self._number % 4 in (1, 2))
        self._since = time.perf_counter(), time.process_time()

    def _switch(self, on: bool) -> None:
        self._on, phases = on, self._trainer.telemetry.phases
        enter = type(phases).enter.__get__(phases) if on else _nothing
        phases.enter = self._trainer.engine.enter = enter  # type: ignore[method-assign]
        if self._courier < 0:
            self._courier = _courier()
        for pid in (self._courier, *_children(self._courier)):
            os.kill(pid, signal.SIGCONT if on else signal.SIGSTOP)


def _nothing(name: str) -> None:
    pass


def _children(pid: int) -> list[int]:
    try:
        tasks = Path(f"/proc/{pid}/task").glob("*/children")
        return [int(child) for task in tasks for child in task.read_text().split()]
    except OSError:
        return []


def _courier() -> int:
    for pid in _children(os.getpid()):
        if b"argosy.record.courier" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    raise SystemExit("the process that serves the sinks is not there")


class Alternating(Trainer):
    made: Alternating

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        Alternating.made = self
        self.logs: Any = Blocks(self)


def corpus(folder: Path) -> Path:
    from argosy.data.prepare.job import PrepareOptions, prepare
    from argosy.data.text.tokenizer import ByteTokenizer

    text = folder / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"{'argosy sails ' * 200}{i}"}) + "\n" for i in range(400)))
    prepare([str(text)], ByteTokenizer(), folder / "corpus", PrepareOptions())
    return folder / "corpus"


def parts() -> None:
    """Processor time of what the trainer itself does for the record, by itself, which a busy machine blurs little."""
    phases, count = Phases(torch.device("cpu")), 20_000
    started = time.process_time()
    for _ in range(count):
        for part in ("communication", "forward_backward", "communication", "optimizer"):
            phases.enter(part)
        phases.end_step()
    marks = (time.process_time() - started) / count
    record: Record = {f"figure {i}": i / 7 for i in range(40)} | {"loss": 2.0, "grad_norm": 1.0, "tokens_per_s": 1e5}
    with tempfile.TemporaryDirectory() as folder, JsonlWriter(Path(folder) / "metrics.jsonl") as metrics:
        alerts, logs = Alerts(AlertsSpec(), Path(folder)), 2000
        started = time.process_time()
        for step in range(logs):
            phases.take()
            alerts.observe(record | {"step": step, "time": float(step)})
            metrics.write(record)
        log = (time.process_time() - started) / logs
    print(f"processor time: {1e6 * marks:.1f} us a step for marks, {1e6 * log:.0f} us a log for the record and alerts")


def trimmed(values: list[float]) -> tuple[float, float]:
    """Mean without the extreme fifths, and half of its 95% interval (Yuen's, from the winsorised deviation)."""
    ordered, cut = sorted(values), int(TRIM * len(values))
    kept = ordered[cut : len(ordered) - cut]
    clipped = [min(max(value, kept[0]), kept[-1]) for value in ordered]
    error = statistics.stdev(clipped) / ((1 - 2 * TRIM) * math.sqrt(len(values)))
    return statistics.fmean(kept), 2.0 * error


def report(measured: list[tuple[bool, float, float]]) -> None:
    pairs = list(zip(measured[::2], measured[1::2], strict=True))
    steps = {
        on: statistics.median(wall / BLOCK for was_on, wall, _ in measured if was_on == on) for on in (False, True)
    }
    print(f"{len(pairs)} pairs of blocks of {BLOCK} steps; medians: off {1000 * steps[False]:.3f} ms a step, on {1000 * steps[True]:.3f} ms")  # fmt: skip
    for what, column in (("wall time", 1), ("processor time of the trainer", 2)):
        ratios = [a[column] / b[column] - 1 if a[0] else b[column] / a[column] - 1 for a, b in pairs]
        mean, half = trimmed(ratios)
        verdict = "within" if mean + half < BAR else "over" if mean - half > BAR else "cannot be told from"
        print(f"{what}: {mean:+.2%} ± {half:.2%} with everything on: {verdict} the bar of {BAR:.0%}")


def main() -> None:
    parts()
    os.environ |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    training.Trainer = Alternating  # type: ignore[misc]
    with tempfile.TemporaryDirectory() as folder:
        where = [f"data.train={corpus(Path(folder))}", f"runs_dir={folder}/runs"]
        with contextlib.suppress(Enough):
            training.train(resolve(None, [*SPEC, *where, *sys.argv[1:]]), None, training.TrainOptions(quiet=True))
    report(Alternating.made.logs.measured)


if __name__ == "__main__":
    main()
