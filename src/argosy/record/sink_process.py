"""The sink process: sends a run's metrics and events to its sinks. `python -m argosy.record.sink_process RUN`.

The trainer only appends to files. The sink process reads them as they grow, with one thread for each sink; the offset of each
sink is stored in the run directory. So a sink that is down, slow or broken costs training nothing. It is reported once, and
gets everything it missed when it is back, in this attempt of the run or in a later one. The sink process ends when the
trainer does, however the trainer dies, once the sinks that answer have received everything.

`require_packages` checks, before a run starts, that the packages of its sinks are installed.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import orjson

from argosy.config.schema import RunSpec
from argosy.config.secrets import without_secrets
from argosy.config.watching import LogSpec
from argosy.echo import address_only, capped
from argosy.errors import ArgosyError
from argosy.files import replace_file
from argosy.log_handler import install_log_handler
from argosy.record.heartbeat import read_heartbeats
from argosy.record.jsonl import JsonlWriter, now
from argosy.record.rundir import RunDir
from argosy.record.sinks.mlflow import MLflow
from argosy.record.sinks.otel import OpenTelemetry
from argosy.record.sinks.prometheus import Prometheus
from argosy.record.sinks.sink import RunFacts, Sink, missing
from argosy.record.sinks.tensorboard import TensorBoard
from argosy.record.sinks.wandb import WandB
from argosy.record.sinks.webhook import Webhook
from argosy.record.tail import Tail
from argosy.retry import RetryPolicy

_POLL_S = 1.0
# Upper bound of the exponential backoff between retries of a sink that is down.
_LONGEST_BACKOFF_S = 60.0
# Time for sinks to take the rest after the trainer's end.
_DRAIN_S = 60.0
# The trainer waits this long for the sinks at its end, and says so after 2 seconds.
_TRAINER_WAITS_S, _SILENTLY_S = 20.0, 2.0
# Not __name__, which is __main__ in the sink process.
_log = logging.getLogger("argosy.record.sink_process")


@contextlib.contextmanager
def serve_sinks(run: RunDir, spec: RunSpec) -> Iterator[None]:
    """Run the sink process during the `with` block, if the spec has sinks."""
    if not spec.log.sinks.asked and spec.log.alerts.webhook is None:
        yield
        return
    command = [sys.executable, "-m", "argosy.record.sink_process", str(run.root)]
    try:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        # This spec may hold secrets; the one stored in the run directory does not.
        if process.stdin is not None:
            process.stdin.write(spec.model_dump_json().encode() + b"\n")
            process.stdin.flush()
    except OSError as error:
        _log.warning("no sink gets this run's metrics: %s", error)
        yield
        return
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if process.stdin is not None:
                process.stdin.close()
        _wait_for(process)


def _wait_for(process: subprocess.Popen[bytes]) -> None:
    """Wait until the sinks have received the rest. The sink process goes on alone with a sink that does not answer."""
    try:
        process.wait(_SILENTLY_S)
    except subprocess.TimeoutExpired:
        _log.info("waiting at most %.0fs for the sinks to take the remaining records", _TRAINER_WAITS_S)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_TRAINER_WAITS_S)


class SinkProcess:
    """The sinks of a run and their threads.

    Args:
        spec: the trainer's spec. By default the stored one, which has no secrets and, for a resumed run, is that of the
            start before.
        backoff_s: first wait before a retry; it doubles with each failure.
    """

    def __init__(self, root: Path, spec: RunSpec | None = None, *, backoff_s: float = 1.0) -> None:
        self.run = RunDir(root)
        spec = spec or self.run.load_spec()
        self._spec = spec.log
        self._retry = RetryPolicy(attempts=None, base_s=backoff_s, cap_s=_LONGEST_BACKOFF_S)
        self._offsets = root / "sinks"
        self._offsets.mkdir(exist_ok=True)
        self._events = JsonlWriter(self.run.events)
        self.sinks = list(asked_sinks(self._spec, self._facts(spec)))
        self.ending = threading.Event()
        self._threads = [threading.Thread(target=self._serve, args=(s,), name=s.name, daemon=True) for s in self.sinks]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def finish(self, within_s: float = _DRAIN_S) -> None:
        """Send the rest to sinks that answer, and give up those that are down."""
        self.ending.set()
        deadline = time.monotonic() + within_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _facts(self, spec: RunSpec) -> RunFacts:
        run_id = self._offsets / "run-id"
        if not run_id.exists():
            replace_file(run_id, uuid.uuid4().hex[:16].encode())
        public_spec = without_secrets(spec.model_dump(mode="json"))
        return RunFacts(self.run.root, spec.name, run_id.read_text(), public_spec)

    def _serve(self, sink: Sink) -> None:
        """Open the sink and send new records until the run ends. After a failure, reopen it and send from the same offset."""
        source = self.run.metrics if sink.source == "metrics" else self.run.events
        place = self._offsets / f"{sink.name}.json"
        tail, opened, failures = Tail(source, self._load_offset(place, sink)), False, 0
        while True:
            start = tail.offset
            try:
                if not opened:
                    sink.open()
                    opened = True
                records = [record for record, _ in tail.read(sink.at_once) if isinstance(record.get("step"), int)]
                if records:
                    sink.send(records)
                    sink.newest = records[-1]["step"]
                    self._store_offset(place, tail.offset, sink)
            except ArgosyError as error:
                self._event("sink-down", sink.name, f"{sink.name} takes no records: {error.cause}; {error.fix}")
                return
            except Exception as error:  # noqa: BLE001 - whatever a sink does, the run goes on
                tail.offset, opened = start, False
                failures += 1
                if failures == 1:
                    why = f"{sink.name} takes no records ({type(error).__name__}: {error})"
                    self._event(
                        "sink-down", sink.name, f"{why}; the run goes on, and the sink gets them when it is back"
                    )
                with contextlib.suppress(Exception):
                    sink.close()
                if self.ending.wait(self._retry.pause_s(failures)):
                    return
                continue
            if failures:
                self._event(
                    "sink-up", sink.name, f"{sink.name} is back, and was sent {len(records)} records it had missed"
                )
                failures = 0
            if not records:
                if self.ending.is_set():
                    break
                self.ending.wait(_POLL_S)
        with contextlib.suppress(Exception):
            sink.close()

    def _load_offset(self, place: Path, sink: Sink) -> int:
        try:
            stored = orjson.loads(place.read_bytes())
            sink.newest = int(stored["newest"])
            return int(stored["offset"])
        except (OSError, ValueError, KeyError, TypeError):
            return 0

    def _store_offset(self, place: Path, offset: int, sink: Sink) -> None:
        with contextlib.suppress(OSError):
            replace_file(place, orjson.dumps({"offset": offset, "newest": sink.newest}))

    def _event(self, kind: str, sink: str, text: str) -> None:
        webhook = self._spec.alerts.webhook
        text = capped(text if webhook is None else text.replace(webhook, address_only(webhook)))
        _log.log(logging.WARNING if kind == "sink-down" else logging.INFO, "%s", text)
        self._events.write({"event": kind, "step": self._step(), "time": now(), "sink": sink, "text": text})

    def _step(self) -> int:
        return max((beat.get("step", 0) for beat in read_heartbeats(self.run.heartbeats).values()), default=0)


def main() -> None:
    install_log_handler()
    # These signals are for the trainer. This process ends when the trainer does.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(5)
    process = _begin(Path(sys.argv[1]), _read_spec())
    if process is not None:
        process.start()
        _trainer_ended(None)
        process.finish()
    # A normal exit would wait for threads of a sink's library, which may be stuck.
    os._exit(0)


def _read_spec() -> RunSpec | None:
    """Read the spec that the trainer writes to standard input; None if the trainer ended first."""
    line = b""
    while not line.endswith(b"\n") and (more := os.read(0, 1 << 16)):
        line += more
    return RunSpec.model_validate_json(line) if line.endswith(b"\n") else None


def _begin(root: Path, spec: RunSpec | None) -> SinkProcess | None:
    """Wait for the sink process of a dead attempt, which may still send records and hold a port, then open the sinks.

    On a full disk the run's id cannot be stored, and opening is retried. Returns None if the trainer ends before it succeeds.
    """
    with contextlib.suppress(OSError):
        # The lock is held until this process ends.
        lock = os.open(root / ".courier", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        fcntl.flock(lock, fcntl.LOCK_EX)
    while True:
        try:
            return SinkProcess(root, spec)
        except (OSError, ArgosyError) as error:
            _log.warning("no sink gets this run's metrics yet: %s", error)
        if _trainer_ended(_LONGEST_BACKOFF_S):
            return None


def _trainer_ended(within_s: float | None) -> bool:
    """Wait until the trainer has ended. It holds the other end of standard input open, and writes nothing after its spec."""
    return bool(select.select([0], [], [], within_s)[0])


_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "prometheus": "prometheus_client", "otel": "opentelemetry"}


def asked_sinks(spec: LogSpec, run: RunFacts) -> Iterator[Sink]:
    sinks = spec.sinks
    if sinks.tensorboard:
        yield TensorBoard(run)
    if sinks.wandb is not None:
        yield WandB(run, sinks.wandb)
    if sinks.mlflow is not None:
        yield MLflow(run, sinks.mlflow, sinks.mlflow_experiment)
    if sinks.prometheus is not None:
        yield Prometheus(run, sinks.prometheus)
    if sinks.otel is not None:
        yield OpenTelemetry(run, sinks.otel)
    if spec.alerts.webhook is not None:
        yield Webhook(run, spec.alerts.webhook)


def require_packages(spec: LogSpec) -> None:
    """Refuse a sink whose package is not installed, before the run starts."""
    for extra, package in _PACKAGES.items():
        if getattr(spec.sinks, extra) and find_spec(package) is None:
            raise missing(package, extra)


if __name__ == "__main__":
    main()
