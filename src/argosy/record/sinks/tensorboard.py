"""The TensorBoard sink: event files in the run directory, written without torch.

When a run went back to a checkpoint, a session-start event makes TensorBoard drop its values from that step on. A partial
write, as on a full disk, is truncated away, since TensorBoard reads a file only up to the first broken record.
"""

from __future__ import annotations

import errno
import io
import os
import time
from collections.abc import Sequence
from typing import Any

from argosy.record.jsonl import Record
from argosy.record.sinks.sink import AT_ONCE, RunFacts, missing, numbers


class TensorBoard:
    name, source, at_once = "tensorboard", "metrics", AT_ONCE

    def __init__(self, run: RunFacts) -> None:
        self._directory = run.root / "tensorboard"
        self._file: io.FileIO | None = None
        # Whether this file has a session-start event. An earlier process that was killed may have written steps beyond its
        # stored offset.
        self._session_started = False
        self.newest = -1

    def open(self) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError:
            raise missing("tensorboard", "tensorboard") from None
        self._events, self._summaries, self._records = event_pb2, summary_pb2, RecordWriter
        self._session_started = False
        self._directory.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{time.time():.0f}.{os.uname().nodename}.{os.getpid()}"
        self._file = io.FileIO(self._directory / name, "a")
        if not os.fstat(self._file.fileno()).st_size:
            self._append(self._file, [event_pb2.Event(wall_time=time.time(), file_version="brain.Event:2")])

    def send(self, records: Sequence[Record]) -> None:
        if self._file is None:
            raise ConnectionError("the event file is closed")
        events, newest = [], self.newest
        for record in records:
            step, wall_time = record["step"], record.get("time", 0.0)
            if step < newest or ("loss" in record and (step == newest or not self._session_started)):
                status = self._events.SessionLog(status=self._events.SessionLog.START)
                events.append(self._events.Event(wall_time=wall_time, step=step, session_log=status))
                self._session_started = True
            newest = step
            values = [self._summaries.Summary.Value(tag=n, simple_value=v) for n, v in numbers(record).items()]
            summary = self._summaries.Summary(value=values)
            events.append(self._events.Event(wall_time=wall_time, step=step, summary=summary))
        self._append(self._file, events)
        self.newest = newest

    def _append(self, file: io.FileIO, events: Sequence[Any]) -> None:
        whole, data = os.fstat(file.fileno()).st_size, io.BytesIO()
        writer = self._records(data)
        for event in events:
            writer.write(event.SerializeToString())
        try:
            if file.write(data.getvalue()) != data.tell():
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            os.ftruncate(file.fileno(), whole)
            raise

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
