"""Pods have no right they do not need, and no secret is ever written anywhere."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import kubernetes_validate
import pytest
import yaml
from rendering import CASES, GPU_EXAMPLE, HYPERPOD, NAMES, ROOT, files_of, objects_of, pods_of

from argosy.errors import ArgosyError
from argosy.launch import node_checks
from argosy.launch.node_checks import Wanted
from argosy.launch.place import place
from argosy.launch.render import render

CANARY = "hf_cAnArYcAnArYcAnArYcAnArY"
Case = tuple[str, Path, str | None, tuple[str, ...]]


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_pods_are_those_of_an_ordinary_user(case: Case) -> None:
    for document in objects_of(files_of(case)):
        for pod in pods_of(document):
            [container] = pod["containers"]
            own, shared = container["securityContext"], pod["securityContext"]
            assert shared["runAsNonRoot"]
            assert shared["runAsUser"] > 0
            assert shared["seccompProfile"] == {"type": "RuntimeDefault"}
            assert own["capabilities"]["drop"] == ["ALL"]
            assert own["readOnlyRootFilesystem"]
            assert not own["allowPrivilegeEscalation"]
            assert "privileged" not in own
            assert pod["automountServiceAccountToken"] is False
            assert pod["enableServiceLinks"] is False
            assert not [volume for volume in pod["volumes"] if "hostPath" in volume]
            assert "add" not in own["capabilities"], "a capability has no effect for an ordinary user"


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_requests_are_limits_and_shared_memory_is_counted_in_them(case: Case) -> None:
    for document in objects_of(files_of(case)):
        for pod in pods_of(document):
            [container] = pod["containers"]
            resources = container["resources"]
            assert resources["requests"] == resources["limits"]
            assert {"cpu", "memory"} <= resources["limits"].keys()
            for volume in pod["volumes"]:
                if volume.get("emptyDir", {}).get("medium") == "Memory":
                    size = int(volume["emptyDir"]["sizeLimit"].removesuffix("Gi"))
                    assert size < int(resources["limits"]["memory"].removesuffix("Gi"))


def test_the_limit_of_locked_memory_is_raised_on_the_node_and_not_in_the_pod() -> None:
    path = ROOT / "charts" / "node-memlock.yaml"
    raise_limit = yaml.safe_load(path.read_text())
    kubernetes_validate.validate(raise_limit, "1.34.0", strict=True)
    [container] = raise_limit["spec"]["template"]["spec"]["containers"]
    assert "LimitMEMLOCK=infinity" in container["args"][0]
    assert subprocess.run(["sh", "-n", "-c", container["args"][0]], check=False).returncode == 0
    infinity, limit = node_checks.resource.RLIM_INFINITY, (8 << 20, 8 << 20)
    with (
        patch.object(node_checks, "_may_lock", lambda: False),
        patch.object(node_checks.resource, "getrlimit") as limits,
    ):
        limits.return_value = limit
        check = node_checks.check_memlock(Wanted(fabric="infiniband"))
        limits.return_value = (infinity, infinity)
        raised = node_checks.check_memlock(Wanted(fabric="infiniband"))
    assert (check.ok, str(path.relative_to(ROOT)) in check.fix, raised.ok) == (False, True, True)


def test_privileges_are_there_only_when_asked_for() -> None:
    [pod] = pods_of(_train(["cluster.privileged=true"]))
    assert pod["containers"][0]["securityContext"] == {"privileged": True}
    with pytest.raises(ArgosyError) as refused:
        place(GPU_EXAMPLE, ["cluster.user=0"])
    assert refused.value.code == "launch.security"
    [pod] = pods_of(_train(["cluster.local_disk=/mnt/k8s-disks/0"]))
    assert {"name": "scratch", "hostPath": {"path": "/mnt/k8s-disks/0", "type": "Directory"}} in pod["volumes"]


def test_a_gated_data_set_is_refused_before_anything_starts_if_no_token_reaches_its_pods() -> None:
    spec = ROOT / "examples" / "hyperpod-gpt3-7.5b.yaml"
    gated = "data.train.0.prepare={fetch: oscar, config: de, shards: 2}"
    with pytest.raises(ArgosyError) as refusal:
        place(spec, [gated])
    assert refusal.value.code == "data.fetch-refused"
    assert "is gated" in refusal.value.cause
    assert "kubectl create secret generic hf-token -n hyperpod-ns-research" in refusal.value.fix
    place(spec, [gated, "cluster.secrets={HF_TOKEN: hf-token/token}"])


def test_secrets_go_by_reference() -> None:
    [pod] = pods_of(_train(["cluster.secrets={HF_TOKEN: hf-token/token}"]))
    [entry] = [e for e in pod["containers"][0]["env"] if e["name"] == "HF_TOKEN"]
    assert entry["valueFrom"] == {"secretKeyRef": {"name": "hf-token", "key": "token"}}


def test_an_override_that_names_a_variable_does_not_become_its_value() -> None:
    """Kubernetes would fill `$(HF_TOKEN)` in, and a secret would stand in the list of processes."""
    for target, more in (("jobset", ()), ("hyperpod", (*HYPERPOD, "cluster.operator=sagemaker"))):
        placed = place(GPU_EXAMPLE, ["runs_dir=runs-$(HF_TOKEN)", "cluster.secrets={HF_TOKEN: s/k}", *more], target)
        for document in objects_of(render(placed)):
            for pod in pods_of(document):
                assert "runs_dir=runs-$$(HF_TOKEN)" in pod["containers"][0]["args"]


@pytest.mark.parametrize(
    "override",
    [
        f"cluster.env={{HF_TOKEN: {CANARY}}}",
        f"cluster.env={{HARMLESS: {CANARY}}}",
        "cluster.env={WANDB_API_KEY: abc}",
        f"data.tokenizer=https://user:{CANARY}@host/tokenizer.json",
        "data.tokenizer=https://a.blob.core.windows.net/t?sv=1&sig=abcdefghijklmnopqrstuvwxyz",
    ],
)
def test_what_looks_like_a_secret_is_refused_and_not_repeated(override: str) -> None:
    with pytest.raises(ArgosyError) as refused:
        place(GPU_EXAMPLE, [override])
    assert refused.value.code == "launch.secret"
    assert CANARY not in str(refused.value)


def test_a_secret_in_the_file_is_refused(tmp_path: Path) -> None:
    spec = tmp_path / "run.yaml"
    spec.write_text(GPU_EXAMPLE.read_text() + f"  # {CANARY}\n")
    with pytest.raises(ArgosyError, match="what looks like a secret") as refused:
        place(spec)
    assert CANARY not in str(refused.value)


@pytest.mark.parametrize("target", ["jobset", "pytorchjob", "trainjob", "indexed-job", "slurm"])
def test_a_token_in_the_launchers_environment_reaches_no_file(
    target: str, tmp_path: Path, argosy: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", CANARY)
    done = argosy("launch", GPU_EXAMPLE, "--target", target, "--dry-run", "-o", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert CANARY not in done.stdout + done.stderr
    for path in (tmp_path / "out").iterdir():
        assert CANARY not in path.read_text()


def test_no_secret_of_its_environment_is_in_anything_a_run_writes(
    write_spec: Callable[..., Path], argosy: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Preflight looks whether they are set, and training has them in its environment: neither tells them."""
    names = ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY")
    for name in names:
        monkeypatch.setenv(name, f"{CANARY}{name}")
    cluster = {"target": "local", "gpus": 0, "secrets": dict.fromkeys(names, "s/k")}
    spec = write_spec(cluster=cluster, train={"global_batch": 8, "steps": 4}, log={"sinks": {"tensorboard": True}})
    done = argosy("launch", spec)
    assert done.returncode == 0, done.stderr
    assert "3 of 3 set" in done.stdout
    failed = argosy("--debug", "launch", spec, "train.steps=8", "data.train=nowhere")
    assert failed.returncode != 0
    for told in (done, failed):
        assert CANARY not in told.stdout + told.stderr
    written = [path for path in spec.parent.rglob("*") if path.is_file()]
    assert any("metrics.jsonl" in path.name for path in written)
    for path in written:
        assert CANARY.encode() not in path.read_bytes(), path


def _train(overrides: list[str]) -> dict[str, Any]:
    return next(d for d in objects_of(render(place(GPU_EXAMPLE, overrides))) if d["kind"] == "JobSet")
