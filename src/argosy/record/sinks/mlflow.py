"""The MLflow sink, through the tracking server's REST API: the client library is large and pins packages that a run needs.

A run is one MLflow run, found again by a tag. MLflow keeps every value with its step and time; if a step was trained twice,
the later value is shown. Credentials come from MLflow's own environment variables.
"""

from __future__ import annotations

import base64
import os
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any

import orjson

from argosy.config.resolve import flatten
from argosy.record.jsonl import Record
from argosy.record.sinks.sink import AT_ONCE, RunFacts, numbers, outcome

_TIMEOUT_S = 10.0
# The server's limits of one request.
_METRICS_AT_ONCE, _PARAMS_AT_ONCE = 1000, 100
_TAG = "argosy.run_id"
# Characters that a metric's name must not contain.
_NOT_ALLOWED = re.compile(r"[^\w\-. /:]")
_STATUS = {"done": "FINISHED", "interrupted": "KILLED"}


class MLflow:
    name, source, at_once = "mlflow", "metrics", AT_ONCE
    newest = -1

    def __init__(self, run: RunFacts, address: str, experiment: str) -> None:
        self._facts, self._address, self._experiment = run, address.rstrip("/"), experiment
        self._run = ""

    def open(self) -> None:
        experiment = self._find_experiment()
        found = self._call(
            "runs/search", {"experiment_ids": [experiment], "filter": f"tags.`{_TAG}` = '{self._facts.run_id}'"}
        )
        if runs := found.get("runs"):
            self._run = runs[0]["info"]["run_id"]
            self._call("runs/update", {"run_id": self._run, "status": "RUNNING"})
            return
        tags = [{"key": _TAG, "value": self._facts.run_id}]
        made = self._call("runs/create", {"experiment_id": experiment, "run_name": self._facts.name, "tags": tags})
        self._run = made["run"]["info"]["run_id"]
        params = [{"key": k, "value": str(v)[:500]} for k, v in flatten(self._facts.spec) if v is not None]
        for batch in _batches(params, _PARAMS_AT_ONCE):
            self._call("runs/log-batch", {"run_id": self._run, "params": batch})

    def send(self, records: Sequence[Record]) -> None:
        metrics = [
            {
                "key": _NOT_ALLOWED.sub("_", name),
                "value": value,
                "timestamp": int(1000 * record.get("time", 0.0)),
                "step": record["step"],
            }
            for record in records
            for name, value in numbers(record).items()
        ]
        for batch in _batches(metrics, _METRICS_AT_ONCE):
            self._call("runs/log-batch", {"run_id": self._run, "metrics": batch})

    def close(self) -> None:
        if self._run:
            self._call("runs/update", {"run_id": self._run, "status": _STATUS.get(outcome(self._facts), "FAILED")})

    def _find_experiment(self) -> str:
        try:
            found = self._call(
                "experiments/get-by-name", query=f"?experiment_name={urllib.parse.quote(self._experiment)}"
            )
            return str(found["experiment"]["experiment_id"])
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise
            return str(self._call("experiments/create", {"name": self._experiment})["experiment_id"])

    def _call(self, what: str, body: dict[str, Any] | None = None, query: str = "") -> dict[str, Any]:
        headers = {"Content-Type": "application/json", **_credentials()}
        data = None if body is None else orjson.dumps(body)
        request = urllib.request.Request(f"{self._address}/api/2.0/mlflow/{what}{query}", data, headers)
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as reply:
            return dict(orjson.loads(reply.read() or b"{}"))


def _credentials() -> dict[str, str]:
    if token := os.environ.get("MLFLOW_TRACKING_TOKEN"):
        return {"Authorization": f"Bearer {token}"}
    user, password = os.environ.get("MLFLOW_TRACKING_USERNAME"), os.environ.get("MLFLOW_TRACKING_PASSWORD", "")
    if user:
        return {"Authorization": "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()}
    return {}


def _batches(items: list[dict[str, Any]], size: int) -> Iterator[list[dict[str, Any]]]:
    for first in range(0, len(items), size):
        yield items[first : first + size]
