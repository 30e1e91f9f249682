"""The process beside a run that carries its record to the sinks: `python -m argosy.record.sink_process RUN`.

The trainer only ever appends to files. The courier reads them as they grow, one thread for each sink, each with a place of its
own in the file that is kept in the run directory. So a sink that is down, slow or broken costs training nothing; it is announced
once, and gets everything it missed when it comes back, in this attempt of the run or in a later one. The courier ends when
the trainer does, by whatever death, once the sinks that answer have everything.
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
from pathlib import Path

import orjson

from argosy.config.schema import RunSpec
from argosy.config.secrets import without_secrets
from argosy.echo import address_only, capped
from argosy.errors import ArgosyError
from argosy.files import replace_file
from argosy.log_handler import install_log_handler
from argosy.record.heartbeat import read_heartbeats
from argosy.record.jsonl import JsonlWriter, now
from argosy.record.rundir import RunDir
from argosy.record.sinks.asked import asked_sinks
from argosy.record.sinks.sink import RunFacts, Sink
from argosy.record.tail import Tail

_LOOK_S = 1.0
_LONGEST_WAIT_S = 60.0  # between two tries of a sink that is down
_FAREWELL_S = 60.0  # for sinks that answer to take the rest
_TRAINER_WAITS_S, _SILENTLY_S = 20.0, 2.0
_log = logging.getLogger("argosy.record.sink_process")  # the process itself knows this module as __main__


@contextlib.contextmanager
def carried(run: RunDir, spec: RunSpec) -> Iterator[None]:
    """While a run trains: its record is carried to the sinks that were asked for, if any."""
    if not spec.log.sinks.asked and spec.log.alerts.webhook is None:
        yield
        return
    command = [sys.executable, "-m", "argosy.record.sink_process", str(run.root)]
    try:
        courier = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        if courier.stdin is not None:  # the spec in the run directory has no secrets, and this one may
            courier.stdin.write(spec.model_dump_json().encode() + b"\n")
            courier.stdin.flush()
    except OSError as error:
        _log.warning("no sink is served: %s", error)
        yield
        return
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if courier.stdin is not None:
                courier.stdin.close()
        _wait_for(courier)


def _wait_for(courier: subprocess.Popen[bytes]) -> None:
    """Until the sinks have the rest; one that does not answer is left to the courier."""
    try:
        courier.wait(_SILENTLY_S)
    except subprocess.TimeoutExpired:
        _log.info("the sinks are taking the rest of the record, for %.0fs at most", _TRAINER_WAITS_S)
        with contextlib.suppress(subprocess.TimeoutExpired):
            courier.wait(_TRAINER_WAITS_S)


class Courier:
    def __init__(self, root: Path, spec: RunSpec | None = None, *, patience_s: float = 1.0) -> None:
        """`spec`: what the trainer was asked for; unless given, what is stored of it, which has no secrets, and for a run that goes on is
        that of the start before."""
        self.run = RunDir(root)
        spec = spec or self.run.load_spec()
        self._spec, self._patience_s = spec.log, patience_s
        self._places = root / "sinks"
        self._places.mkdir(exist_ok=True)
        self._events = JsonlWriter(self.run.events)
        self.sinks = list(asked_sinks(self._spec, self._facts(spec)))
        self.ending = threading.Event()
        self._threads = [threading.Thread(target=self._carry, args=(s,), name=s.name, daemon=True) for s in self.sinks]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def finish(self, within_s: float = _FAREWELL_S) -> None:
        """The run is over: sinks that answer take the rest, those that are down are left."""
        self.ending.set()
        deadline = time.monotonic() + within_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _facts(self, spec: RunSpec) -> RunFacts:
        kept = self._places / "run-id"
        if not kept.exists():
            replace_file(kept, uuid.uuid4().hex[:16].encode())
        told = without_secrets(spec.model_dump(mode="json"))
        return RunFacts(self.run.root, spec.name, kept.read_text(), told)

    def _carry(self, sink: Sink) -> None:
        """One sink's whole life: open, send what is new, and after a failure begin again from the same place."""
        source = self.run.metrics if sink.source == "metrics" else self.run.events
        place = self._places / f"{sink.name}.json"
        tail, opened, down, wait_s = Tail(source, self._recall(place, sink)), False, 0, self._patience_s
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
                    self._remember(place, tail.offset, sink)
            except ArgosyError as error:
                self._event("sink-down", sink.name, f"{sink.name} takes no records: {error.cause}; {error.fix}")
                return
            except Exception as error:  # noqa: BLE001 - whatever a sink does, the run goes on
                tail.offset, opened = start, False
                down += 1
                if down == 1:
                    why = f"{sink.name} takes no records ({type(error).__name__}: {error})"
                    self._event("sink-down", sink.name, f"{why}; the run goes on, and it will get them when it is back")
                with contextlib.suppress(Exception):
                    sink.close()
                if self.ending.wait(wait_s):
                    return
                wait_s = min(_LONGEST_WAIT_S, 2 * wait_s)
                continue
            if down:
                self._event(
                    "sink-up", sink.name, f"{sink.name} is back, and was sent {len(records)} records it had missed"
                )
                down, wait_s = 0, self._patience_s
            if not records:
                if self.ending.is_set():
                    break
                self.ending.wait(_LOOK_S)
        with contextlib.suppress(Exception):
            sink.close()

    def _recall(self, place: Path, sink: Sink) -> int:
        try:
            kept = orjson.loads(place.read_bytes())
            sink.newest = int(kept["newest"])
            return int(kept["offset"])
        except (OSError, ValueError, KeyError, TypeError):
            return 0

    def _remember(self, place: Path, offset: int, sink: Sink) -> None:
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
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # meant for the trainer, whose end ends this too
    with contextlib.suppress(OSError):
        os.nice(5)
    courier = _begin(Path(sys.argv[1]), _asked())
    if courier is not None:
        courier.start()
        _trainer_ended(None)
        courier.finish()
    os._exit(0)  # threads of a sink's library may be stuck


def _asked() -> RunSpec | None:
    """What the trainer writes first; None where it ended before that."""
    line = b""
    while not line.endswith(b"\n") and (more := os.read(0, 1 << 16)):
        line += more
    return RunSpec.model_validate_json(line) if line.endswith(b"\n") else None


def _begin(root: Path, spec: RunSpec | None) -> Courier | None:
    """One courier at a time: that of an attempt that died may still have something to send, and hold a port. Where the disk is
    full, the run's id there cannot be kept, and it is tried again; None where the run ends before that."""
    with contextlib.suppress(OSError):
        lock = os.open(root / ".courier", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        fcntl.flock(lock, fcntl.LOCK_EX)  # held until this process ends
    while True:
        try:
            return Courier(root, spec)
        except (OSError, ArgosyError) as error:
            _log.warning("no sink is served yet: %s", error)
        if _trainer_ended(_LONGEST_WAIT_S):
            return None


def _trainer_ended(within_s: float | None) -> bool:
    """The trainer holds the other end of standard input open, and writes nothing more."""
    return bool(select.select([0], [], [], within_s)[0])


if __name__ == "__main__":
    main()
