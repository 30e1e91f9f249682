"""The OpenTelemetry sink: every metric as a gauge `argosy.<name>` with the time it was logged, sent to a collector over HTTP.

Old records keep their own times, so that records a collector missed can be sent later.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from argosy.record.jsonl import Record
from argosy.record.sinks.sink import AT_ONCE, RunFacts, missing, numbers


class OpenTelemetry:
    name, source, at_once = "otel", "metrics", AT_ONCE
    newest = -1

    def __init__(self, run: RunFacts, address: str) -> None:
        self._run, self._address = run, address.rstrip("/")
        self._exporter: Any = None

    def open(self) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
            from opentelemetry.sdk.metrics import export
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        except ImportError:
            raise missing("opentelemetry-exporter-otlp-proto-http", "otel") from None
        self._export = export
        self._scope = InstrumentationScope("argosy")
        self._resource = Resource.create({"service.name": "argosy", "service.instance.id": self._run.run_id})
        self._exporter = OTLPMetricExporter(endpoint=f"{self._address}/v1/metrics", timeout=5)

    def send(self, records: Sequence[Record]) -> None:
        points: dict[str, list[Any]] = {}
        for record in records:
            nanoseconds = int(record.get("time", 0.0) * 1e9)
            # The step is no attribute: each step would become a time series of its own.
            attributes = {"run": self._run.name}
            for name, value in (numbers(record) | {"step": record["step"]}).items():
                point = self._export.NumberDataPoint(attributes, nanoseconds, nanoseconds, value)
                points.setdefault(name, []).append(point)
        made = [
            self._export.Metric(f"argosy.{name.replace('/', '.')}", name, "", self._export.Gauge(found))
            for name, found in points.items()
        ]
        scope = self._export.ScopeMetrics(self._scope, made, "")
        data = self._export.MetricsData([self._export.ResourceMetrics(self._resource, [scope], "")])
        if self._exporter.export(data, timeout_millis=5000) is not self._export.MetricExportResult.SUCCESS:
            raise ConnectionError(f"{self._address} did not accept the metrics")

    def close(self) -> None:
        if self._exporter is not None:
            self._exporter.shutdown()
            self._exporter = None
