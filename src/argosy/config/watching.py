"""The `log` section of the run spec: metrics, sinks and alerts."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from argosy.config.model import Section
from argosy.config.units import Duration, DurationField, NotBool, NotNegative, Positive, PositiveNumber, Whole


def _address(value: str) -> str:
    """Validate the address of a server. It may hold no password, because the run spec is copied to every sink."""
    if value.startswith("env:") and len(value) > 4:
        return value
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("it is not the address of a server: write http://host:port or https://host, or env:NAME")
    if parts.username or parts.password:
        raise ValueError("it contains a user name or password: set them in the environment, as the guide describes")
    return value


def _listener(value: str) -> str:
    host, _, port = value.rpartition(":")
    if not port.isdigit() or not 0 <= int(port) < 65536:
        raise ValueError("it is not a port: write 9464, or 0.0.0.0:9464 to listen for other machines")
    return f"{host or '127.0.0.1'}:{port}"


Address = Annotated[str, AfterValidator(_address)]
Listener = Annotated[str, Field(coerce_numbers_to_str=True), AfterValidator(_listener), NotBool]


class SinksSpec(Section):
    """Tools that receive the metrics of a run besides its directory. Sinks are independent, and none can stop training."""

    tensorboard: bool = Field(False, description="TensorBoard event files in the run directory's tensorboard/")
    wandb: str | None = Field(
        None, description="Weights & Biases project, or entity/project; WANDB_API_KEY and WANDB_MODE are read"
    )
    mlflow: Address | None = Field(
        None,
        description="MLflow tracking server, for example http://host:5000; MLFLOW_TRACKING_TOKEN or _USERNAME and _PASSWORD are read",
    )
    mlflow_experiment: str = Field("argosy", description="MLflow experiment")
    prometheus: Listener | None = Field(
        None,
        description="port on which Prometheus scrapes the latest metrics, for example 9464; host:port for other interfaces",
    )
    otel: Address | None = Field(
        None,
        description="OpenTelemetry collector (OTLP over HTTP), for example http://host:4318; OTEL_EXPORTER_OTLP_HEADERS is read",
    )

    @property
    def asked(self) -> bool:
        return any((self.tensorboard, self.wandb, self.mlflow, self.prometheus, self.otel))


class AlertsSpec(Section):
    """Thresholds of alerts. An alert is an event in events.jsonl and a line on the console."""

    webhook: Address | None = Field(
        None, description="URL that receives each alert as JSON (POST); env:NAME reads it from the environment"
    )
    slow_rank: NotNegative = Field(0.12, description="straggler: share by which a rank's own work exceeds the median")
    throughput_drop: NotNegative = Field(0.25, description="share by which tokens/s is below the run's usual value")
    spike: PositiveNumber = Field(6.0, description="loss spike: standard deviations above the recent mean")
    stall_s: PositiveNumber = Field(
        600.0,
        description="seconds in one phase of a step, if that is also four times its longest so far; three times as many if no time "
        "is known yet",
    )
    disk_gib: NotNegative = Field(2.0, description="free GiB on the disk of the run directory")


class SamplesSpec(Section):
    """Text that the model writes while it trains, in the run directory's samples.jsonl. It changes no number of the training."""

    prompts: list[str] = Field(min_length=1, description="texts to continue; an empty one begins a document")
    every: DurationField = Field(Duration(500.0, "steps"), description="how often")
    tokens: Positive = Field(64, description="most tokens to write after each prompt")
    temperature: NotNegative = Field(0.8, description="sampling temperature; 0: greedy decoding")
    top_k: Whole = Field(50, description="sample among this many most likely tokens; 0: among all")


class LogSpec(Section):
    """Metrics in metrics.jsonl and on the console, sinks and alerts."""

    every: DurationField = Field(Duration(10.0, "steps"), description="how often")
    price: PositiveNumber | None = Field(
        None,
        description="US dollars per hour of all machines of the run, for the cost so far; default: the list price of cluster.instance",
    )
    samples: SamplesSpec | None = Field(
        None,
        description="prompts that the model continues every so often, in samples.jsonl",
    )
    sinks: SinksSpec = Field(SinksSpec(), description="other tools")
    alerts: AlertsSpec = Field(AlertsSpec(), description="alert thresholds")
