"""The scenario tests of a real cluster are ready to run: left out without one, and their run renders for every target."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import jsonschema
import pytest
import yaml
from crds import check_object
from e2e_spec import MOUNT, TARGETS, chart_values, e2e_spec
from rendering import CHART, ROOT, objects_of, pods_of

from argosy.launch.place import place
from argosy.launch.render import render

E2E = Path(__file__).parents[1] / "e2e"


def test_without_a_cluster_and_an_image_no_scenario_is_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ARGOSY_E2E_KUBECONFIG", "ARGOSY_E2E_IMAGE"):
        monkeypatch.delenv(name, raising=False)
    ignored = runpy.run_path(str(E2E / "conftest.py"))["ignored"]
    assert ignored({"ARGOSY_E2E_IMAGE": "i"}) == ignored({}) == ["test_*.py"]
    assert ignored({"ARGOSY_E2E_IMAGE": "i", "ARGOSY_E2E_KUBECONFIG": "k"}) == []


@pytest.mark.parametrize("target", TARGETS)
def test_the_run_of_the_scenarios_renders_valid_objects(target: str, tmp_path: Path) -> None:
    spec = tmp_path / "run.yaml"
    spec.write_text(yaml.safe_dump(e2e_spec("kill-trainjob", target, f"r/argosy@sha256:{'0' * 64}", "e2e", "volume")))
    documents = list(objects_of(render(place(spec))))
    for document in documents:
        check_object(document)
    pods = [pod for document in documents for pod in pods_of(document)]
    assert all(pod["containers"][0]["resources"]["limits"].keys() == {"cpu", "memory"} for pod in pods)
    assert MOUNT in str(pods)
    # The overrides of scenarios that are refused in a pod, and not here.
    for more in (f"init_from=hf:{MOUNT}/nothing", "checkpoint.keep=1000000000"):
        place(spec, [more])
    place(spec, ["cluster.nodes=1", "cluster.ranks=2"])


def test_the_recipe_builds_the_small_image_that_the_dockerfile_describes_and_runs_for_every_change_of_the_chart() -> (
    None
):
    recipe, dockerfile = (E2E / "kind-up").read_text(), (ROOT / "docker" / "Dockerfile").read_text()
    [described] = [line.lstrip("# ") for line in dockerfile.splitlines() if "whl/cpu" in line]
    assert all(
        f"--build-arg {argument}" in recipe
        for argument in described.removeprefix("--build-arg ").split(" --build-arg ")
    )
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "e2e.yml").read_text())
    # YAML 1.1 reads the key `on` as true.
    assert "charts/**" in workflow[True]["pull_request"]["paths"]
    assert "kindest/node:v1.35" in recipe


def test_the_chart_takes_the_run_of_the_scenarios() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = chart_values("chart", f"r/argosy@sha256:{'0' * 64}", "e2e", "volume")
    assert values["run"]["cluster"].pop("instance") is None, "helm removes such a key before it validates"
    jsonschema.validate(yaml.safe_load((CHART / "values.yaml").read_text()) | values, schema)
