"""A Ray cluster of two nodes makes the bytes that one process makes, also when a node is lost meanwhile."""

from __future__ import annotations

import json
import logging
import random
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from nasty_texts import PLAIN
from ray.cluster_utils import Cluster
from ray.util.client import worker as client_worker

from argosy import __version__
from argosy.data.curate import curate_work
from argosy.data.curate.curate_job import curate
from argosy.data.curate.curate_work import CurateSharing
from argosy.data.curate.pipeline_spec import read_pipeline
from argosy.data.prepare import work
from argosy.data.prepare.job import prepare
from argosy.data.prepare.ray_workers import RayWorkers, Started
from argosy.data.prepare.work import PrepareOptions
from argosy.data.text.tokenizer import ByteTokenizer
from argosy.errors import ArgosyError
from ports import free_port
from waiting import PATIENCE_S, wait_for

# A node that is gone is noticed within five seconds. A busy machine lets one that is there answer late.
QUICK = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 1000, "health_check_failure_threshold": 5}


def started(start: Callable[[], Any]) -> Any:
    """What `start` returns. Ray gives up on a node that is not there within 30 seconds, which a busy machine may need."""
    for _ in range(4):
        with suppress(Exception):
            return start()
    return start()


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setattr(work, "block_size", lambda files: 1 << 15)
    monkeypatch.setattr(curate_work, "block_size", lambda files: 1 << 15)
    # Neither make a token in the home directory, nor use one that is there.
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    # A busy machine answers late: Ray Client gives up after three tries of 5 to 15 seconds.
    monkeypatch.setenv("RAY_CLIENT_SERVER_CHECK_CHANNEL_TIMEOUT_S", "240")
    monkeypatch.setattr(client_worker, "INITIAL_TIMEOUT_SEC", 30)
    monkeypatch.setattr(client_worker, "MAX_TIMEOUT_SEC", 60)
    head = {"num_cpus": 1, "include_dashboard": False, "_system_config": QUICK, "ray_client_server_port": free_port()}
    made = started(lambda: Cluster(initialize_head=True, head_node_args=head))
    yield made
    made.shutdown()


def content(directory: Path) -> dict[str, bytes]:
    found = {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}
    return {name: data.replace(str(directory).encode(), b"") for name, data in found.items()}


@pytest.mark.slow  # Ray starts a server for each client, and gives up if that takes long
def test_ray_client_makes_the_same_bytes(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text("\n".join(json.dumps({"text": f"text {number}"}) for number in range(3000)))
    prepare(["in.jsonl"], ByteTokenizer(), Path("one"), PrepareOptions(workers=1, shards=2))
    port = cluster.head_node._ray_params.ray_client_server_port
    client = f"ray://127.0.0.1:{port}"
    # The head starts it, and does not wait for it.
    wait_for(lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0)
    prepare(["in.jsonl"], ByteTokenizer(), Path("two"), PrepareOptions(shards=2, cluster=client))
    assert content(tmp_path / "one") == content(tmp_path / "two")


def test_a_lost_node_changes_nothing(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    node = started(lambda: cluster.add_node(num_cpus=1))
    rng = random.Random(0)
    texts = [" ".join(rng.choices(PLAIN, k=100)) for _ in range(1500)]
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join(json.dumps({"text": text}) for text in [*texts, *texts[:50]]))
    # Relative names are those of the job's directory, also for workers that were started elsewhere.
    monkeypatch.chdir(tmp_path)
    options = PrepareOptions(workers=1, shards=2)
    prepare(["in.jsonl"], ByteTokenizer(), Path("one"), options)
    prepare(["in.jsonl"], ByteTokenizer(), Path("two"), PrepareOptions(shards=2, cluster=cluster.address))
    assert content(tmp_path / "one") == content(tmp_path / "two")

    waited, lost = RayWorkers._wait, []

    def wait(self: RayWorkers) -> Any:
        if self._starting and not lost:
            # A worker that starts late would find nothing left to do.
            self._ray.wait([*self._starting], num_returns=len(self._starting), timeout=PATIENCE_S)
        if len(self._busy) == 2 and not lost:
            lost.append(node)
            cluster.remove_node(node, allow_graceful=False)
        return waited(self)

    steps = ["gopher_repetition", "exact_duplicates", "near_duplicates"]
    pipeline = tmp_path / "p.yaml"
    pipeline.write_text(yaml.safe_dump({"inputs": ["in.jsonl"], "output": "", "shards": 2, "steps": steps}))
    curate(read_pipeline(pipeline, output=str(tmp_path / "clean")), CurateSharing(workers=1))
    monkeypatch.setattr(RayWorkers, "_wait", wait)
    with caplog.at_level(logging.INFO, "argosy"):
        curate(read_pipeline(pipeline, output=str(tmp_path / "again")), CurateSharing(cluster=cluster.address))
    assert lost
    assert "was lost" in caplog.text
    assert content(tmp_path / "clean") == content(tmp_path / "again")


def test_an_address_without_a_cluster_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "a"}')
    options = PrepareOptions(cluster="127.0.0.1:1")
    with pytest.raises(ArgosyError, match="no Ray cluster answers"):
        prepare([str(tmp_path / "in.jsonl")], ByteTokenizer(), tmp_path / "out", options)


