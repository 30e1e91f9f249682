"""The fault bench: runs are started as users start them, watched through their run directories, and disturbed from outside.

`Bench` makes runs of one small spec with the same seed, so that a run that survives a fault can be compared bit for bit with
an undisturbed one. The cost of each fault goes into a table that is printed at the end.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from argosy.checkpoint.store import listed, verify
from argosy.errors import EXIT_RESUMABLE
from argosy.record.heartbeat import read_heartbeats
from argosy.record.jsonl import read_jsonl, read_metrics
from dist.devices import ON_GPU
from forking import ARGOSY, Popen

STEPS, SAVED_EVERY = 40, 8
# Longer than anything takes here, even on a busy machine.
PATIENCE_S = 600.0
INJECT = Path(__file__).parent / "inject"
# For faults that a stall must detect. Elsewhere, a busy machine must not look like a stall.
SOON = {"stall_after": "3s"}
# With ARGOSY_TEST_GPU set, two ranks of NCCL that share a GPU where the machine has only one.
DEVICE: dict[str, Any] = {"device": "cuda", "deterministic": True} if ON_GPU else {"device": "cpu"}
MODEL = {"family": "gpt", "layers": 2, "hidden": 32, "heads": 4, "vocab_size": 257, "dropout": 0.1}


def planted(fault: str, **more: object) -> dict[str, str]:
    """Return the environment of a process whose ranks have this fault; see `inject`."""
    path = os.pathsep.join([str(INJECT), os.environ.get("PYTHONPATH", "")])
    return {"ARGOSY_FAULT": fault, "PYTHONPATH": path} | {name: str(value) for name, value in more.items()}


def held(step: int, until: Path) -> dict[str, str]:
    """Make the first rank wait at this step until a file exists, so that the run is not over before the test disturbs it."""
    return planted(f"hold:0:{step}", ARGOSY_HOLD=until)


@dataclass
class Outcome:
    """The cost of a fault, for the table. None: nothing to measure."""

    ended: str
    detected_s: float | None = None
    recovered_s: float | None = None
    steps_lost: int | None = None


@dataclass
class Bench:
    root: Path
    corpus: Path
    table: list[tuple[str, Outcome]] = field(default_factory=list)
    _undisturbed: Any = None
    # Faults on GPUs run side by side.
    _lock: Any = field(default_factory=threading.Lock)
    _stopped: Path | None = None

    def spec(self, name: str, **sections: Any) -> Path:
        spec: dict[str, Any] = {
            "name": name,
            "runs_dir": str(self.root / "runs"),
            "model": MODEL,
            "data": {"train": str(self.corpus), "seq_len": 32, "split": [90, 10, 0]},
            "train": {"global_batch": 4, "steps": STEPS, **DEVICE},
            "optim": {"lr": 1e-3, "warmup": 2},
            # Faults are planted in the host's code, which a CUDA graph does not run.
            "parallel": {"micro_batch": 2, "dp_replicate": 2, "graph": "off"},
            "eval": {"every": 10, "batches": 1},
            "checkpoint": {"every": SAVED_EVERY, "keep": 3},
            "log": {"every": 1},
            "fault": {"stall_after": "5min", "backoff": "0.1s"},
        }
        for key, section in sections.items():
            spec[key] = spec.get(key, {}) | section if isinstance(section, dict) else section
        path = self.root / f"{name}.yaml"
        path.write_text(yaml.safe_dump(spec))
        return path

    @contextmanager
    def run(
        self, name: str, *arguments: str, env: dict[str, str] | None = None, ranks: int = 2, **sections: Any
    ) -> Iterator[Run]:
        path = self.spec(name, **sections)
        more = ["--nproc", str(ranks)] if ranks else []
        run = Run(self.root / "runs" / name, path)
        run.start(*more, *arguments, env=env)
        try:
            yield run
        finally:
            run.end()

    @contextmanager
    def goes_on(self, name: str, **sections: Any) -> Iterator[Run]:
        """Return a copy of a run that was stopped half-way, not started yet."""
        if self._stopped is None:
            with self.run("stopped") as run:
                run.wait_step(STEPS // 2)
                os.kill(run.process.pid, signal.SIGTERM)
                assert run.wait() == EXIT_RESUMABLE, run.said
            self._stopped = run.root
        elsewhere = self.root / name
        shutil.copytree(self._stopped, elsewhere / "stopped")
        path = self.spec("stopped", runs_dir=str(elsewhere), **sections)
        run = Run(elsewhere / "stopped", path.rename(self.root / f"{name}.yaml"))
        try:
            yield run
        finally:
            run.end()

    def undisturbed(self) -> tuple[Any, Any]:
        """The expected result of all runs of the spec: (loss, gradient norm and validation loss of each step; weights)."""
        with self._lock:
            if self._undisturbed is None:
                with self.run("undisturbed") as run:
                    assert run.wait() == 0, run.said
                    self._undisturbed = run.result()
            return self._undisturbed

    def record(self, fault: str, outcome: Outcome) -> None:
        self.table.append((fault, outcome))


@dataclass
class Run:
    root: Path
    spec: Path
    process: subprocess.Popen[str] | None = None
    said: str = ""

    def start(self, *arguments: str, env: dict[str, str] | None = None) -> None:
        command = [*ARGOSY, "train", str(self.spec), "--quiet", *arguments]
        environ = os.environ | {"OMP_NUM_THREADS": "1"} | (env or {})
        if env and "ARGOSY_FAULT" in env:
            environ |= planted(env["ARGOSY_FAULT"])
        self._log = log = self.spec.with_suffix(f".{len(list(self.spec.parent.glob('*.said')))}.said").open("w+")
        if ON_GPU:
            environ |= {"ARGOSY_TEST_SHARED_GPUS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        # Libraries are loaded with the interpreter, and CUDA cannot be used in a fork of a process that has used it.
        popen = subprocess.Popen if "LD_PRELOAD" in environ or ON_GPU else Popen
        self.process = popen(command, cwd=self.spec.parent, env=environ, stdout=log, stderr=log, text=True)

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        assert self.process is not None
        code = self.process.wait(timeout_s)
        self._log.seek(0)
        self.said = self._log.read()
        return code

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self.process is not None:
            self._log.close()

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            if found := condition():
                return found
            assert self.process is None or self.process.poll() is None, f"the run ended before {what}: {self._tail()}"
            time.sleep(0.01)
        raise AssertionError(f"{what} never happened: {self._tail()}")

    def _tail(self) -> str:
        self._log.seek(0)
        return self._log.read()[-3000:]

    def wait_step(self, step: int) -> None:
        self.until(lambda: self.newest() >= step, f"step {step}")

    def newest(self) -> int:
        """The last logged step."""
        return max((r.get("step", 0) for r in read_jsonl(self.root / "metrics.jsonl")), default=0)

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        return [e for e in read_jsonl(self.root / "events.jsonl") if e.get("event") in kinds]

    def wait_event(self, kind: str) -> dict[str, Any]:
        found: list[dict[str, Any]] = self.until(lambda: self.events(kind), f"event {kind}")
        return found[-1]

    def pid(self, rank: int) -> int:
        return int(self.until(lambda: self.living(rank), f"rank {rank}"))

    def living(self, rank: int) -> int | None:
        """Return the process id of a rank if it belongs to this run. A pid in an old heartbeat may be any process by now."""
        try:
            pid = int(read_heartbeats(self.root / "heartbeat")[rank]["pid"])
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except (KeyError, OSError):
            return None
        return pid if str(self.spec).encode() in command else None

    def signal(self, number: int, rank: int | None = None) -> float:
        """Send a signal to a rank, or to the process that started the ranks. Returns the time."""
        assert self.process is not None
        os.kill(self.process.pid if rank is None else self.pid(rank), number)
        return time.time()

    @property
    def checkpoints(self) -> list[Path]:
        """The checkpoints, newest first."""
        return listed(self.root / "checkpoints")

    def result(self) -> tuple[Any, Any]:
        metrics = {
            step: (r["loss"], r["grad_norm"], r.get("validation_loss"))
            for step, r in read_metrics(self.root / "metrics.jsonl").items()
        }
        checkpoint = verify(self.checkpoints[0])
        tensors = {**checkpoint.weights(), **checkpoint.optimizer()}
        return metrics, {name: tensor.numpy().tobytes() for name, tensor in sorted(tensors.items())}

    def cost(self, at: float, step: int, kind: str) -> Outcome:
        """Return the cost of a fault at this time and step that was detected by an event and recovered from."""
        noticed = next(e for e in self.events(kind) if e["time"] >= at - 0.01)
        resumed = next(e for e in self.events("resume", "start") if e["time"] >= noticed["time"])
        again = next(
            r["time"] for r in read_jsonl(self.root / "metrics.jsonl") if r["time"] >= resumed["time"] and "loss" in r
        )
        lost = max(0, step - resumed["step"])
        return Outcome("went on, bit-equal", noticed["time"] - at, again - at, lost)


def table_of(rows: list[tuple[str, Outcome]]) -> str:
    def seconds(value: float | None) -> str:
        return "" if value is None else f"{value:.1f}s"

    cells = [("fault", "detected in", "recovered in", "steps lost", "ended as")] + [
        (
            name, seconds(outcome.detected_s), seconds(outcome.recovered_s),
            "" if outcome.steps_lost is None else str(outcome.steps_lost), outcome.ended,
        )
        for name, outcome in rows
    ]  # fmt: skip
    widths = [max(len(row[column]) for row in cells) for column in range(4)]
    return "\n".join("  ".join([*(c.ljust(w) for c, w in zip(row[:4], widths, strict=True)), row[4]]) for row in cells)
