"""Launching, following and stopping against a real HTTP server that answers as Kubernetes does, and fails as it does."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from api_server import ApiServer
from kubernetes.client.rest import ApiException
from kubernetes.config import incluster_config
from rendering import CHART, GPU_EXAMPLE, ROOT

from argosy.console.training_lines import stopped_line
from argosy.errors import ArgosyError
from argosy.launch import api, conduct, runs
from argosy.launch.api import RETRY, Cluster, Forbidden, connect
from argosy.launch.conduct import EXIT_STAGE_FAILED, Conductor
from argosy.launch.manifests import JOB, KUBERNETES_LEAST, POD
from argosy.launch.place import place
from argosy.launch.placement import Placement
from argosy.launch.registry import find_target
from argosy.launch.stages import STAGES, TRAIN
from argosy.launch.target import State
from argosy.launch.targets.kubernetes import EVERY_LAUNCH, KubernetesTarget, job_kinds, kinds_beside, runs_of_namespace
from argosy.launch.upload import upload
from waiting import wait_for

RUN, CLAIM = "techpulse-7b", "fsx-shared-pvc"
TRAIN_ONLY = ["cluster.preflight=false", "data.train.0.prepare=null"]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    running = ApiServer()
    monkeypatch.setenv("KUBECONFIG", str(running.write_config(tmp_path / "kubeconfig")))
    yield running
    running.close()


@pytest.fixture
def launch(server: ApiServer) -> Callable[..., tuple[int, list[str]]]:
    """Conduct the example, and return its exit code and what it said."""

    def run(*overrides: str, target: str | None = None, **options: Any) -> tuple[int, list[str]]:
        said: list[str] = []
        cluster = connect("training", retry=replace(RETRY, attempts=4, base_s=0.01))
        conductor = conductor_of(cluster, place(GPU_EXAMPLE, overrides, target), said.append)
        only = options.pop("only", None)
        return conductor.run(None if only is None else STAGES[only], **options), said

    return run


def conductor_of(cluster: Cluster, placed: Placement, say: Callable[[str], None] = print) -> Conductor:
    """As the target itself makes it, but looking every second."""
    target = find_target(placed.cluster.target)
    assert isinstance(target, KubernetesTarget)
    made = target.manifests(placed)
    rights = [*EVERY_LAUNCH, *target.rights(placed.cluster)]
    kinds = {"beside": target.beside, "rights": rights}
    return Conductor(cluster, placed, made, say, target.jobs, target.restarts_itself, look_every=1, **kinds)


def look(cluster: Cluster, run: str, stage: str) -> State:
    return conduct.look(cluster, run, stage, job_kinds())


def stop(cluster: Cluster, run: str) -> list[str]:
    return conduct.stop(cluster, run, job_kinds(), kinds_beside())


def later(action: Callable[[], None], ready: Callable[[], bool]) -> threading.Thread:
    """The part of the cluster: act once something is there."""

    def wait() -> None:
        wait_for(ready)
        action()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def finish(server: ApiServer, plural: str, name: str, kind: str = "Complete", **more: str) -> threading.Thread:
    return later(lambda: server.condition(plural, name, kind, **more), lambda: (plural, name) in server.objects)


def test_stages_follow_each_other_and_each_waits_for_the_one_before(
    server: ApiServer, launch: Callable[..., tuple[int, list[str]]]
) -> None:
    order: list[str] = []

    def done(plural: str, name: str, kind: str) -> None:
        order.append(name)
        assert (plural, name) in server.objects
        server.condition(plural, name, kind)

    later(lambda: done("jobs", f"{RUN}-prepare", "Complete"), lambda: ("jobs", f"{RUN}-prepare") in server.objects)
    later(lambda: done("jobs", f"{RUN}-preflight", "Complete"), lambda: ("jobs", f"{RUN}-preflight") in server.objects)
    later(lambda: done("jobsets", RUN, "Completed"), lambda: ("jobsets", RUN) in server.objects)
    code, said = launch()
    assert code == 0
    assert order == [f"{RUN}-prepare", f"{RUN}-preflight", RUN]
    assert ("configmaps", f"{RUN}-spec") in server.objects
    assert any(line.startswith("train done") for line in said)


def test_a_stage_that_fails_stops_the_chain_with_its_reason_and_log(
    server: ApiServer, launch: Callable[..., tuple[int, list[str]]]
) -> None:
    def fail() -> None:
        ended = {"terminated": {"exitCode": 2, "reason": "Error"}}
        server.logs["p0"] = ["2026-01-01T00:00:00Z error[data.bad-input]", "2026-01-01T00:00:01Z   cause  no such file"]
        server.pod("p0", run=RUN, stage="prepare", phase="Failed", containerStatuses=[{"state": ended}])
        server.condition("jobs", f"{RUN}-prepare", "Failed", reason="PodFailurePolicy", message="exit code 2")

    later(fail, lambda: ("jobs", f"{RUN}-prepare") in server.objects)
    code, said = launch()
    assert code == EXIT_STAGE_FAILED
    text = "\n".join(said)
    assert "p0 on node-0 refused to run (exit code 2)" in text
    assert "cause  no such file" in text
    assert ("jobsets", RUN) not in server.objects


@pytest.mark.parametrize("fault", [409, 429, 500, 503, 0])
def test_a_server_that_stumbles_is_asked_again(
    server: ApiServer, launch: Callable[..., tuple[int, list[str]]], fault: int
) -> None:
    server.faults = [fault, fault]
    code, _ = launch(*TRAIN_ONLY, follow=False)
    assert code == 0
    assert ("jobsets", RUN) in server.objects


def test_a_server_that_stays_away_is_given_up_with_its_reason(
    server: ApiServer, launch: Callable[..., tuple[int, list[str]]]
) -> None:
    server.faults = [503] * 10
    with pytest.raises(ArgosyError, match="after 4 attempts: 503: injected") as refused:
        launch(*TRAIN_ONLY, follow=False)
    assert refused.value.code == "launch.api"


def test_a_missing_operator_is_told_before_data_is_prepared_for_it(
    server: ApiServer, launch: Callable[..., tuple[int, list[str]]]
) -> None:
    server.unknown = {"jobsets"}
    with pytest.raises(ArgosyError, match=r"needs JobSet 0.10.0 or newer"):
        launch("cluster.preflight=false", follow=False)
    assert not server.objects


def test_an_operator_that_is_too_old_is_told_before_data_is_prepared_for_it(
    server: ApiServer, launch: Callable[..., tuple[int, list[str]]]
) -> None:
    server.missing_fields = {"onJobFailureMessagePatterns"}
    with pytest.raises(ArgosyError, match=r"JobSet of this cluster is too old: .*came with 0.10.0") as refused:
        launch()
    assert "kubectl apply --server-side -f https://github.com/kubernetes-sigs/jobset/" in str(refused.value.fix)
    assert not server.objects, "nothing was made, a file system neither"


def test_a_kubernetes_that_is_too_old_is_told_before_data_is_prepared(
    server: ApiServer, launch: Callable[..., tuple[int, list[str]]]
) -> None:
    server.missing_fields = {"completionMode"}
    told = (
        f"Kubernetes of this cluster is too old: its Job has no field spec.completionMode; {KUBERNETES_LEAST} or newer"
    )
    with pytest.raises(ArgosyError, match=told):
        launch()
    assert not server.objects
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["kubeVersion"] == f">={KUBERNETES_LEAST}.0-0"


def test_a_document_that_cannot_be_right_is_sent_once(server: ApiServer) -> None:
    """The server answers with status 500, as it does when it is in trouble."""
    document = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "odd"}, "spec": {"suspend": "yes"}}
    with pytest.raises(
        ArgosyError, match=r"500: failed to create typed patch object .*\.spec\.suspend: expected boolean"
    ):
        connect("training").apply(document)
    assert [method for method, _, _ in server.requests].count("PATCH") == 1


def test_the_guide_installs_the_operators_that_refusals_name() -> None:
    guide = (ROOT / "docs" / "guides" / "launching.md").read_text()
    for operator in {kind.operator for kind in job_kinds() if kind.operator is not None}:
        assert operator.install in guide
        if operator.name in guide:
            assert f"{operator.name} {operator.least} or newer" in guide


def test_a_right_that_a_later_stage_needs_is_asked_for_by_name_before_the_first(
    server: ApiServer, launch: Callable[..., tuple[int, list[str]]]
) -> None:
    server.denied = {("delete", "jobsets"), ("get", "pods/log")}
    with pytest.raises(
        ArgosyError, match=r"you lack the right to get pods/log; delete jobsets.jobset.x-k8s.io"
    ) as refused:
        launch()
    assert "--verb=get,list,create,patch,delete --resource=jobsets.jobset.x-k8s.io" in str(refused.value.fix)
    assert not server.objects


def test_a_claim_or_a_queue_that_is_not_there_is_told_before_pods_wait_for_it(
    server: ApiServer, launch: Callable[..., tuple[int, list[str]]]
) -> None:
    with pytest.raises(ArgosyError, match="has no LocalQueue research"):
        launch("cluster.queue=research")
    server.any_claim = False
    with pytest.raises(ArgosyError, match=f"the namespace training has no claim {CLAIM}"):
        launch()
    server.forbidden = {"persistentvolumeclaims"}
    assert launch(only="train", follow=False)[0] == 0, "who may not look is not told that there is none"


def test_a_namespace_that_is_not_there_is_named(
    server: ApiServer, launch: Callable[..., tuple[int, list[str]]]
) -> None:
    server.namespaces = {"other"}
    with pytest.raises(ArgosyError, match='namespaces "training" not found') as refused:
        launch(*TRAIN_ONLY, follow=False)
    assert "kubectl create namespace" in refused.value.fix


def test_who_stops_looking_is_told_what_goes_on(
    server: ApiServer, launch: Callable[..., tuple[int, list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> Iterator[None]:
        raise KeyboardInterrupt

    monkeypatch.setattr("argosy.launch.api.Cluster.changes", interrupted)
    said: list[str] = []
    conductor = conductor_of(connect("training"), place(GPU_EXAMPLE), said.append)
    with pytest.raises(KeyboardInterrupt):
        conductor.run()
    assert "prepare goes on in the cluster; preflight, train will not start by itself" in said[-1]
    assert f"argosy stop {RUN} -n training" in said[-1]


@pytest.fixture
def in_a_pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ApiServer, Path]]:
    """As Kubernetes sets a pod up: a server behind TLS, and a token in a file that is written anew now and then."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl, to make a certificate")
    certificate, token = tmp_path / "ca.crt", tmp_path / "token"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=kubernetes", "-addext",
         "subjectAltName=IP:127.0.0.1", "-keyout", tmp_path / "key", "-out", certificate], check=True, capture_output=True,
    )  # fmt: skip
    both = tmp_path / "server.pem"
    both.write_text(certificate.read_text() + (tmp_path / "key").read_text())
    running = ApiServer(both)
    token.write_text(*running.tokens)
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(token))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(certificate))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", running.url.rpartition(":")[2])
    monkeypatch.delenv("KUBECONFIG", raising=False)
    yield running, token
    running.close()


