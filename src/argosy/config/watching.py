"""What a run says about itself, and to whom: the `log` section of the run spec."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from argosy.config.model import Section
from argosy.config.units import Duration, DurationField, NotBool, NotNegative, PositiveNumber


def _address(value: str) -> str:
    """An address of a server. Passwords belong in the environment: the run spec is copied to every sink."""
    if value.startswith("env:") and len(value) > 4:
        return value
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("it is not the address of a server: write http://host:port or https://host, or env:NAME")
    if parts.username or parts.password:
        raise ValueError("it holds a user name or password: leave them to the environment, as the guide describes")
    return value


def _listener(value: str) -> str:
    host, _, port = value.rpartition(":")
    if not port.isdigit() or not 0 <= int(port) < 65536:
        raise ValueError("it is not a port: write 9464, or 0.0.0.0:9464 to be reached from other machines")
    return f"{host or '127.0.0.1'}:{port}"


Address = Annotated[str, AfterValidator(_address)]
Listener = Annotated[str, Field(coerce_numbers_to_str=True), AfterValidator(_listener), NotBool]


class SinksSpec(Section):
    """Where the record of a run goes besides its directory. Each is independent of the others, and none can stop training."""

    tensorboard: bool = Field(False, description="event files in the run directory's tensorboard/")
    wandb: str | None = Field(
        None, description="a project of Weights & Biases, or entity/project; WANDB_API_KEY and WANDB_MODE count"
    )
    mlflow: Address | None = Field(
        None,
        description="an MLflow tracking server, as http://host:5000; MLFLOW_TRACKING_TOKEN or _USERNAME and _PASSWORD count",
    )
    mlflow_experiment: str = Field("argosy", description="the experiment there")
    prometheus: Listener | None = Field(
        None, description="the port Prometheus finds the latest figures on, as 9464; host:port for other interfaces"
    )
    otel: Address | None = Field(
        None,
        description="an OpenTelemetry collector (OTLP over HTTP), as http://host:4318; OTEL_EXPORTER_OTLP_HEADERS counts",
    )

    @property
    def asked(self) -> bool:
        return any((self.tensorboard, self.wandb, self.mlflow, self.prometheus, self.otel))


class AlertsSpec(Section):
    """When a run speaks up. Alerts are events in events.jsonl and lines on the console."""

    webhook: Address | None = Field(
        None, description="an address each alert is posted to as JSON; env:NAME takes it from the environment"
    )
    slow_rank: NotNegative = Field(0.12, description="a rank whose own work takes longer than the median by this share")
    throughput_drop: NotNegative = Field(0.25, description="tokens/s below the run's usual figure by this share")
    spike: PositiveNumber = Field(6.0, description="standard deviations of the loss above its recent mean")
    stall_s: PositiveNumber = Field(
        600.0,
        description="seconds in one phase of a step, and four times the longest it took so far; three times as many where none is known",
    )
    disk_gib: NotNegative = Field(2.0, description="free GiB left where the run directory lies")


class LogSpec(Section):
    """What goes to metrics.jsonl, to the console, and to the tools people already have."""

    every: DurationField = Field(Duration(10.0, "steps"), description="how often")
    price: PositiveNumber | None = Field(
        None,
        description="US dollars an hour of all the machines of the run, for the cost so far; default: the list price of cluster.instance",
    )
    sinks: SinksSpec = Field(SinksSpec(), description="other tools")
    alerts: AlertsSpec = Field(AlertsSpec(), description="when to speak up")
