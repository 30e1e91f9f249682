"""A benchmark of the overhead of telemetry and sinks: short blocks of steps of one run, alternately with everything on and off (bar: 1%).

Blocks run in one process, less than a second each, in the order off on on off, so that changes of the machine's speed affect both
kinds, and each block is compared with its neighbour. On: phase marks in every step, a log every ten steps, alerts, and the process
that sends metrics to TensorBoard, Prometheus and W&B (offline). Off: none of these, and that process is stopped. A block counts with
the median of its steps, so an interrupted step does not matter; a log counts with the median of the steps after one. The report is
the trimmed mean over the pairs of blocks, with a 95% interval, of wall time and of the trainer's CPU time, and the share of the
logs. If the interval contains the bar, the machine is too busy to decide, and the report says so.

    python benchmarks/overhead.py [KEY=VALUE ...]         LAST=150 BLOCK=20 LOG=10

The default is a tiny model on the CPU, the hard case, because its steps are short; `train.device=cuda model=gpt2 data.seq_len=1024`
is a larger one on a GPU. KEY=VALUE are run spec overrides.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from argosy.config.resolve import resolve
from argosy.config.watching import AlertsSpec
from argosy.record.alerts import Alerts
from argosy.record.jsonl import JsonlWriter, Record
from argosy.train import run as training
from argosy.train.loop import Trainer
from argosy.train.telemetry import Phases

# Seconds, steps, steps.
LAST, BLOCK, LOG = (int(os.environ.get(name, default)) for name, default in (("LAST", 150), ("BLOCK", 20), ("LOG", 10)))
WARM_BLOCKS, FEWEST, TRIM = 4, 16, 0.2
BAR = 0.01
SPEC = [
    "name=overhead", "model={family: llama, layers: 2, hidden: 128, heads: 4, vocab_size: 512}", "data.split=[100,0,0]",
    "data.seq_len=64", "train.global_batch=8", "train.steps=100000000", "optim.lr=1e-4", "optim.schedule=constant", "eval=off",
    "checkpoint.every=10d", f"log.every={LOG}", "log.sinks.tensorboard=true", "log.sinks.prometheus=0", "log.sinks.wandb=overhead",
]  # fmt: skip


class Enough(Exception):
    """Ends the run when the measurement time is over."""


Spent = tuple[float, float]  # wall and CPU seconds


@dataclass
class Block:
    """Consecutive steps with telemetry on or off. `with_log` are the steps after a log."""

    on: bool
    steps: list[Spent] = field(default_factory=list)
    with_log: list[Spent] = field(default_factory=list)

    def median(self, column: int) -> float:
        return statistics.median(step[column] for step in self.steps)


class Blocks:
    """Measures blocks of steps. It replaces the trainer's log timer, which is called after every step."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._sink_process, self._deadline = trainer, -1, math.inf
        self._last, self._logged = (0.0, 0.0), False
        self._phases: Any = None  # of the running loop
        self.measured = [Block(True)]

    def due(self, step: int) -> bool:
        if self._trainer.session.device.type == "cuda":
            torch.cuda.synchronize(self._trainer.session.device)
        now, block = (time.perf_counter(), time.process_time()), self.measured[-1]
        (block.with_log if self._logged else block.steps).append((now[0] - self._last[0], now[1] - self._last[1]))
        if step % BLOCK == 0:
            self._turn()
        self._logged = self.measured[-1].on and step % LOG == 0
        self._last = time.perf_counter(), time.process_time()
        return self._logged

    def _turn(self) -> None:
        number = len(self.measured)
        if number == WARM_BLOCKS:
            self._deadline = time.monotonic() + LAST
        if time.monotonic() > self._deadline and number >= WARM_BLOCKS + FEWEST and number % 4 == 0:
            # The sink process has to run to be able to end.
            self._switch(True)
            raise Enough
        self.measured.append(Block(number % 4 in (1, 2)))
        self._switch(self.measured[-1].on)

    def _switch(self, on: bool) -> None:
        engine = self._trainer.session.engine
        self._phases = phases = self._phases or engine.on_phase.__self__  # type: ignore[attr-defined]
        enter = type(phases).enter.__get__(phases) if on else _nothing
        phases.enter = engine.on_phase = enter
        if self._sink_process < 0:
            self._sink_process = _find_sink_process()
        for pid in (self._sink_process, *_children(self._sink_process)):
            os.kill(pid, signal.SIGCONT if on else signal.SIGSTOP)


