"""TensorBoard event files in the run directory, written without torch. A run that went back to a checkpoint says so in them, and
TensorBoard drops what it had from that step on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from argosy.record.jsonl import Record
from argosy.record.sinks.sink import RunFacts, missing, numbers


class TensorBoard:
    name, source = "tensorboard", "metrics"

    def __init__(self, run: RunFacts) -> None:
        self._directory = run.root / "tensorboard"
        self._writer: Any = None
        self.newest = -1

    def open(self) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError:
            raise missing("tensorboard", "tensorboard") from None
        self._events, self._summaries = event_pb2, summary_pb2
        self._writer = EventFileWriter(str(self._directory))

    def send(self, records: Sequence[Record]) -> None:
        for record in records:
            step, time = record["step"], record.get("time", 0.0)
            if step < self.newest or (step == self.newest and "loss" in record):
                status = self._events.SessionLog(status=self._events.SessionLog.START)
                self._writer.add_event(self._events.Event(wall_time=time, step=step, session_log=status))
            self.newest = step
            values = [self._summaries.Summary.Value(tag=n, simple_value=v) for n, v in numbers(record).items()]
            summary = self._summaries.Summary(value=values)
            self._writer.add_event(self._events.Event(wall_time=time, step=step, summary=summary))
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
