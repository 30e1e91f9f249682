"""A new launch target is one module and one line in the registry: everything else takes it from there.

The two targets beside this file are registered as `argosy.config.targets` registers ours, and launched by the ordinary command.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from api_server import KINDS, ApiServer
from rendering import GPU_EXAMPLE, ROOT

from argosy.config.clouds import CLOUDS
from argosy.config.cluster import ClusterSpec
from argosy.config.targets import TARGETS
from argosy.launch import targets
from argosy.launch.registry import all_targets, find_target
from argosy.launch.target import Target
from waiting import wait_for

HERE = Path(__file__).parent
# The name of a cloud and of the target of its operator, whose module says it.
TARGET_AND_CLOUD = "hyperpod"
SOURCE = ROOT / "src" / "argosy"
# All of argosy, after one line as in the registry.
WITH_ONE_LINE_MORE = (
    "import sys; from argosy.config.targets import TARGETS; TARGETS[sys.argv[1]] = sys.argv[2]; del sys.argv[1:3]; "
    "from argosy.__main__ import main; main()"
)


def argosy_with(name: str, module: str, *words: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The `argosy` command of a source tree that has one target more."""
    line = [sys.executable, "-c", WITH_ONE_LINE_MORE, name, module, *map(str, words)]
    paths = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths}
    return subprocess.run(line, capture_output=True, text=True, check=False, cwd=cwd, env=environment, timeout=300)


def test_a_new_target_is_rendered_started_asked_read_and_stopped(
    write_spec: Callable[..., Path], tmp_path: Path
) -> None:
    cluster = {"target": "background", "preflight": False}
    spec = write_spec(cluster=cluster, train={"global_batch": 8, "steps": 100_000}, eval=False, log={"every": 1})

    def argosy(*words: object) -> str:
        done = argosy_with("background", "toy_process", *words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    rendered = argosy("launch", spec, "--dry-run")
    assert "# background.sh\nset -e\nargosy train run.yaml" in rendered
    assert json.loads(rendered.partition("# plan.json\n")[2])["target"] == "background"
    assert "started in the background" in argosy("launch", spec)
    metrics = tmp_path / "runs" / "tiny" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.stat().st_size, 240, lambda: argosy("status", spec))
    # The process that keeps the log writes its first line some time after the first step.
    log = metrics.with_name("logs") / "1" / "0.log"
    wait_for(lambda: log.exists() and log.stat().st_size, 240)
    said = argosy("status", spec)
    assert "train      running: in the background" in said
    assert re.search("step [0-9]", said)
    assert argosy("logs", spec, "--tail", 1).strip()
    assert "ended process group" in argosy("stop", spec)


def test_a_new_kind_of_job_is_launched_listed_and_stopped_on_kubernetes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KINDS, "toys.example.org/v1", [("ToyJob", "toyjobs")])
    server = ApiServer()
    monkeypatch.setenv("KUBECONFIG", str(server.write_config(tmp_path / "kubeconfig")))

    def argosy(*words: object) -> subprocess.CompletedProcess[str]:
        return argosy_with("toyjob", "toy_pods", *words, cwd=tmp_path)

    launch = (
        "launch",
        GPU_EXAMPLE,
        "--target",
        "toyjob",
        "--detach",
        "cluster.preflight=false",
        "data.train.0.prepare=null",
    )
    server.unknown = {"toyjobs"}
    refused = argosy(*launch)
    assert refused.returncode == 2
    assert "does not know the kind ToyJob: it needs the toy operator" in refused.stderr
    server.unknown = set()
    started = argosy(*launch)
    assert started.returncode == 0, started.stderr
    assert server.objects["toyjobs", "techpulse-7b"]["spec"]["nodes"] == 2
    assert argosy("ls", "-n", "training").stdout == "techpulse-7b  train waiting\n"
    assert argosy("stop", "techpulse-7b", "-n", "training").stdout.startswith("ended ToyJob techpulse-7b")
    assert ("toyjobs", "techpulse-7b") not in server.objects
    server.close()


def test_the_charts_conductor_gets_the_rights_that_a_new_target_declares(monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "from argosy.config.targets import TARGETS; TARGETS['toyjob'] = 'toy_pods'\n"
        "import json; from argosy.launch.chart import conductor_rights; print(json.dumps(conductor_rights()['toyjob']))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    verbs = ["get", "list", "create", "patch", "delete"]
    rule = {"apiGroups": ["toys.example.org"], "resources": ["toyjobs"], "verbs": verbs}
    assert json.loads(done.stdout) == {"kubeflow": [rule], "sagemaker": [rule]}


def test_every_target_is_registered_once_under_its_own_name() -> None:
    modules = {path.stem for path in Path(targets.__path__[0]).glob("*.py")}
    with_target = {
        f"argosy.launch.targets.{stem}"
        for stem in modules
        if "\nTARGET = " in (Path(targets.__path__[0]) / f"{stem}.py").read_text()
    }
    assert sorted(TARGETS.values()) == sorted(with_target)
    for name in TARGETS:
        assert find_target(name).name == name
        assert isinstance(find_target(name), Target)
    assert sum(target.on_this_machine for target in all_targets()) == 1
    assert ClusterSpec.model_json_schema()["properties"]["target"]["enum"] == list(TARGETS)


def test_nothing_else_compares_the_names_of_targets() -> None:
    """Whatever holds a target's name is an attribute or a variable called target.

    Hints name targets in words, and `local` is a key of LLM-Foundry's."""
    files = ("targets.py", "clouds.py", "cluster.py", "other_names.py", "foreign/foundry.py")
    allowed = {SOURCE / "config" / name for name in files}
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        if path in allowed or path.parent == SOURCE / "launch" / "targets":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            named = isinstance(node, ast.Constant) and node.value in TARGETS
            compared = isinstance(node, ast.Compare) and any(
                isinstance(side, ast.Attribute) and side.attr == "target" for side in (node.left, *node.comparators)
            )
            if named or compared:
                found.append(f"{path.relative_to(SOURCE)}:{node.lineno}")
    assert not found


def test_nothing_but_the_registry_names_a_cloud() -> None:
    allowed = {SOURCE / "config" / name for name in ("clouds.py", "cluster.py", "targets.py", "other_names.py")}
    found = [
        f"{path.relative_to(SOURCE)}:{node.lineno}"
        for path in sorted(SOURCE.rglob("*.py"))
        if path not in allowed
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.Constant) and node.value in CLOUDS.keys() - {"generic", TARGET_AND_CLOUD})
        or (isinstance(node, ast.Compare) and any(
            isinstance(side, ast.Attribute) and side.attr == "cloud" for side in (node.left, *node.comparators)
        ))
    ]  # fmt: skip
    assert not found


def test_the_roles_of_the_chart_name_no_target() -> None:
    template = (ROOT / "charts" / "argosy" / "templates" / "rights.yaml").read_text()
    rights = json.loads((ROOT / "charts" / "argosy" / "files" / "rights.json").read_text())
    assert list(rights) == [target.name for target in all_targets() if target.makes_pods]
    first, *rest = template.splitlines()
    assert yaml.safe_load(first.partition("default ")[2].partition(" -")[0]) == ClusterSpec().target
    assert not [name for name in TARGETS for line in rest if f'"{name}"' in line]
