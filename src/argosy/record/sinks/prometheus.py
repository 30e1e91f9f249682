"""The Prometheus sink: an endpoint to scrape, with the latest metrics as gauges `argosy_<name>` and the run's name as a label."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from argosy.record.jsonl import Record
from argosy.record.sinks.sink import AT_ONCE, RunFacts, missing, numbers


class Prometheus:
    name, source, at_once = "prometheus", "metrics", AT_ONCE
    newest = -1

    def __init__(self, run: RunFacts, listener: str) -> None:
        host, _, port = listener.rpartition(":")
        self._run, self._host, self._port = run.name, host, int(port)
        self._latest: dict[str, float] = {}
        self._server: Any = None

    def open(self) -> None:
        if self._server is not None:
            return
        try:
            from prometheus_client import CollectorRegistry, start_http_server
        except ImportError:
            raise missing("prometheus-client", "prometheus") from None
        registry = CollectorRegistry()
        registry.register(self)
        self._server, _ = start_http_server(self._port, self._host, registry)

    @property
    def port(self) -> int:
        return int(self._server.server_port)

    def send(self, records: Sequence[Record]) -> None:
        for record in records:
            self._latest |= numbers(record) | {
                "step": record["step"],
                "last_log_timestamp_seconds": record.get("time", 0.0),
            }

    def collect(self) -> Iterator[Any]:
        """Yield the gauges of a scrape. prometheus_client calls this."""
        from prometheus_client.core import GaugeMetricFamily

        # Two metrics may map to the same gauge name, which may appear only once.
        gauges = {metric_name(name): (name, value) for name, value in list(self._latest.items())}
        for gauge, (name, value) in gauges.items():
            family = GaugeMetricFamily(gauge, f"{name} of the latest logged step", labels=["run"])
            family.add_metric([self._run], value)
            yield family

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


def metric_name(name: str) -> str:
    return "argosy_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)
