"""The sinks that a run spec asks for, and the check that their packages are installed."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from argosy.config.watching import LogSpec
from argosy.record.sinks.mlflow import MLflow
from argosy.record.sinks.otel import OpenTelemetry
from argosy.record.sinks.prometheus import Prometheus
from argosy.record.sinks.sink import RunFacts, Sink, missing
from argosy.record.sinks.tensorboard import TensorBoard
from argosy.record.sinks.wandb import WandB
from argosy.record.sinks.webhook import Webhook

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
