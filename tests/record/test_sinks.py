"""Sinks are tested against real readers: TensorBoard's, W&B's files, an MLflow server, Prometheus, an OTLP receiver."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import waiting
from argosy.config.watching import AlertsSpec, LogSpec
from argosy.record.jsonl import JsonlWriter, read_jsonl
from argosy.record.rundir import RunDir
from argosy.record.sink_process import SinkProcess, serve_sinks
from forking import ARGOSY, Popen
from ports import free_port
from record.run_dirs import log, make_run


def carry(run: RunDir) -> SinkProcess:
    """Send all records of a run to all of its sinks."""
    process = SinkProcess(run.root, backoff_s=0.05)
    process.start()
    process.finish(waiting.PATIENCE_S)
    return process


def wait_for(what: Callable[[], Any]) -> Any:
    """Wait until a server answers, and return the answer."""

    def answer() -> Any:
        with contextlib.suppress(OSError, KeyError, IndexError):
            return what()

    return waiting.wait_for(answer, 240)


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=waiting.PATIENCE_S) as reply:
        return json.load(reply)


class Receiver:
    """A server that keeps the bodies posted to it. It answers the posts numbered in `refuse` with an error."""

    def __init__(self, port: int = 0, refuse: Collection[int] = ()) -> None:
        self.bodies: list[bytes] = []
        keep, count = self.bodies, itertools.count()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body, refused = self.rfile.read(int(self.headers["Content-Length"])), next(count) in refuse
                if not refused:
                    keep.append(body)
                self.send_response(503 if refused else 200)
                self.end_headers()

            def log_message(self, *arguments: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.port = self.server.server_port
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def __enter__(self) -> Receiver:
        return self

    def __exit__(self, *error: object) -> None:
        self.server.shutdown()
        self.server.server_close()


def test_tensorboard_reads_the_curves_and_drops_what_a_resumed_run_did_again(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = make_run(tmp_path / "tb", "log.sinks.tensorboard=true")
    log(run, range(10, 60, 10))
    carry(run)
    # Resumed from step 20.
    log(run, range(30, 60, 10), loss=1.25)
    with JsonlWriter(run.metrics) as metrics:
        metrics.write({"step": 50, "time": 1.0, "validation_loss": 3.5})
    carry(run)
    reader = EventAccumulator(str(run.root / "tensorboard"))
    reader.Reload()
    losses = {event.step: event.value for event in reader.Scalars("loss")}
    assert list(losses) == [10, 20, 30, 40, 50]
    assert losses[20] > 4
    assert losses[30] == losses[50] == 1.25
    assert [event.step for event in reader.Scalars("validation_loss")] == [50]
    assert [event.step for event in reader.Scalars("time/forward_backward")] == [10, 20, 30, 40, 50]


def test_what_a_killed_sink_process_had_sent_and_not_noted_is_not_in_tensorboard_twice(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = make_run(tmp_path / "tb", "log.sinks.tensorboard=true")
    log(run, [10, 20])
    carry(run)
    noted = (run.root / "sinks" / "tensorboard.json").read_bytes()
    log(run, [30, 40])
    carry(run)
    # The state after a kill between sending and storing the offset.
    (run.root / "sinks" / "tensorboard.json").write_bytes(noted)
    log(run, [50])
    carry(run)
    reader = EventAccumulator(str(run.root / "tensorboard"))
    reader.Reload()
    assert [event.step for event in reader.Scalars("loss")] == [10, 20, 30, 40, 50]


def wandb_messages(file: Path) -> Iterator[bytes]:
    """Yield the messages of a .wandb file: a header of 7 bytes, then blocks of 32 KiB with LevelDB's log records (crc, length,
    kind)."""
    data, at, message = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        # No record header fits into the rest of the block.
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        message += data[at + 7 : at + 7 + length]
        at += 7 + length
        # A whole message, or its last part.
        if kind in (1, 4):
            yield message
            message = b""


def wandb_files(root: Path) -> tuple[set[str], dict[int, dict[str, float]]]:
    """Return the run ids and, by step, the metrics of all offline files, newest last."""
    from wandb.proto import wandb_internal_pb2

    ids, history = set(), {}
    for file in sorted(root.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime):
        for message in wandb_messages(file):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(message)
            if record.WhichOneof("record_type") == "run":
                ids.add(record.run.run_id)
            if record.WhichOneof("record_type") == "history":
                items = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
                history[int(items["step"])] = items
    return ids, history


def test_wandb_has_one_run_across_restarts_without_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = make_run(tmp_path / "wb", "log.sinks.wandb=ocean")
    log(run, range(10, 50, 10))
    carry(run)
    log(run, range(30, 60, 10), loss=1.25)
    carry(run)
    # Resumed from 40: step 50 is logged a second time.
    log(run, [50, 60], loss=0.75)
    carry(run)
    # Rewound while it ran.
    log(run, [70, 60, 70], loss=0.5)
    carry(run)
    ids, history = wandb_files(run.root)
    assert ids == {(run.root / "sinks" / "run-id").read_text()}
    assert sorted(history) == [10, 20, 30, 40, 50, 60, 70]
    assert history[30]["loss"] == history[40]["loss"] == 1.25
    assert history[50]["loss"] == 0.75
    assert history[60]["loss"] == history[70]["loss"] == 0.5
    assert history[20]["loss"] > 4
    assert not (run.root / "tensorboard").exists()


def children() -> set[str]:
    """Return the names of the living child processes of this process."""
    found = set()
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):
            facts = dict(line.split(":\t", 1) for line in status.read_text().splitlines() if ":\t" in line)
            if int(facts["PPid"]) == os.getpid():
                found.add(facts["Name"])
    return found


def test_wandbs_own_process_has_written_everything_and_ended_before_the_sink_process_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = make_run(tmp_path / "wb", "log.sinks.wandb=ocean")
    log(run, [10])
    process = SinkProcess(run.root, backoff_s=0.05)
    process.start()
    wait_for(lambda: json.loads((run.root / "sinks" / "wandb.json").read_text())["newest"] == 10)
    assert "wandb-core" in children()
    process.finish(waiting.PATIENCE_S)
    assert "wandb-core" not in children()
    assert sorted(wandb_files(run.root)[1]) == [10]


def test_wandb_keeps_what_was_begun_within_the_same_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = make_run(tmp_path / "wb", "log.sinks.wandb=ocean")
    log(run, [10, 20])
    carry(run)
    number, begun = (run.root / "sinks" / "run-id").read_text(), time.time()
    # Pretend that an earlier start was in the same second, whichever that will be.
    for ahead in range(4):
        second = time.strftime("%Y%m%d_%H%M%S", time.localtime(begun + ahead))
        (run.root / "wandb" / f"offline-run-{second}-{number}").mkdir(exist_ok=True)
    log(run, [30])
    carry(run)
    assert sorted(wandb_files(run.root)[1]) == [10, 20, 30]
    latest = max(run.root.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime)
    assert latest.parent.name > f"offline-run-{second}-{number}"


@pytest.fixture(scope="module")
def mlflow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if shutil.which("mlflow") is None:
        pytest.skip("no mlflow command; .ci/run installs one in an environment of its own")
    root, port = tmp_path_factory.mktemp("mlflow"), free_port()
    command = ["mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{root}/store.db", "--default-artifact-root", str(root / "artifacts")]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    environ = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    # The server runs in an environment of its own.
    environ.pop("PYTHONPATH", None)
    server = subprocess.Popen(command, cwd=root, env=environ, start_new_session=True, **quiet)
    try:
        address = f"http://127.0.0.1:{port}"
        wait_for(lambda: urllib.request.urlopen(f"{address}/health", timeout=2).status == 200)
        yield address
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait(waiting.PATIENCE_S)


def test_mlflow_has_one_run_with_its_figures_and_parameters(tmp_path: Path, mlflow_server: str) -> None:
    run = make_run(tmp_path / "ml", f"log.sinks.mlflow={mlflow_server}", "log.sinks.mlflow_experiment=the sea")
    # MLflow does not allow these characters.
    odd = {"validation_loss/corpus (new)?": 3.0}
    log(run, range(10, 50, 10), **odd)
    carry(run)
    log(run, range(30, 60, 10), loss=1.25)
    with JsonlWriter(run.events) as events:
        events.write({"event": "done", "step": 50, "time": 1.0})
    carry(run)

    def call(what: str, **body: Any) -> Any:
        request = urllib.request.Request(f"{mlflow_server}/api/2.0/mlflow/{what}", json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request) as reply:
            return json.load(reply)

    experiment = get(f"{mlflow_server}/api/2.0/mlflow/experiments/get-by-name?experiment_name=the%20sea")
    found = call("runs/search", experiment_ids=[experiment["experiment"]["experiment_id"]])["runs"]
    assert len(found) == 1
    assert found[0]["info"]["run_name"] == "ml"
    assert found[0]["info"]["status"] == "FINISHED"
    assert {p["key"]: p["value"] for p in found[0]["data"]["params"]}["train.global_batch"] == "8"
    history = get(
        f"{mlflow_server}/api/2.0/mlflow/metrics/get-history?run_id={found[0]['info']['run_id']}&metric_key=loss"
    )
    # Values are in the order they were sent.
    newest = {metric["step"]: metric["value"] for metric in history["metrics"]}
    assert sorted(newest) == [10, 20, 30, 40, 50]
    assert newest[50] == 1.25


def test_a_prometheus_server_scrapes_the_figures(tmp_path: Path) -> None:
    if shutil.which("prometheus") is None:
        pytest.skip("no prometheus; .ci/run installs Debian's")
    listener, port = free_port(), free_port()
    run = make_run(tmp_path / "scraped", f"log.sinks.prometheus={listener}")
    # Both names map to the same gauge.
    log(run, [10, 20], **{"validation_loss/a b": 1.0, "validation_loss/a_b": 2.0})
    config = tmp_path / "prometheus.yml"
    config.write_text(
        "scrape_configs:\n- job_name: argosy\n  scrape_interval: 1s\n  scrape_timeout: 1s\n"
        f"  static_configs:\n  - targets: ['127.0.0.1:{listener}']\n"
    )
    process = SinkProcess(run.root)
    process.start()
    command = [
        "prometheus",
        f"--config.file={config}",
        f"--storage.tsdb.path={tmp_path / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        query = f"http://127.0.0.1:{port}/api/v1/query?query="
        found = wait_for(lambda: get(query + "argosy_step")["data"]["result"][0])
        assert found["metric"]["run"] == "scraped"
        assert found["value"][1] == "20"
        page = urllib.request.urlopen(f"http://127.0.0.1:{listener}/metrics", timeout=waiting.PATIENCE_S).read()
        assert page.count(b"# TYPE argosy_validation_loss_a_b gauge") == 1
        # There is none while the last scrape took longer than its timeout.
        found = wait_for(lambda: get(query + "argosy_time_forward_backward")["data"]["result"][0])
        assert found["value"][1] == "8"
        log(run, [30])
        wait_for(lambda: get(query + "argosy_step")["data"]["result"][0]["value"][1] == "30")
    finally:
        server.terminate()
        server.wait(waiting.PATIENCE_S)
        process.finish(5)


def test_an_otlp_receiver_gets_gauges_with_their_own_times(tmp_path: Path) -> None:
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

    with Receiver() as receiver:
        run = make_run(tmp_path / "otel", f"log.sinks.otel=http://127.0.0.1:{receiver.port}")
        log(run, [10, 20])
        carry(run)
    request = ExportMetricsServiceRequest()
    request.ParseFromString(receiver.bodies[0])
    metrics = {m.name: m for m in request.resource_metrics[0].scope_metrics[0].metrics}
    points = metrics["argosy.loss"].gauge.data_points
    assert [p.time_unix_nano for p in points] == [1_700_000_100 * 10**9, 1_700_000_200 * 10**9]
    # One time series, however many steps.
    assert all([a.key for a in p.attributes] == ["run"] for p in points)
    assert [p.as_int for p in metrics["argosy.step"].gauge.data_points] == [10, 20]
    assert "argosy.time.forward_backward" in metrics


def test_a_webhook_is_told_of_alerts_and_not_of_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Receiver() as receiver:
        monkeypatch.setenv("OUR_HOOK", f"http://127.0.0.1:{receiver.port}/x")
        run = make_run(tmp_path / "hook", "log.alerts.webhook=env:OUR_HOOK")
        with JsonlWriter(run.events) as events:
            events.write({"event": "start", "step": 0, "time": 1.0})
            events.write({"event": "alert", "step": 7, "time": 2.0, "alert": "nan", "text": "the loss is nan"})
            events.write({"event": "save", "step": 8, "time": 3.0, "path": "step-8"})
            events.write({"event": "save-failed", "step": 9, "time": 4.0, "cause": "No space left on device"})
        carry(run)
        # A second pass sends nothing again.
        carry(run)
    told = [json.loads(body) for body in receiver.bodies]
    assert [message["text"] for message in told] == [
        "hook, step 7: the loss is nan",
        "hook, step 9: save-failed: No space left on device",
    ]


def test_a_webhook_written_in_the_spec_is_told_and_stored_nowhere(tmp_path: Path) -> None:
    """The trainer passes the address to the sink process; the run directory does not have it."""
    with Receiver() as receiver:
        address = f"http://127.0.0.1:{receiver.port}/T0KEN"
        run = make_run(tmp_path / "hook", f"log.alerts.webhook={address}")
        stored = run.load_spec()
        asked = stored.model_copy(update={"log": LogSpec(alerts=AlertsSpec(webhook=address))})
        # A resumed run whose resolved.json was deleted has none until its first step.
        run.resolved_file.unlink()
        with serve_sinks(run, asked), JsonlWriter(run.events) as events:
            events.write({"event": "alert", "step": 7, "time": 2.0, "alert": "nan", "text": "the loss is nan"})
        # The trainer does not wait for the sink process any longer than some seconds.
        wait_for(lambda: receiver.bodies)
    assert [json.loads(body)["text"] for body in receiver.bodies] == ["hook, step 7: the loss is nan"]
    for file in run.root.rglob("*"):
        assert not file.is_file() or b"T0KEN" not in file.read_bytes(), file


def test_a_webhook_that_fails_in_between_tells_nobody_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The third post, and its first retry.
    with Receiver(refuse={2, 3}) as receiver:
        monkeypatch.setenv("OUR_HOOK", f"http://127.0.0.1:{receiver.port}/x")
        run = make_run(tmp_path / "hook", "log.alerts.webhook=env:OUR_HOOK")
        with JsonlWriter(run.events) as events:
            for step in range(5):
                events.write({"event": "alert", "step": step, "time": 1.0, "alert": "nan", "text": f"alert {step}"})
        process = SinkProcess(run.root, backoff_s=0.05)
        process.start()
        # Including the event that the sink was down.
        wait_for(lambda: len(receiver.bodies) >= 6)
        process.finish(waiting.PATIENCE_S)
    told = [json.loads(body)["text"] for body in receiver.bodies if b"alert" in body]
    assert told == [f"hook, step {step}: alert {step}" for step in range(5)]


def test_an_address_that_is_none_is_refused_without_being_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUR_HOOK", "hooks.example/secret-part")
    run = make_run(tmp_path / "hook", "log.alerts.webhook=env:OUR_HOOK")
    log(run, [10])
    carry(run)
    (down,) = read_jsonl(run.events)
    assert "does not hold a web address" in down["text"]
    assert "secret-part" not in run.events.read_text()


def test_a_dead_sink_is_announced_once_and_backfilled_when_it_returns(tmp_path: Path) -> None:
    port = free_port()
    run = make_run(tmp_path / "dead", f"log.sinks.otel=http://127.0.0.1:{port}", "log.sinks.tensorboard=true")
    log(run, [10])
    process = SinkProcess(run.root, backoff_s=0.05)
    process.start()
    wait_for(lambda: [e for e in read_jsonl(run.events) if e["event"] == "sink-down"])
    # Nobody listens yet. The other sink goes on.
    log(run, [20, 30])
    wait_for(lambda: json.loads((run.root / "sinks" / "tensorboard.json").read_text())["newest"] == 30)
    with Receiver(port) as receiver:
        wait_for(lambda: [e for e in read_jsonl(run.events) if e["event"] == "sink-up"])
        process.finish(waiting.PATIENCE_S)
    events = [event["event"] for event in read_jsonl(run.events)]
    assert events == ["sink-down", "sink-up"]
    assert json.loads((run.root / "sinks" / "otel.json").read_text())["newest"] == 30
    assert receiver.bodies


@contextlib.contextmanager
def tarpit() -> Iterator[int]:
    """A server that accepts connections and never answers."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield int(server.getsockname()[1])


