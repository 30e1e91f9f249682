"""The webhook sink: posts alerts and other important events, one JSON object a request. Slack and similar services show `text`."""

from __future__ import annotations

import os
import urllib.request
from collections.abc import Sequence

import orjson

from argosy.errors import ArgosyError
from argosy.record.alerts import NEWS
from argosy.record.jsonl import Record
from argosy.record.sinks.sink import RunFacts

_TIMEOUT_S = 10.0


class Webhook:
    # One record at a time: a batch that fails half-way would be posted twice.
    name, source, at_once = "webhook", "events", 1
    newest = -1

    def __init__(self, run: RunFacts, address: str) -> None:
        self._run, self._address = run.name, address

    def open(self) -> None:
        if self._address.startswith("env:"):
            name = self._address.removeprefix("env:")
            if not os.environ.get(name):
                raise ArgosyError(
                    "log.missing-variable", f"the environment has no {name}", key="log.alerts.webhook", value=self._address,
                    fix=f"set {name} to the address where the run is started",
                )  # fmt: skip
            self._address = os.environ[name]
        # The message does not show the address: whoever has it can post.
        if not self._address.startswith(("https://", "http://")):
            raise ArgosyError(
                "log.missing-variable", "the variable does not hold a web address", key="log.alerts.webhook",
                fix="set it to the full address, starting with https://",
            )  # fmt: skip

    def send(self, records: Sequence[Record]) -> None:
        for record in records:
            if record.get("event") in NEWS:
                why = record.get("cause") or record.get("reason") or record.get("signal")
                about = record.get("text") or (f"{record['event']}: {why}" if why else record["event"])
                text = f"{self._run}, step {record.get('step')}: {about}"
                body = orjson.dumps({"run": self._run, "text": text, "event": record})
                request = urllib.request.Request(self._address, body, {"Content-Type": "application/json"})
                with urllib.request.urlopen(request, timeout=_TIMEOUT_S):
                    pass

    def close(self) -> None: ...
