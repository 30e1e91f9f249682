"""The record of a run in a cluster, read through the API server: by the same commands, from a pod that can do nothing else."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_server import ApiServer
from rendering import GPU_EXAMPLE

from argosy.cli.checkpoint import list_checkpoints
from argosy.cli.watch import report, watch
from argosy.config.resolve import resolve
from argosy.errors import ArgosyError
from argosy.launch.run_directory import in_cluster, run_directory
from argosy.record.record_mirror import RecordMirror
from argosy.record.record_server import DIGEST_VARIABLE, TOKEN_HEADER, RecordServer
from waiting import PATIENCE_S, wait_for

RUN = "techpulse-7b"
KEPT = Path(__file__).parents[1] / "kept" / "run"
SAVED = "checkpoints/step-00000004"


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    """The runs on the shared volume, as their trainers wrote them."""
    runs = tmp_path / "volume" / resolve(GPU_EXAMPLE, elsewhere=True).spec.runs_dir
    for name in (RUN, "other"):
        shutil.copytree(KEPT, runs / name)
        (runs / name / "logs/1").mkdir(parents=True)
        (runs / name / "logs/1/0.log").write_text("a line of rank 0\n")
    (runs / RUN / "wandb-key.txt").write_text("secret")
    return runs


@pytest.fixture
def server(tmp_path: Path, volume: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    """An API server with a kubelet that runs reader pods on this machine, and a launched run."""
    running, pods = ApiServer(), dict[str, RecordServer]()
    monkeypatch.setenv("KUBECONFIG", str(running.write_config(tmp_path / "kubeconfig")))
    labels = {"argosy/run": RUN, "app.kubernetes.io/managed-by": "argosy"}
    metadata = {"name": f"{RUN}-spec", "labels": labels}
    running.put("configmaps", {"metadata": metadata, "data": {"run.yaml": GPU_EXAMPLE.read_text()}})
    over = threading.Event()

    def kubelet() -> None:
        while not over.wait(0.02):
            for (plural, name), pod in list(running.objects.items()):
                if plural == "pods" and name not in pods:
                    [container] = pod["spec"]["containers"]
                    env = {one["name"]: one["value"] for one in container["env"]}
                    pods[name] = RecordServer(volume, env[DIGEST_VARIABLE], port=0)
                    threading.Thread(target=pods[name].serve_forever, args=(0.02,), daemon=True).start()
                    running.proxies[f"{name}:{container['ports'][0]['containerPort']}"] = pods[name].server_port
                    running.put("pods", pod | {"status": {"phase": "Running"}})

    thread = threading.Thread(target=kubelet, daemon=True)
    thread.start()
    yield running
    over.set()
    thread.join()
    for pod in pods.values():
        pod.shutdown()
        pod.server_close()
    running.close()


def applied(server: ApiServer) -> list[dict[str, Any]]:
    return [document for (plural, _), document in server.objects.items() if plural == "pods"]


def test_watch_checkpoints_and_report_of_a_run_in_a_cluster_need_no_mounted_volume(
    server: ApiServer, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    watch(RUN, once=True, namespace="training")
    assert "step 4/" in capsys.readouterr().out
    list_checkpoints(str(GPU_EXAMPLE), as_json=True)
    size = sum(path.stat().st_size for path in (KEPT / SAVED).iterdir())
    [found] = json.loads(capsys.readouterr().out)
    assert (found["step"], found["bytes"], found["fault"]) == (4, size, None)
    assert found["loss"]
    report(RUN, namespace="training")
    assert capsys.readouterr().out == f"{RUN}-report.html\n"
    assert f"<h1>{RUN}</h1>" in Path(f"{RUN}-report.html").read_text()
    # Each command took its pod with it.
    assert applied(server) == []
    assert [method for method, path, _ in server.requests if "pods" in path and method == "DELETE"] == ["DELETE"] * 3


def test_the_copy_follows_the_runs_of_the_volume_and_the_pod_can_only_read(server: ApiServer, volume: Path) -> None:
    with run_directory(RUN, "training", all_runs=True) as copy:
        assert sorted(folder.name for folder in copy.iterdir()) == ["other", RUN]
        assert (copy / RUN / "metrics.jsonl").read_bytes() == (volume / RUN / "metrics.jsonl").read_bytes()
        assert not (copy / RUN / "wandb-key.txt").exists()
        # Of weights the size is known, the content is not.
        weights = (copy / RUN / SAVED / "weights.safetensors").read_bytes()
        assert weights == bytes((KEPT / SAVED / "weights.safetensors").stat().st_size)
        with (volume / RUN / "metrics.jsonl").open("a") as file:
            file.write('{"step": 60, "loss": 1.0}\n')
        shutil.rmtree(volume / "other" / SAVED)
        wait_for(lambda: (copy / RUN / "metrics.jsonl").read_text().endswith('{"step": 60, "loss": 1.0}\n'))
        wait_for(lambda: not (copy / "other/checkpoints").exists())
        [pod] = applied(server)
        spec, [container] = pod["spec"], pod["spec"]["containers"]
        assert spec["automountServiceAccountToken"] is False
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert spec["activeDeadlineSeconds"]
        assert {mount["name"]: mount.get("readOnly") for mount in container["volumeMounts"]} == {
            "storage": True,
            "tmp": None,
        }
        assert next(volume for volume in spec["volumes"] if volume["name"] == "storage")["persistentVolumeClaim"][
            "readOnly"
        ]
        assert "nvidia.com/gpu" not in container["resources"]["limits"]
        assert "secretKeyRef" not in json.dumps(pod)
    assert not copy.exists()


def test_the_reader_sends_records_to_the_holder_of_the_token_and_nothing_else(volume: Path, tmp_path: Path) -> None:
    (volume / RUN / "samples.jsonl").symlink_to(volume / RUN / "wandb-key.txt")
    (volume / RUN / "plan.json").symlink_to(tmp_path)
    reader = RecordServer(volume, hashlib.sha256(b"token").hexdigest(), port=0, host="::1", idle_s=30)
    thread = threading.Thread(target=reader.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    with httpx.Client(
        base_url=f"http://[::1]:{reader.server_port}", headers={TOKEN_HEADER: "token"}, timeout=PATIENCE_S
    ) as http:
        for token in ("", "tokens", hashlib.sha256(b"token").hexdigest()):
            assert http.get("/list", headers={TOKEN_HEADER: token}).status_code == 403
        names = [name for name, *_ in http.get("/list", params={"run": RUN}).json()[RUN]]
        assert "metrics.jsonl" in names
        assert not {"wandb-key.txt", "samples.jsonl", "plan.json"} & set(names)
        assert http.get("/read", params={"part": f"0:{RUN}/run.yaml"}).status_code == 200
        hidden = (
            "wandb-key.txt",
            f"{SAVED}/weights.safetensors",
            "../other/run.yaml",
            "logs/../run.yaml",
        )
        for path in hidden:
            assert http.get("/read", params={"part": f"0:{RUN}/{path}"}).status_code == 403
        assert http.get("/read", params={"part": "0:../volume/run.yaml"}).status_code == 403
        assert http.post("/list").status_code == 501
    reader.shutdown()
    reader.server_close()


def test_what_another_side_lists_cannot_lead_out_of_the_copy(tmp_path: Path) -> None:
    names = ["../../escape", "/escape", "a/../../../escape", "checkpoints//x", ".", "x\0y"]
    listed = {
        RUN: [(name, 3, 1, 1) for name in [*names, "metrics.jsonl"]],
        "..": [("escape", 3, 1, 1)],
        "a/b": [("run.yaml", 1, 1, 1)],
    }

    def fetch(path: str, query: Any) -> bytes:
        return json.dumps(listed).encode() if path == "list" else b"[3]\n{}\n"

    RecordMirror(fetch, tmp_path / "copy").update()
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()] == [
        f"copy/{RUN}/metrics.jsonl"
    ]


def test_a_run_that_is_not_there_or_may_not_be_read_is_refused_and_no_pod_is_left(server: ApiServer) -> None:
    with pytest.raises(ArgosyError, match="has no run nobody"), run_directory("nobody", "training"):
        pass
    server.forbidden.add("pods")
    with pytest.raises(ArgosyError, match="forbidden"), run_directory(RUN, "training"):
        pass
    assert applied(server) == []


def test_a_volume_without_a_run_yet_is_empty_and_no_fault(server: ApiServer, volume: Path) -> None:
    """The runs directory is made when the first training starts, after fetch and prepare."""
    shutil.rmtree(volume)
    with pytest.raises(ArgosyError, match=f"has no run {RUN} in runs yet"), run_directory(RUN, "training"):
        pass
    assert len([path for _, path, _ in server.requests if path.endswith("/proxy/list")]) == 1
    with run_directory(RUN, "training", all_runs=True) as copy:
        assert list(copy.iterdir()) == []
        shutil.copytree(KEPT, volume / RUN)
        wait_for(lambda: (copy / RUN / "metrics.jsonl").exists())


def test_a_directory_and_the_spec_of_a_run_on_this_machine_are_read_as_they_are(
    write_spec: Callable[..., Path],
) -> None:
    spec = write_spec()
    assert not in_cluster(str(spec), None)
    with run_directory(str(spec), None) as directory, run_directory("runs/demo", None) as other:
        assert directory.name == "tiny"
        assert other == Path("runs/demo")