@pytest.mark.parametrize(
    ("started", "message"),
    [
        (Started("n7", "id", "0.0.0", None), "node n7 of the Ray cluster has Argosy 0.0.0"),
        (Started("n7", "id", __version__, "cannot load this tokenizer"), "node n7 of the Ray cluster cannot use"),
    ],
)
def test_a_node_with_other_software_is_refused_by_name(started: Started, message: str) -> None:
    workers = object.__new__(RayWorkers)
    workers.engine, workers._proven = "gigatoken", True
    with pytest.raises(ArgosyError, match=message) as refusal:
        workers._started(None, started)
    assert "install" in str(refusal.value.fix)


def test_a_cluster_that_does_not_answer_as_its_address_says_is_refused_with_both_forms() -> None:
    class Ray:
        @staticmethod
        def init(**_: Any) -> None:
            raise ConnectionError("ray client connection timeout")

    workers = object.__new__(RayWorkers)
    workers._ray, workers._address = Ray, "ray://head:6379"
    with pytest.raises(ArgosyError, match="ray://head:6379: ray client connection timeout") as refusal:
        workers._connect(None)
    # A ConnectionError is an OSError, which would read as a failure to write the output.
    assert refusal.value.code == "launch.environment"
    assert "ray://HEAD:10001" in refusal.value.fix
    assert "HEAD:6379 without ray://" in refusal.value.fix


@pytest.mark.parametrize("is_known", [False, True])
def test_a_connection_that_was_lost_between_two_calls_asks_to_run_the_command_again(
    monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    class Ray:
        initialized = not is_known

        @classmethod
        def is_initialized(cls) -> bool:
            return cls.initialized

        @classmethod
        def lose(cls, *_: Any, **__: Any) -> None:
            assert cls.initialized, "Ray starts a cluster of its own"
            cls.initialized = False
            raise Exception("Ray Client is not connected. Please connect by calling `ray.init`.")

        cluster_resources = wait = get = lose

    class Actor:
        make = type("Method", (), {"remote": Ray.lose})

    workers = object.__new__(RayWorkers)
    workers._ray, workers._address = Ray, "ray://head:10001"
    add_workers = workers._add_workers
    monkeypatch.setattr(workers, "_add_workers", lambda: None)
    calls: list[Callable[[], object]] = [
        add_workers,
        lambda: list(workers._wait()),
        lambda: next(workers.run(iter([("part", None)]))),
    ]
    for call in calls:
        Ray.initialized = not is_known
        workers._starting, workers._busy, workers._idle = {}, {"reference": (Actor, None)}, [Actor]
        with pytest.raises(ArgosyError, match="the connection to the Ray cluster at ray://head:10001 was lost") as lost:
            call()
        assert "run the same command again" in lost.value.fix
