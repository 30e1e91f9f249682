"""HyperPodPyTorchJob: its rendered pods run under HyperPod's own agent, which a test commands as the operator does; the agent finds
the lines its rule waits for in every pod, and a run whose pod has lost a rank goes on when all are started again."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rendering import GPU_EXAMPLE, HYPERPOD, objects_of, pods_of
from test_pods_run import NODES

from argosy.launch.place import place
from argosy.launch.render import render
from argosy.launch.targets.hyperpod import AGENT_LOGS, AGENT_PORT, AGENT_STATE
from argosy.record.jsonl import read_metrics
from faults.bench import held
from ports import free_port
from waiting import PATIENCE_S

STEPS = 40
SAGEMAKER = (*HYPERPOD, "cluster.operator=sagemaker")
AGENT = next(Path("/opt/hyperpod").glob("lib/python3*/site-packages/hyperpod_elastic_agent"), None)


def job_of(spec: Path, overrides: tuple[str, ...] = ()) -> dict[str, Any]:
    [job] = [
        d
        for d in objects_of(render(place(spec, [*SAGEMAKER, *overrides], "hyperpod")))
        if d["kind"] == "HyperPodPyTorchJob"
    ]
    return job


def test_the_agent_can_write_what_it_has_to_and_keeps_the_log_its_rule_is_about() -> None:
    [pod] = pods_of(job_of(GPU_EXAMPLE))
    [container] = pod["containers"]
    written = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
    assert {AGENT_STATE, "/tmp"} <= written, "the root file system is read-only"
    assert AGENT_LOGS.startswith("/tmp/")
    assert {"--tee=3", f"--log-dir={AGENT_LOGS}"} <= set(container["args"])
    assert {"name": "NNODES", "value": "2"} in container["env"]


def test_silence_while_it_evaluates_is_no_hang() -> None:
    [short] = job_of(GPU_EXAMPLE, ("eval.batches=1",))["spec"]["runPolicy"]["logMonitoringConfiguration"]
    [long] = job_of(GPU_EXAMPLE, ("eval.batches=1000",))["spec"]["runPolicy"]["logMonitoringConfiguration"]
    frequency = "expectedRecurringFrequencyInSeconds"
    assert long[frequency] > short[frequency]


class Agents:
    """A pod is an agent on a port of its own; its volume is a directory."""

    def __init__(self, job: dict[str, Any], config: str, volume: Path, packages: Path) -> None:
        self.job, self.volume, self.packages = job, volume, packages
        self.ports, self.meeting = [free_port() for _ in range(NODES)], free_port()
        (volume / "spec").mkdir()
        (volume / "spec" / "run.yaml").write_text(config)
        self.running = [self._start(node) for node in range(NODES)]

    def _start(self, node: int) -> subprocess.Popen[bytes]:
        [pod] = pods_of(self.job)
        [container] = pod["containers"]
        assert container["command"] == ["hyperpodrun"]
        own = self.volume / f"pod-{node}"
        own.mkdir()
        replaced = {
            "/etc/argosy": str(self.volume / "spec"),
            AGENT_LOGS: str(own / "logs"),
            f"={AGENT_PORT}": f"={self.ports[node]}",
            "/scratch": str(own),
        }
        words, environment = container["args"], {entry["name"]: entry["value"] for entry in container["env"]}
        for old, new in replaced.items():
            words = [word.replace(old, new) for word in words]
            environment = {name: value.replace(old, new) for name, value in environment.items()}
        environment |= {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"} | held(
            STEPS // 2, until=self.volume / "killed"
        )
        environment["PYTHONPATH"] += os.pathsep + str(self.packages)
        agent = [sys.executable, str(Path(__file__).with_name("hyperpodrun.py")), "--server-host=127.0.0.1"]
        with (own / "log").open("wb") as log:
            return subprocess.Popen(
                [*agent, f"--rdzv-conf=resource_config_dir={own / 'state'}", *words], cwd=self.volume, env=environment,
                stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def ask(self, node: int, path: str, body: dict[str, Any] | None = None) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        url = f"http://127.0.0.1:{self.ports[node]}{path}"
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return bytes(answer.read())

    def start(self, faults: int) -> None:
        """As the operator does, with the job's rules."""
        for node in range(NODES):
            self.wait(node, "ready")
        for node in range(NODES):
            self.ask(node, "/start", {
                "rank": node, "nnodes": NODES, "faultCount": faults, "master_addr": "127.0.0.1",
                "master_port": self.meeting + faults, "ipVersion": "1",
                "rankIps": [{"rank": rank, "ip": "127.0.0.1"} for rank in range(NODES)],
                "log_monitoring_configuration": self.job["spec"]["runPolicy"]["logMonitoringConfiguration"],
            })  # fmt: skip

    def wait(self, node: int, *states: str) -> None:
        self.until(lambda: self.state(node) in states, f"pod {node} is not {states}")

    def state(self, node: int) -> str | None:
        try:
            return str(json.loads(self.ask(node, "/status"))["status"])
        except OSError:
            return None

    def until(self, ready: Callable[[], bool], otherwise: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not ready():
            said = "\n".join(path.read_text(errors="replace")[-3000:] for path in self.volume.glob("pod-*/log"))
            assert time.monotonic() < deadline, f"{otherwise}:\n{said}"
            time.sleep(0.2)

    def close(self) -> None:
        for process in self.running:
            subprocess.run(["pkill", "-KILL", "-s", str(process.pid)], check=False)  # the agent's own session
            process.wait()


@pytest.fixture
def agents(write_spec: Callable[..., Path], corpus: Path, tmp_path: Path) -> Iterator[Agents]:
    if AGENT is None:
        pytest.skip("needs HyperPod's agent in /opt/hyperpod; .ci/run puts it there")
    (tmp_path / "corpus").symlink_to(corpus)
    spec = write_spec(
        runs_dir="runs",
        cluster={
            "gpus": 0, "ranks": 1, "nodes": NODES, "cpus": 1, "memory": "4Gi", "fabric": "tcp", "image": "r/argosy@sha256:0",
            "storage": {"claim": "c", "mount": str(tmp_path)}, "preflight": False,
        },
        data={"train": "corpus", "seq_len": 32, "split": [90, 10, 0]},
        train={"global_batch": 8, "steps": STEPS},
        parallel={"dp_replicate": NODES, "micro_batch": 2},
        checkpoint={"every": 10, "keep": 3},
        eval=False,
    )  # fmt: skip
    made = Agents(job_of(spec), spec.read_text(), tmp_path, AGENT.parent)
    yield made
    made.close()


def test_pods_under_hyperpods_agent_train_are_watched_and_go_on_after_a_fault(agents: Agents) -> None:
    metrics = agents.volume / "runs" / "tiny" / "metrics.jsonl"
    agents.start(faults=0)
    agents.until(lambda: metrics.exists() and max(read_metrics(metrics), default=0) >= 4, "no step 4")
    [agent] = [process.pid for process in agents.running[1:]]
    ranks = subprocess.run(["pgrep", "-P", str(agent)], capture_output=True, text=True, check=False)
    os.kill(int(ranks.stdout.split()[0]), signal.SIGKILL)
    (agents.volume / "killed").touch()
    agents.wait(1, "faulted")
    for node in range(NODES):
        agents.ask(node, "/stop", {})
    agents.start(faults=1)
    for node in range(NODES):
        agents.wait(node, "completed")
    assert sorted(read_metrics(metrics))[-1] == STEPS
    [rule] = agents.job["spec"]["runPolicy"]["logMonitoringConfiguration"]
    for node in range(NODES):
        [read] = (agents.volume / f"pod-{node}" / "logs").glob("*/attempt_1/0/stdout.log")
        ended = [line for line in read.read_text().splitlines() if re.match(rule["stopPattern"], line)]
        assert len(ended) == 1, "the last step, after which a silence is no hang"
        for attempt in (0, 1):
            [read] = (agents.volume / f"pod-{node}" / "logs").glob(f"*/attempt_{attempt}/0/stdout.log")
            assert any(re.match(rule["logPattern"], line) for line in read.read_text().splitlines())
