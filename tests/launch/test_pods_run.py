"""A rendered job really runs: the pods of each target, with their command and the environment its operator gives them, are
started as processes that find each other and train; one is killed and comes back as that target would bring it back.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rendering import objects_of, pods_of

from argosy.errors import EXIT_DONE, EXIT_RESUMABLE
from argosy.launch.place import place
from argosy.launch.render import render
from argosy.record.jsonl import read_metrics
from argosy.supervise.world import find_nodes
from faults.bench import held
from forking import ARGOSY, Popen
from ports import free_port
from waiting import PATIENCE_S, wait_for

STEPS = 10
NODES = 2


def injected(target: str, node: int, name: str) -> dict[str, str]:
    """What the operator of a target adds to a pod, by its documentation."""
    if target in ("jobset", "indexed-job"):
        return {"JOB_COMPLETION_INDEX": str(node)}
    if target == "trainjob":
        return {
            "PET_NNODES": str(NODES), "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": str(node),
            "PET_MASTER_ADDR": f"{name}-node-0-0.{name}", "PET_MASTER_PORT": "29500",
        }  # fmt: skip
    return {  # PyTorchJob and HyperPod's
        "MASTER_ADDR": f"{name}-master-0", "PET_MASTER_ADDR": f"{name}-master-0", "MASTER_PORT": "23456",
        "PET_MASTER_PORT": "23456", "WORLD_SIZE": str(NODES), "RANK": str(node), "PET_NODE_RANK": str(node),
        "PET_NPROC_PER_NODE": "1", "PET_NNODES": str(NODES), "PYTHONUNBUFFERED": "1",
    }  # fmt: skip


class Pods:
    """Two pods of a rendered job as processes of this machine: its volume is a directory, its DNS this host."""

    def __init__(self, spec: Path, target: str, volume: Path, overrides: tuple[str, ...] = ()) -> None:
        more = ["cluster.cloud=hyperpod", "cluster.namespace=hyperpod-ns-a"] if target == "hyperpod" else []
        placed = place(spec, [*more, *overrides], target)
        self.target, self.name, self.volume, self.port = target, placed.name, volume, free_port()
        jobs = [
            d for d in objects_of(render(placed)) if d["kind"] in ("JobSet", "Job", "PyTorchJob", "TrainingRuntime")
        ]
        self.templates = [pod for job in jobs for pod in pods_of(job) if "train" in pod["containers"][0]["args"]]
        config = next(d for d in objects_of(render(placed)) if d["kind"] == "ConfigMap")
        (volume / "spec").mkdir(exist_ok=True)
        (volume / "spec" / "run.yaml").write_text(config["data"]["run.yaml"])
        self.running: dict[int, Popen] = {}

    def start(self, node: int, **more: str) -> None:
        pod = self.templates[min(node, len(self.templates) - 1)]
        [container] = pod["containers"]
        environment = {entry["name"]: entry["value"] for entry in container["env"]}
        environment |= injected(self.target, node, self.name)
        for variable in ("MASTER_ADDR", "PET_MASTER_ADDR"):
            if variable in environment:
                environment[variable] = "127.0.0.1"
        for variable in ("MASTER_PORT", "PET_MASTER_PORT"):
            if variable in environment:
                environment[variable] = str(self.port)
        scratch = self.volume / f"scratch-{node}"
        scratch.mkdir(exist_ok=True)
        environment = {name: value.replace("/scratch", str(scratch)) for name, value in environment.items()}
        keep = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "OMP_NUM_THREADS") if name in os.environ}
        words = [word.replace("/etc/argosy", str(self.volume / "spec")) for word in container["args"]]
        assert container["command"] == ["argosy"]
        with (self.volume / f"pod-{node}.log").open("ab") as log:
            self.running[node] = Popen(
                [*ARGOSY, *words], cwd=self.volume, env=keep | environment | more,
                stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def kill(self, node: int) -> None:
        """As a node dies: everything at once."""
        os.killpg(self.running[node].pid, signal.SIGKILL)
        self.running[node].wait()

    def stop(self, node: int) -> None:
        self.running[node].terminate()
        self.running[node].wait(PATIENCE_S)

    def logs(self) -> str:
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.volume.glob("pod-*.log")))

    def wait_for_step(self, step: int) -> None:
        metrics = self.volume / "runs" / "tiny" / "metrics.jsonl"
        wait_for(
            lambda: max(read_metrics(metrics), default=0) >= step, otherwise=lambda: f"no step {step}:\n{self.logs()}"
        )

    def close(self) -> None:
        for process in self.running.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@pytest.fixture
def pods(write_spec: Callable[..., Path], corpus: Path, tmp_path: Path) -> Iterator[Callable[..., Pods]]:
    made: list[Pods] = []
    (tmp_path / "corpus").symlink_to(corpus)
    cluster: dict[str, Any] = {
        "gpus": 0, "ranks": 1, "nodes": NODES, "cpus": 1, "memory": "4Gi", "fabric": "tcp", "image": "r/argosy@sha256:0",
        "storage": {"claim": "c", "mount": str(tmp_path)}, "preflight": False,
    }  # fmt: skip

    def make(target: str, *overrides: str, **parts: Any) -> Pods:
        settings: dict[str, Any] = {
            "train": {"global_batch": 8, "steps": STEPS}, "parallel": {"dp_replicate": NODES, "micro_batch": 2},
            "checkpoint": {"every": 3, "keep": 3},
        }  # fmt: skip
        spec = write_spec(
            runs_dir="runs",
            cluster=cluster,
            data={"train": "corpus", "seq_len": 32, "split": [90, 10, 0]},
            eval=False,
            fault={"nodes_wait": PATIENCE_S},
            **settings | parts,
        )
        made.append(Pods(spec, target, tmp_path, overrides))
        return made[-1]

    yield make
    for each in made:
        each.close()


SLOW = pytest.mark.slow  # they come back in one of the ways of the first two


@pytest.mark.parametrize(
    "target",
    ["jobset", "pytorchjob", *(pytest.param(target, marks=SLOW) for target in ("trainjob", "indexed-job", "hyperpod"))],
)
def test_two_pods_train_and_survive_the_death_of_one(target: str, pods: Callable[[str], Pods]) -> None:
    job = pods(target)
    for node in range(NODES):
        job.start(node, **held(STEPS - 2, until=job.volume / "killed"))
    job.wait_for_step(4)
    job.kill(1)
    (job.volume / "killed").touch()
    if target in ("jobset", "trainjob", "indexed-job"):  # one failure ends every pod, and all are made anew
        job.stop(0)
        for node in range(NODES):
            job.start(node)
    else:  # the pod comes back alone; the others have to cope
        job.start(1)
    codes = [job.running[node].wait(2 * PATIENCE_S) for node in range(NODES)]
    assert codes == [EXIT_DONE, EXIT_DONE], job.logs()
    metrics = read_metrics(job.volume / "runs" / "tiny" / "metrics.jsonl")
    assert sorted(metrics)[-1] == STEPS
    assert metrics[STEPS]["steps"] == STEPS


def test_launched_again_on_another_number_of_nodes_it_goes_on(pods: Callable[..., Pods]) -> None:
    """The layout is left open: it follows the nodes, and the batch and the order of samples stay."""
    open_layout = {"parallel": {"micro_batch": 2}, "checkpoint": {"every": 100, "keep": 2}}
    first = pods("jobset", **open_layout, train={"global_batch": 8, "steps": 100_000})
    for node in range(NODES):
        first.start(node)
    first.wait_for_step(4)
    for node in range(NODES):
        first.running[node].terminate()
    assert [first.running[node].wait(PATIENCE_S) for node in range(NODES)] == [EXIT_RESUMABLE] * NODES, first.logs()
    stopped = max(read_metrics(first.volume / "runs" / "tiny" / "metrics.jsonl"))
    alone = pods("jobset", "cluster.nodes=1", f"train.steps={stopped + 3}", **open_layout)
    alone.start(0)
    assert alone.running[0].wait(PATIENCE_S) == EXIT_DONE, alone.logs()
    metrics = read_metrics(alone.volume / "runs" / "tiny" / "metrics.jsonl")
    assert [metrics[step]["samples"] for step in range(stopped - 1, stopped + 4)] == [
        8 * step for step in range(stopped - 1, stopped + 4)
    ]
    events = (alone.volume / "runs" / "tiny" / "events.jsonl").read_text()
    assert "parallel.dp_replicate" in events, "the change of the layout is on the record"


@pytest.mark.parametrize("target", ["jobset", "pytorchjob", "trainjob", "indexed-job", "hyperpod"])
def test_a_pod_finds_its_place_in_what_its_operator_says(target: str, pods: Callable[[str], Pods]) -> None:
    job = pods(target)
    for node in range(NODES):
        [container] = job.templates[min(node, len(job.templates) - 1)]["containers"]
        environment = {entry["name"]: entry["value"] for entry in container["env"]} | injected(target, node, job.name)
        found = find_nodes(environment)
        assert (found.index, found.count) == (node, NODES)
        assert found.address.startswith(job.name)
        assert found.port in (29500, 23456)