def _nothing(name: str) -> None:
    pass


def _children(pid: int) -> list[int]:
    try:
        tasks = Path(f"/proc/{pid}/task").glob("*/children")
        return [int(child) for task in tasks for child in task.read_text().split()]
    except OSError:
        return []


def _find_sink_process() -> int:
    for pid in _children(os.getpid()):
        if b"argosy.record.sink_process" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    raise SystemExit("the sink process is not running")


class Alternating(Trainer):
    made: Alternating

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        Alternating.made = self
        self.logs: Any = Blocks(self)


def corpus(folder: Path) -> Path:
    from argosy.data.prepare.job import prepare
    from argosy.data.prepare.work import PrepareOptions
    from argosy.data.text.tokenizer import ByteTokenizer

    text = folder / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"{'argosy sails ' * 200}{i}"}) + "\n" for i in range(400)))
    prepare([str(text)], ByteTokenizer(), folder / "corpus", PrepareOptions())
    return folder / "corpus"


def parts() -> None:
    """Print the CPU time of the trainer's own telemetry, measured in isolation. A busy machine disturbs it little."""
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
    print(f"CPU time: {1e6 * marks:.1f} us per step for phase marks, {1e6 * log:.0f} us per log for metrics and alerts")


def trimmed(values: list[float]) -> tuple[float, float]:
    """Return the mean without the extreme fifths, and half of its 95% interval (Yuen's, from the winsorised deviation)."""
    ordered, cut = sorted(values), int(TRIM * len(values))
    kept = ordered[cut : len(ordered) - cut]
    clipped = [min(max(value, kept[0]), kept[-1]) for value in ordered]
    error = statistics.stdev(clipped) / ((1 - 2 * TRIM) * math.sqrt(len(values)))
    return statistics.fmean(kept), 2.0 * error


def report(measured: list[Block]) -> None:
    # Pairs (off, on).
    pairs = [(a, b) if b.on else (b, a) for a, b in zip(measured[::2], measured[1::2], strict=True)]
    for what, column in (("wall time", 0), ("CPU time of the trainer", 1)):
        step = statistics.median(off.median(column) for off, _ in pairs)
        plain = statistics.median(on.median(column) for _, on in pairs)
        log = statistics.median(one[column] for _, on in pairs for one in on.with_log) - plain
        mean, half = trimmed([on.median(column) / off.median(column) - 1 for off, on in pairs])
        mean += log / LOG / step
        verdict = "within" if mean + half < BAR else "over" if mean - half > BAR else "cannot be told from"
        print(
            f"{what}: a step {1000 * step:.3f} ms with everything off, {1000 * plain:.3f} ms on, and a log {1e6 * log:.0f} us"
        )
        print(
            f"    {mean:+.2%} ± {half:.2%} with everything on, over {len(pairs)} pairs of blocks: {verdict} the bar of {BAR:.0%}"
        )


def main() -> None:
    parts()
    os.environ |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    training.Trainer = Alternating  # type: ignore[misc]
    with tempfile.TemporaryDirectory() as folder:
        where = [f"data.train={corpus(Path(folder))}", f"runs_dir={folder}/runs"]
        with contextlib.suppress(Enough):
            training.train(resolve(None, [*SPEC, *where, *sys.argv[1:]]), None, training.TrainOptions(quiet=True))
    report(Alternating.made.logs.measured[WARM_BLOCKS:])


if __name__ == "__main__":
    main()