def test_a_sink_that_never_answers_holds_up_neither_the_run_nor_another_sink(
    tmp_path: Path, write_spec: Any, argosy: Any
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with tarpit() as port:
        asked = ["log.sinks.tensorboard=true", f"log.sinks.mlflow=http://127.0.0.1:{port}"]
        trainer = Popen([*ARGOSY, "train", str(write_spec()), *asked, "--quiet"], stderr=subprocess.PIPE)
        run = tmp_path / "runs" / "tiny"
        try:
            wait_for(lambda: [e for e in read_jsonl(run / "events.jsonl") if e["event"] == "done"])
            wait_for(lambda: json.loads((run / "sinks" / "tensorboard.json").read_text())["newest"] == 6)
        finally:
            trainer.kill()
            trainer.wait()
    reader = EventAccumulator(str(run / "tensorboard"))
    reader.Reload()
    assert [event.step for event in reader.Scalars("loss")] == [1, 2, 3, 4, 5, 6]


def test_on_a_full_disk_a_sink_leaves_nothing_broken_and_gets_the_rest_once_there_is_room(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small disk can only be mounted by root")
    try:
        run = make_run(disk / "full", "log.sinks.tensorboard=true")
        log(run, range(1, 200))
        ballast = disk / "ballast"
        with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
            while file.write(bytes(1 << 14)):
                pass
        os.truncate(ballast, ballast.stat().st_size - (1 << 14))
        process = SinkProcess(run.root, backoff_s=0.05)
        process.start()
        wait_for(lambda: "tensorboard takes no records" in run.events.read_text())
        ballast.unlink()
        wait_for(lambda: json.loads((run.root / "sinks" / "tensorboard.json").read_text())["newest"] == 199)
        process.finish(waiting.PATIENCE_S)
        reader = EventAccumulator(str(run.root / "tensorboard"), size_guidance={"scalars": 0})
        reader.Reload()
        assert [event.step for event in reader.Scalars("loss")] == list(range(1, 200))
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=False)


def test_a_sink_process_waits_for_the_one_before_it(tmp_path: Path) -> None:
    import fcntl

    run = make_run(tmp_path / "twice", "log.sinks.tensorboard=true")
    log(run, [10])
    with (run.root / ".courier").open("w") as held:
        # Stands for the sink process of a dead attempt that still runs.
        fcntl.flock(held, fcntl.LOCK_EX)
        command = [sys.executable, "-m", "argosy.record.sink_process", str(run.root)]
        second = subprocess.Popen(command, stdin=subprocess.PIPE)
        with pytest.raises(subprocess.TimeoutExpired):
            second.communicate(timeout=3)
        assert not (run.root / "tensorboard").exists()
    second.wait(waiting.PATIENCE_S)
    assert list((run.root / "tensorboard").iterdir())


def test_what_a_sink_missed_is_sent_by_the_next_attempt(tmp_path: Path) -> None:
    port = free_port()
    run = make_run(tmp_path / "later", f"log.sinks.otel=http://127.0.0.1:{port}")
    log(run, [10, 20])
    # Nobody listens: the record is given up at the end of the run.
    carry(run)
    with Receiver(port) as receiver:
        carry(run)
    assert len(receiver.bodies) == 1


def test_an_address_that_lets_anybody_post_is_told_to_no_sink(tmp_path: Path) -> None:
    run = make_run(tmp_path / "secret", "log.alerts.webhook=https://hooks.example/T0KEN", "log.sinks.tensorboard=true")
    assert "T0KEN" not in str(SinkProcess(run.root)._facts(run.load_spec()).spec)


def test_a_real_run_is_carried_while_a_dead_sink_costs_it_nothing(tmp_path: Path, write_spec: Any, argosy: Any) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    done = argosy("train", write_spec(), "log.sinks.tensorboard=true", f"log.sinks.otel=http://127.0.0.1:{free_port()}")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("otel takes no records") == 1
    reader = EventAccumulator(str(tmp_path / "runs" / "tiny" / "tensorboard"))
    reader.Reload()
    assert [event.step for event in reader.Scalars("loss")] == [1, 2, 3, 4, 5, 6]
    assert [event.step for event in reader.Scalars("validation_loss")] == [3, 6]


def test_a_sink_whose_package_is_missing_is_refused_before_training(
    write_spec: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import argosy.record.sink_process as asked
    from argosy.config.watching import LogSpec, SinksSpec
    from argosy.errors import ArgosyError

    monkeypatch.setattr(asked, "find_spec", lambda name: None)
    with pytest.raises(ArgosyError) as refusal:
        asked.require_packages(LogSpec(sinks=SinksSpec(wandb="p")))
    assert refusal.value.code == "log.missing-extra"
    asked.require_packages(LogSpec(sinks=SinksSpec(mlflow="http://h:1")))


def test_grafanas_dashboard_asks_for_figures_that_exist() -> None:
    from argosy.record.sinks.prometheus import metric_name
    from argosy.record.sinks.sink import numbers
    from record.run_dirs import record

    dashboard = json.loads((Path(__file__).parents[2] / "docs" / "grafana" / "argosy.json").read_text())
    asked = {t["expr"].partition("{")[0] for p in dashboard["panels"] for t in p["targets"]}
    sometimes = {
        "validation_loss",
        "mfu",
        "cost",
        "rank_spread",
        "gpu/temperature",
        "gpu/throttled",
        "time/communication",
    }
    assert asked <= {metric_name(name) for name in {*numbers(record(1)), *sometimes}}
