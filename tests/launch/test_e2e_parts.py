"""The parts of the scenario tests that decide without a cluster: room on nodes, the name of the image, what a failure shows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kubernetes import client

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))

import e2e_cluster
from e2e_cluster import E2eCluster
from e2e_evidence import cannot_start, describe
from e2e_nodes import FreeNode, free_nodes, pods_of_a_run


def node(name: str, cpu: str, effect: str | None = None) -> client.V1Node:
    taints = [client.V1Taint(effect=effect, key="k")] if effect else None
    return client.V1Node(
        metadata=client.V1ObjectMeta(name=name, labels={"kubernetes.io/hostname": f"{name}.local"}),
        spec=client.V1NodeSpec(taints=taints),
        status=client.V1NodeStatus(allocatable={"cpu": cpu}),
    )


def pod(name: str, on: str, cpu: str | None, phase: str = "Running", **status: Any) -> client.V1Pod:
    wanted = client.V1ResourceRequirements(requests=None if cpu is None else {"cpu": cpu})
    return client.V1Pod(
        metadata=client.V1ObjectMeta(name=name),
        spec=client.V1PodSpec(node_name=on, containers=[client.V1Container(name="c", resources=wanted)]),
        status=client.V1PodStatus(phase=phase, **status),
    )


def waits(reason: str, message: str) -> list[client.V1ContainerStatus]:
    state = client.V1ContainerState(waiting=client.V1ContainerStateWaiting(reason=reason, message=message))
    return [client.V1ContainerStatus(name="c", image="i", image_id="", ready=False, restart_count=0, state=state)]


def test_the_node_with_the_most_unrequested_cores_is_chosen() -> None:
    nodes = [
        node("a", "2"),
        node("b", "3900m"),
        node("control", "64", "NoSchedule"),
        node("soft", "1", "PreferNoSchedule"),
    ]
    pods = [pod("p", "b", "950m"), pod("q", "b", "1500m"), pod("done", "b", "2", "Succeeded"), pod("free", "a", None)]
    found = free_nodes(nodes, pods)
    assert [(one.host, round(one.cores, 3)) for one in found] == [
        ("a.local", 2.0),
        ("b.local", 1.45),
        ("soft.local", 1.0),
    ]
    with pytest.raises(AssertionError, match="no node takes pods"):
        free_nodes([node("control", "64", "NoSchedule")], [])


def test_a_run_has_as_many_pods_as_there_is_room_for() -> None:
    one, two = FreeNode("a", 1.45), FreeNode("b", 2.0)
    assert pods_of_a_run([two, one], anywhere=False) == 2
    assert pods_of_a_run([one], anywhere=False) == 1
    assert pods_of_a_run([one, one], anywhere=True) == 2
    with pytest.raises(AssertionError, match=r"so many are free: a 0\.55"):
        pods_of_a_run([FreeNode("a", 0.55)], anywhere=False)


def test_a_pod_that_cannot_start_and_one_that_waits_are_told_apart() -> None:
    assert cannot_start(pod("p", "a", None, "Pending", container_statuses=waits("ContainerCreating", ""))) == ""
    stuck = pod("p", "a", None, "Pending", container_statuses=waits("ImagePullBackOff", "no such host"))
    assert cannot_start(stuck) == "ImagePullBackOff: no such host"
    assert cannot_start(pod("p", "a", None, "Failed")).startswith("it has ended")
    event = SimpleNamespace(
        last_timestamp=None, event_time=None, involved_object=SimpleNamespace(name="p"), reason="Failed", message="why"
    )
    assert describe([stuck], [event]) == "p: Pending c waits: ImagePullBackOff no such host\np: Failed: why"


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> E2eCluster:
    """A cluster that nothing is asked of, with a kubeconfig by a relative path."""
    server = "clusters: [{name: c, cluster: {server: 'http://127.0.0.1:1'}}]"
    context = "contexts: [{name: c, context: {cluster: c, user: u}}]"
    (tmp_path / "kubeconfig").write_text(
        f"apiVersion: v1\nkind: Config\ncurrent-context: c\n{server}\n{context}\nusers: [{{name: u, user: {{}}}}]\n"
    )
    monkeypatch.chdir(tmp_path)
    return E2eCluster("kubeconfig", "r/argosy:1", None, tmp_path / "elsewhere", pods=1)


def test_commands_in_another_directory_find_the_kubeconfig(cluster: E2eCluster, tmp_path: Path) -> None:
    assert cluster.kubeconfig == str(tmp_path / "kubeconfig")


def test_a_file_that_was_cut_off_on_the_way_is_read_again(cluster: E2eCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = ["6\nabc", "6\nabcdé", ""]
    monkeypatch.setattr(e2e_cluster.time, "sleep", lambda _: None)
    monkeypatch.setattr(cluster, "run_in", lambda *_: answers.pop(0))
    assert cluster.read("file") == "abcdé"
    assert cluster.read("none") == ""


def test_a_wait_that_ends_in_vain_says_what_the_namespace_shows(
    cluster: E2eCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> bool:
        raise client.ApiException(status=403, reason="Forbidden")

    monkeypatch.setattr(cluster, "evidence", lambda: "p: Pending")
    with pytest.raises(AssertionError, match=r"(?s)a pod: not there after 0 s; .*403.*p: Pending"):
        cluster.wait(refuse, "a pod", 0.1)


def test_a_command_that_outlasts_its_time_is_ended_and_its_words_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(e2e_cluster, "LONGEST_S", 1)
    slow = subprocess.Popen(["sh", "-c", "echo begun; exec sleep 60"], stdout=subprocess.PIPE, text=True)
    with pytest.raises(AssertionError, match=r"begun\n\nand goes on after 1 s"):
        e2e_cluster.finish(slow)
    assert slow.poll() is not None