def test_the_conductor_speaks_for_its_service_account_however_long_it_follows(
    in_a_pod: tuple[ApiServer, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, token = in_a_pod
    made = incluster_config.InClusterConfigLoader.__init__

    def impatient(self: Any, *words: Any, **named: Any) -> None:
        made(self, *words, **named)
        self._token_refresh_period = timedelta(0)  # the file is looked at each time, and not once a minute

    monkeypatch.setattr(incluster_config.InClusterConfigLoader, "__init__", impatient)

    def rotate() -> None:
        # The kubelet replaces the file while the token before is still good: a request with it may be on its way.
        server.tokens.add("the-next-one")
        (token.parent / "next").write_text("the-next-one")
        (token.parent / "next").replace(token)
        try:
            wait_for(lambda: server.last_token == "the-next-one")
        finally:
            server.tokens = {"the-next-one"}
            server.condition("jobsets", RUN, "Completed")

    later(rotate, lambda: any(query.get("watch") for _, _, query in server.requests))
    cluster = connect("training", in_cluster=True)
    assert conductor_of(cluster, place(GPU_EXAMPLE, TRAIN_ONLY)).run() == 0


def test_outside_a_pod_there_is_no_service_account(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ArgosyError) as refused:
        connect("training", in_cluster=True)
    assert "leave it out elsewhere" in refused.value.fix


def test_a_broken_kubeconfig_is_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "kubeconfig"
    broken.write_text("clusters: [")
    monkeypatch.setenv("KUBECONFIG", str(broken))
    with pytest.raises(ArgosyError, match="no cluster is configured"):
        connect("training")


def test_a_name_that_is_nowhere_is_told_to_be_missing_here_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(ArgosyError, match=r"there is no runs/mistyped here, and no cluster is configured"):
        runs.status(runs.find("mistyped", None))


def test_who_may_see_no_job_is_not_told_that_there_is_none(server: ApiServer) -> None:
    server.forbidden = {"jobs", "jobsets", "pytorchjobs", "trainjobs", "hyperpodpytorchjobs"}
    with pytest.raises(ArgosyError, match="403"):
        stop(connect("training"), RUN)


def test_launching_again_follows_what_runs_and_refuses_other_settings(
    server: ApiServer, launch: Callable[..., tuple[int, list[str]]]
) -> None:
    launch(*TRAIN_ONLY, follow=False)
    applied = len([r for r in server.requests if r[0] == "PATCH" and "jobsets" in r[1]])
    _, said = launch(*TRAIN_ONLY, follow=False)
    assert "train: is running already" in said
    assert len([r for r in server.requests if r[0] == "PATCH" and "jobsets" in r[1]]) == applied
    with pytest.raises(ArgosyError, match="is running with other settings") as refused:
        launch(*TRAIN_ONLY, "train.steps=7777", follow=False)
    assert "argosy stop" in refused.value.fix


def test_a_launch_that_was_interrupted_while_it_trained_goes_on_there(
    server: ApiServer, launch: Callable[..., tuple[int, list[str]]]
) -> None:
    """Preflight asks for every GPU, and the run that is going has them."""
    launch(only="train", follow=False)
    applied = [r[1] for r in server.requests if r[0] == "PATCH"]
    watched = lambda: any(query.get("watch") for _, _, query in server.requests)  # noqa: E731
    later(lambda: server.condition("jobsets", RUN, "Completed"), watched)
    code, said = launch()
    assert code == 0
    assert said[0] == "train: is running already"
    again = [r[1] for r in server.requests if r[0] == "PATCH"][len(applied) :]
    assert not [path for path in again if "/jobs/" in path or "/jobsets/" in path]


def test_the_spec_of_a_run_that_is_going_is_left_alone(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pods read it when they are made anew: it has to stay what they were started with."""
    spec = tmp_path / "run.yaml"
    spec.write_text(GPU_EXAMPLE.read_text())

    def launch(**options: Any) -> int:
        return conductor_of(connect("training"), place(spec, TRAIN_ONLY)).run(follow=False, **options)

    launch()
    spec.write_text(GPU_EXAMPLE.read_text().replace("lr: 1.0e-5", "lr: 9.0e-5"))
    for options in ({}, {"only": TRAIN}):
        with pytest.raises(ArgosyError, match="is running with other settings"):
            launch(**options)
    assert "lr: 1.0e-5" in server.objects["configmaps", f"{RUN}-spec"]["data"]["run.yaml"]
    spec.write_text(GPU_EXAMPLE.read_text() + "# a remark changes nothing\n")
    assert launch() == 0


@pytest.mark.parametrize("gang", ["volcano", "coscheduling"])
def test_a_group_of_pods_goes_with_its_job(
    gang: str, server: ApiServer, launch: Callable[..., tuple[int, list[str]]]
) -> None:
    launch(*TRAIN_ONLY, f"cluster.gang={gang}", follow=False)
    assert ("podgroups", RUN) in server.objects
    stop(connect("training"), RUN)
    assert ("podgroups", RUN) not in server.objects


def test_after_a_stop_status_says_what_was_saved_and_that_a_launch_goes_on(
    server: ApiServer, launch: Callable[..., tuple[int, list[str]]], argosy: Callable[..., Any]
) -> None:
    launch(*TRAIN_ONLY, follow=False)
    server.pod("p0", run=RUN, stage="train", phase="Running")
    server.logs["p0"] = ["2026-01-01T00:00:00Z " + stopped_line(40, 100)]
    with pytest.raises(ArgosyError, match="has nothing of other to stop"):
        runs.end(runs.find(str(GPU_EXAMPLE), None, None, ["name=other", "cluster.namespace=training"]))
    said = argosy("stop", GPU_EXAMPLE, "cluster.namespace=training").stdout
    assert said.startswith(f"ended JobSet {RUN}\nstopped: saved at step 40 of 100")
    state = runs.status(runs.find(RUN, "training")).stages["train"]
    assert (state.phase, state.text[:25]) == ("stopped", "saved at step 40 of 100 (")
    assert "launch it again" in state.fix
    assert runs_of_namespace("training")[RUN]["train"].phase == "stopped"
    finish(server, "jobsets", RUN, "Completed")
    launch(*TRAIN_ONLY)
    server.objects.pop(("jobsets", RUN))
    assert runs_of_namespace("training")[RUN]["train"].phase == "done", "its job is gone, and it had finished"


@pytest.mark.parametrize(("target", "policy"), [("jobset", "Foreground"), ("trainjob", "Background")])
def test_a_stop_returns_when_jobs_and_pods_are_gone(
    server: ApiServer, launch: Callable[..., tuple[int, list[str]]], target: str, policy: str
) -> None:
    """A job stays until its last pod is gone. Until then a run is not stopped, and what a new launch applied would vanish with it.

    Trainer makes the JobSet of a TrainJob again as long as there is the TrainJob, so the TrainJob goes first.
    """
    launch(*TRAIN_ONLY, target=target, follow=False)
    server.pod("p0", run=RUN, stage="train", phase="Running")
    server.logs["p0"] = ["2026-01-01T00:00:00Z " + stopped_line(40, 100)]
    server.lingers_s = 1.5
    found = runs.find(RUN, "training")
    runs.end(found)
    assert {plural for plural, _ in server.objects} == {"configmaps"}
    assert runs.status(found).stages["train"].text.startswith("saved at step 40 of 100")
    used = [
        query["propagationPolicy"]
        for verb, path, query in server.requests
        if verb == "DELETE" and f"/{target}s/" in path
    ]
    assert used == [policy]


def test_a_request_that_a_webhook_refused_is_no_want_of_rights() -> None:
    said = 'admission webhook "vjobset.kb.io" denied the request: spec.replicatedJobs: name too long'
    denied, lacking = (
        api._refusal(
            "PATCH", "/apis", ApiException(http_resp=SimpleNamespace(status=403, reason="", data=body, getheaders=dict))
        )
        for body in (json.dumps({"message": said}), json.dumps({"message": "jobs is forbidden: User cannot create"}))
    )
    assert not isinstance(denied, Forbidden)
    assert "webhook or policy of the cluster" in str(denied)
    assert isinstance(lacking, Forbidden)


def test_the_successor_of_an_ended_job_waits_for_its_last_pod(
    server: ApiServer, launch: Callable[..., tuple[int, list[str]]]
) -> None:
    launch(*TRAIN_ONLY, target="trainjob", follow=False)
    server.pod("p0", run=RUN, stage="train", phase="Failed")
    server.condition("trainjobs", RUN, "Failed")
    server.lingers_s = 1.5
    launch(*TRAIN_ONLY, target="trainjob", follow=False)
    assert ("trainjobs", RUN) in server.objects
    assert ("pods", "p0") not in server.objects


@pytest.mark.parametrize(("target", "plural"), [("jobset", "jobsets"), ("indexed-job", "jobs")])
def test_a_launch_that_follows_a_run_ends_when_the_run_is_stopped(target: str, plural: str, server: ApiServer) -> None:
    """Pods that are told to end exit with a code that is not 0, so the job fails while it is deleted."""

    def vanish() -> None:
        job = server.objects[plural, RUN]
        failed = [{"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded"}]
        dying = {"metadata": job["metadata"] | {"deletionTimestamp": "2026-01-01T00:00:00Z"}}
        server.put(plural, job | dying | {"status": {"conditions": failed}})
        server.pod("p0", run=RUN, stage="train", phase="Failed")
        later(lambda: server.objects.pop((plural, RUN)), lambda: "is being deleted" in said())

    def said() -> str:
        return "\n".join(map(str, seen))

    seen: list[str] = []
    cluster = connect("training")
    later(vanish, lambda: (plural, RUN) in server.objects)
    assert conductor_of(cluster, place(GPU_EXAMPLE, TRAIN_ONLY, target), seen.append).run() == EXIT_STAGE_FAILED
    assert "train stopped: its job was deleted" in said()
    assert "starting it again" not in said()


def test_overrides_are_for_a_run_spec_and_not_for_a_name() -> None:
    with pytest.raises(ArgosyError, match="is a run's name, and overrides change a run spec"):
        runs.find(RUN, "training", None, ["cluster.namespace=other"])
    assert runs.find(str(GPU_EXAMPLE), None, None, ["name=b", "cluster.namespace=c"]).namespace == "c"


def test_files_of_ones_own_reach_an_empty_volume(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    placed = place(GPU_EXAMPLE, ["cluster.storage={claim: new, kind: class, storage_class: fast, size: 16Ti}"])
    volume, source = tmp_path / "volume", tmp_path / "gpt2"
    source.mkdir()
    (source / "tokenizer.json").write_text("{}")
    # What `kubectl exec` would do: the words after -- run where the volume is, at another place here.
    kubectl = tmp_path / "bin" / "kubectl"
    kubectl.parent.mkdir()
    kubectl.write_text(f'#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done\nshift\nexec "$1" "$2" "$3" - "{volume}$5"\n')
    kubectl.chmod(0o755)
    monkeypatch.setenv("PATH", str(kubectl.parent), prepend=os.pathsep)
    pod = ("pods", f"{RUN}-upload")

    def runs() -> None:
        assert server.objects[pod]["spec"]["securityContext"]["runAsUser"] == 1000
        server.put("pods", server.objects[pod] | {"status": {"phase": "Running"}})

    def waits() -> None:
        unbound = "pod has unbound immediate PersistentVolumeClaims"
        condition = {"type": "PodScheduled", "status": "False", "message": unbound}
        about = {"involvedObject": {"name": "new"}, "message": "Waiting for a volume to be created"}
        event = {"metadata": {"name": "new.1"}, "type": "Normal", "reason": "ExternalProvisioning"}
        server.put("events", event | about)
        server.put("pods", server.objects[pod] | {"status": {"phase": "Pending", "conditions": [condition]}})
        later(runs, lambda: any("is not bound yet" in line for line in said))

    said: list[str] = []
    later(waits, lambda: pod in server.objects)
    upload(placed, connect("training"), source, "tokenizers/gpt2", said.append)
    assert "the claim new is not bound yet: Waiting for a volume to be created" in "\n".join(said)
    assert (volume / "data" / "tokenizers" / "gpt2" / "tokenizer.json").read_text() == "{}"
    assert ("persistentvolumeclaims", "new") in server.objects
    assert pod not in server.objects
    with pytest.raises(ArgosyError, match="is not on the shared volume"):
        upload(placed, connect("training"), source, "../etc", lambda _: None)


def test_after_a_stop_it_goes_on_with_another_number_of_nodes(
    server: ApiServer, launch: Callable[..., tuple[int, list[str]]]
) -> None:
    launch(*TRAIN_ONLY, follow=False)
    stopped = stop(connect("training"), RUN)
    assert stopped == [f"JobSet {RUN}"]
    assert ("configmaps", f"{RUN}-spec") in server.objects
    assert [r[2] for r in server.requests if r[0] == "DELETE"] == [{"propagationPolicy": "Foreground"}]
    launch(*TRAIN_ONLY, "cluster.nodes=4", "parallel.dp_shard=8", follow=False)
    job = server.objects["jobsets", RUN]["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert job["parallelism"] == 4


def test_a_finished_job_makes_room_for_the_next(
    server: ApiServer, launch: Callable[..., tuple[int, list[str]]]
) -> None:
    launch(*TRAIN_ONLY, follow=False)
    server.condition("jobsets", RUN, "Failed")
    launch(*TRAIN_ONLY, "train.steps=7777", follow=False)
    assert "train.steps=7777" in json.dumps(server.objects["jobsets", RUN])
    assert "status" not in server.objects["jobsets", RUN]


def test_a_job_of_somebody_else_is_not_touched(server: ApiServer, launch: Callable[..., tuple[int, list[str]]]) -> None:
    server.put("jobsets", {"kind": "JobSet", "metadata": {"name": RUN, "labels": {"argosy/run": "Techpulse_7b"}}})
    with pytest.raises(ArgosyError, match="belongs to Techpulse_7b"):
        launch(*TRAIN_ONLY, follow=False)


def test_a_plain_job_is_started_again_as_a_whole(
    server: ApiServer, launch: Callable[..., tuple[int, list[str]]]
) -> None:
    def die() -> None:
        server.condition("jobs", RUN, "Failed", reason="BackoffLimitExceeded")
        later(
            lambda: server.condition("jobs", RUN, "Complete"),
            lambda: ("jobs", RUN) in server.objects and "status" not in server.objects["jobs", RUN],
        )

    later(die, lambda: ("jobs", RUN) in server.objects)
    code, said = launch(*TRAIN_ONLY, target="indexed-job")
    assert code == 0
    assert any("starting it again, 1 of 10" in line for line in said)


WAITING: list[tuple[str, dict[str, Any], str]] = [
    (
        "image",
        {"containerStatuses": [{"image": "r/argosy", "state": {"waiting": {"reason": "ImagePullBackOff", "message": "denied"}}}]},
        "the image r/argosy cannot be pulled: denied",
    ),
    (
        "image of an init container, which Kubeflow's operator adds",
        {"initContainerStatuses": [{"image": "alpine:3.10", "state": {"waiting": {"reason": "ErrImagePull"}}}]},
        "the image alpine:3.10 cannot be pulled: ErrImagePull",
    ),
    (
        "room",
        {"conditions": [{"type": "PodScheduled", "status": "False", "message": "0/9 nodes: Insufficient nvidia.com/gpu"}]},
        "no node has room for p0: 0/9 nodes: Insufficient nvidia.com/gpu",
    ),
    (
        "claim",
        {"conditions": [{"type": "PodScheduled", "status": "False", "message": 'persistentvolumeclaim "x" not found'}]},
        "p0 waits for its volume",
    ),
    (
        "memory",
        {"containerStatuses": [{"restartCount": 1, "lastState": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}}]},
        "ran out of memory and was killed: its limit is 8Gi",
    ),
    ("eviction", {"reason": "Evicted", "message": "The node was low on resource: ephemeral-storage"}, "was evicted"),
    (
        "secret",
        {"containerStatuses": [{"state": {"waiting": {"reason": "CreateContainerConfigError", "message": "secret not found"}}}]},
        "cannot start: secret not found",
    ),
    (
        "program",
        {"containerStatuses": [{"state": {"terminated": {"exitCode": 128, "reason": "StartError", "message": 'exec: "hyperpodrun": executable file not found in $PATH'}}}]},
        'cannot start: exec: "hyperpodrun"',
    ),
    (
        "disruption",
        {"conditions": [{"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}]},
        "was disrupted (PreemptionByScheduler)",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("status", "told"), [case[1:] for case in WAITING], ids=[case[0] for case in WAITING])
def test_the_reason_is_told_in_plain_words(
    server: ApiServer, launch: Callable[..., tuple[int, list[str]]], status: dict[str, Any], told: str
) -> None:
    launch(*TRAIN_ONLY, follow=False)
    server.pod("p0", run=RUN, stage="train", phase="Pending", **status)
    state = look(connect("training"), RUN, "train")
    assert told in state.text
    assert state.fix


@pytest.mark.parametrize(
    ("about", "reason", "message", "told"),
    [
        (
            f"{RUN}-node-0",
            "FailedCreate",
            "exceeded quota: gpus, requested: 8",
            "quota is used up: exceeded quota: gpus",
        ),
        ("fsx-shared-pvc", "ProvisioningFailed", "no subnet", "the claim fsx-shared-pvc is not bound: no subnet"),
        ("p0", "FailedMount", "driver not found", "a volume of p0 cannot be mounted: driver not found"),
        ("p0", "FailedCreatePodSandBox", "no CNI", "the node node-0 cannot make a sandbox for p0: no CNI"),
        ("p0", "FailedPreStopHook", "anything else", "p0: FailedPreStopHook: anything else"),
    ],
)
def test_events_explain_what_pods_do_not_say(
    server: ApiServer, launch: Callable[..., tuple[int, list[str]]], about: str, reason: str, message: str, told: str
) -> None:
    launch(*TRAIN_ONLY, follow=False)
    server.pod("p0", run=RUN, stage="train", phase="Pending")
    server.event("another-job", "FailedCreate", "exceeded quota: not ours")
    server.event(about, reason, message)
    assert told in look(connect("training"), RUN, "train").text


def test_a_queue_is_said_to_be_waited_in(server: ApiServer, launch: Callable[..., tuple[int, list[str]]]) -> None:
    server.put("localqueues", {"metadata": {"name": "gpu-queue"}})
    launch(*TRAIN_ONLY, "cluster.queue=gpu-queue", follow=False)
    server.condition("jobsets", RUN, "Suspended")
    assert "in the Kueue queue gpu-queue" in look(connect("training"), RUN, "train").text


STEP = "step {n}/100 | loss 3.2100 | grad norm 1.0 | lr 1e-4 | 1K tok/s | ETA 5m00s"


def running(server: ApiServer) -> None:
    for index in range(2):
        server.pod(f"{RUN}-node-0-{index}-abcde", run=RUN, stage="train", index=index, phase="Running")
        server.logs[f"{RUN}-node-0-{index}-abcde"] = [
            f"2026-01-01T00:00:0{n}Z {STEP.format(n=n)} pod {index}" for n in range(5)
        ]


def test_status_tells_state_and_progress(
    server: ApiServer, launch: Callable[..., tuple[int, list[str]]], argosy: Callable[..., Any]
) -> None:
    launch(*TRAIN_ONLY, follow=False)
    running(server)
    told = argosy("status", RUN, "-n", "training")
    assert told.returncode == 0, told.stderr
    assert "train      running: 2 pods" in told.stdout
    assert "step 4/100 | loss 3.2100" in told.stdout
    assert argosy("ls", "-n", "training").stdout == f"{RUN}  train waiting\n"
    missing = argosy("status", "nobody", "-n", "training")
    assert missing.returncode == 2
    assert "has no run nobody" in missing.stderr


def test_logs_of_a_rank_come_from_its_pod_and_survive_a_lost_connection(
    server: ApiServer, launch: Callable[..., tuple[int, list[str]]]
) -> None:
    launch(*TRAIN_ONLY, follow=False)
    running(server)
    run = runs.find(RUN, "training")
    lines = list(runs.logs(run, rank=9, follow=False, tail=2))
    assert lines == [f"{STEP.format(n=n)} pod 1" for n in (3, 4)]
    server.cut_logs_after = 3
    later(lambda: server.condition("jobsets", RUN, "Completed"), lambda: server.cut_logs_after is None)
    lines = list(runs.logs(run, rank=0, follow=True, tail=None))
    assert lines == [f"{STEP.format(n=n)} pod 0" for n in range(5)]
    with pytest.raises(ArgosyError, match="2 pods of 8 ranks, and none holds rank 16"):
        list(runs.logs(run, rank=16, follow=False, tail=None))


def test_a_run_is_looked_for_where_it_was_launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert runs.find(str(GPU_EXAMPLE), None).target == "jobset"
    assert runs.find(str(GPU_EXAMPLE), None, "slurm").target == "slurm"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / RUN).mkdir(parents=True)
    assert runs.find(RUN, None).target == "local"
    assert runs.find(RUN, None, "pytorchjob").target == "pytorchjob"


def test_the_log_of_a_run_on_this_machine_comes_from_its_directory(tmp_path: Path) -> None:
    run = runs.find(str(tmp_path), None)
    with pytest.raises(ArgosyError, match="has no logs of ranks"):
        list(runs.logs(run, rank=0, follow=False, tail=None))
    (tmp_path / "logs/2").mkdir(parents=True)
    (tmp_path / "logs/2/3.first.log").write_text("one\ntwo\n")
    (tmp_path / "logs/2/3.log").write_text("three\nfour")
    assert list(runs.logs(run, rank=3, follow=False, tail=None)) == ["one", "two", "three", "four"]
    assert list(runs.logs(run, rank=3, follow=False, tail=3)) == ["two", "three", "four"]
    with pytest.raises(ArgosyError, match="has no log of rank 4, but those of 1 ranks, the last of them 3"):
        list(runs.logs(run, rank=4, follow=False, tail=None))


def test_following_a_log_waits_for_its_pod(server: ApiServer, launch: Callable[..., tuple[int, list[str]]]) -> None:
    launch(*TRAIN_ONLY, follow=False)

    def begin() -> None:
        running(server)
        server.condition("jobsets", RUN, "Completed")

    asked = len(server.requests)
    later(begin, lambda: any("/pods" in path for _, path, _ in server.requests[asked:]))
    lines = list(runs.logs(runs.find(RUN, "training"), rank=0, follow=True, tail=None))
    assert lines == [f"{STEP.format(n=n)} pod 0" for n in range(5)]


def test_a_watch_that_ends_is_taken_up_again(server: ApiServer, launch: Callable[..., tuple[int, list[str]]]) -> None:
    def watches() -> int:
        return len([request for request in server.requests if request[2].get("watch") == "true"])

    def fail_and_end() -> None:
        server.faults = [0]
        server.condition("jobsets", RUN, "Completed")

    later(fail_and_end, lambda: watches() > 1)
    assert launch(*TRAIN_ONLY)[0] == 0


def test_who_may_see_only_one_kind_of_job_sees_it(
    server: ApiServer, launch: Callable[..., tuple[int, list[str]]]
) -> None:
    """As the chart's conductor: a role names the target's own kind, and the server forbids the others."""
    server.forbidden = {"pytorchjobs", "trainjobs", "trainingruntimes", "hyperpodpytorchjobs", "computedomains"}
    finish(server, "jobsets", RUN, "Completed")
    assert launch(*TRAIN_ONLY)[0] == 0
    assert look(connect("training"), RUN, "train").phase == "done"
    assert stop(connect("training"), RUN) == [f"JobSet {RUN}"]


def test_no_token_is_told(server: ApiServer, argosy: Callable[..., Any]) -> None:
    server.faults = [401]
    told = argosy("--debug", "ls", "-n", "training")
    assert told.returncode == 2
    assert "loopback-token" not in told.stdout + told.stderr


def test_kinds_are_discovered_once_and_kept_out_of_shared_directories(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library's own cache is a file of a known name, which somebody else may have written."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "shared"))
    (tmp_path / "shared").mkdir()
    server.unknown = {"trainjobs", "trainingruntimes"}
    cluster = connect("training")
    for _ in range(3):
        assert conduct.runs_in(cluster, job_kinds()) == {}
    asked = [path for _, path, _ in server.requests]
    groups = {
        "/apis/batch/v1",
        "/apis/jobset.x-k8s.io/v1alpha2",
        "/apis/kubeflow.org/v1",
        "/apis/sagemaker.amazonaws.com/v1",
    }
    assert sorted(path for path in asked if "/namespaces/" not in path) == sorted({"/version", "/apis"} | groups)
    assert not list((tmp_path / "shared").iterdir())


def test_a_server_that_stumbles_during_discovery_is_not_said_to_lack_the_operator(server: ApiServer) -> None:
    cluster = connect("training", retry=replace(RETRY, attempts=4, base_s=0.01))
    cluster.find(POD)
    server.faults = [503, 503]
    cluster.require(JOB)
    server.faults = [503] * 10
    with pytest.raises(ArgosyError, match=r"did not answer GET /apis/jobset\.x-k8s\.io/v1alpha2 after 4"):
        cluster.require(find_target("jobset").jobs[0])  # type: ignore[attr-defined]


def test_something_else_that_answers_in_the_servers_place_is_told(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("json.dumps", lambda document, **_: "<html>Please log in</html>")
    with pytest.raises(ArgosyError, match="is not JSON: '<html>Please log in"):
        connect("training").find(POD)
