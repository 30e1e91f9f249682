"""Preflight says what is wrong, on which node, and ends with an exit code that stops the chain."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from argosy.files import write_fix
from argosy.launch import node_checks, preflight, storage_checks
from argosy.launch.node_checks import Check, Wanted
from argosy.launch.preflight import check_node, judge_bandwidth, wanted_of
from ports import free_port


def named(checks: list[Check], name: str) -> Check:
    return next(check for check in checks if check.name == name)


def test_this_machine_is_fit_for_a_run_that_asks_for_nothing(tmp_path: Path) -> None:
    checks = check_node(Wanted(storage=tmp_path))
    assert not [check for check in checks if check.ok is False]
    assert "GB/s" in named(checks, "storage").found
    assert not list(tmp_path.iterdir())


def test_what_is_missing_is_said_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(node_checks, "_INFINIBAND", tmp_path / "none")
    wanted = Wanted(
        gpus=8, fabric="efa", nics=4, shm_bytes=2**60, storage=tmp_path, needed_bytes=2**60, names=("no.such.host.invalid",),
        tokens=("HF_TOKEN",),
    )  # fmt: skip
    checks = check_node(wanted)
    for name in ("shm", "fabric", "space", "names", "tokens"):
        assert named(checks, name).ok is False, name
        assert named(checks, name).fix, name


def test_ports_that_are_down_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for card, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        (tmp_path / card / "ports" / "1").mkdir(parents=True)
        (tmp_path / card / "ports" / "1" / "state").write_text(state)
    monkeypatch.setattr(node_checks, "_INFINIBAND", tmp_path)
    check = named(check_node(Wanted(fabric="infiniband", nics=2, storage=tmp_path)), "fabric")
    assert check.ok is False
    assert "not active: mlx5_1" in check.found


def test_efa_devices_that_libfabric_cannot_use_are_no_fabric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cards" / "efa_0").mkdir(parents=True)
    monkeypatch.setattr(node_checks, "_INFINIBAND", tmp_path / "cards")
    tool = tmp_path / "fi_info"
    monkeypatch.setenv("PATH", str(tmp_path))

    def fabric() -> Check:
        return named(check_node(Wanted(fabric="efa", nics=1, storage=tmp_path)), "fabric")

    assert "fi_info is not in this image" in fabric().found
    tool.write_text("#!/bin/sh\necho 'fi_getinfo: -61' >&2; exit 61\n")
    tool.chmod(0o755)
    assert (fabric().ok, fabric().found) == (False, "fi_info -p efa: fi_getinfo: -61")
    tool.write_text("#!/bin/sh\nexit 0\n")
    assert fabric().ok


def test_gpus_are_counted_and_their_errors_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def gpus(*errors: int, report: str = "") -> Check:
        rows = "\n".join(f"echo 'NVIDIA H100, 560.1, {error}'" for error in errors)
        tool.write_text(f"#!/bin/sh\nif [ \"$1\" = -q ]; then echo '{report}'; exit; fi\n{rows}\n")
        tool.chmod(0o755)
        return named(check_node(Wanted(gpus=2, storage=tmp_path)), "gpus")

    assert gpus(0, 0) == Check("gpus", True, "2 x NVIDIA H100, driver 560.1")
    assert "2 were asked for" in gpus(0).found
    assert "GPU 1 has uncorrected memory errors" in gpus(0, 3).found
    healthy = "    GPU Recovery Action                   : None\n    Remapping Failure Occurred : No"
    assert gpus(0, 0, report=healthy).ok
    reboot = gpus(0, 0, report=healthy.replace("None", "Reboot"))
    assert (reboot.ok, reboot.found) == (False, "the driver asks for: Reboot (1 of the GPUs)")
    assert "could not be remapped" in gpus(0, 0, report=healthy.replace("Occurred : No", "Occurred : Yes")).found


def test_a_driver_too_old_for_this_torch_is_said_with_the_one_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool, torch = tmp_path / "nvidia-smi", tmp_path / "torch"
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(
        node_checks, "find_spec", lambda _: ModuleSpec("torch", None, origin=str(torch / "__init__.py"))
    )
    torch.mkdir()
    tool.write_text("#!/bin/sh\n[ \"$1\" = -q ] || echo 'NVIDIA H100, 570.86.10, 0'\n")
    tool.chmod(0o755)
    for cuda, ok in (("'12.8'", True), ("'13.0'", False), ("None", True)):
        (torch / "version.py").write_text(f"__version__ = '2.13.0'\ncuda: Optional[str] = {cuda}\nhip = None\n")
        check = node_checks.check_gpus(Wanted(gpus=1))
        assert check.ok is ok, check
    (torch / "version.py").write_text("cuda: Optional[str] = '13.0'\n")
    check = node_checks.check_gpus(Wanted(gpus=1))
    assert "CUDA 13.0, which needs 580 or newer" in check.found


def test_an_image_without_a_compiler_fails_preflight_and_not_the_first_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    check = node_checks.check_compiler(Wanted(gpus=1))
    assert (check.ok, "no C compiler" in check.found, "gcc" in check.fix) == (False, True, True)
    assert node_checks.check_compiler(Wanted()).ok is None


def test_a_volume_that_belongs_to_root_is_said_with_the_key_that_changes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_checks.os, "access", lambda *_: False)
    checks = [check(Wanted(storage=tmp_path)) for check in storage_checks.STORAGE_CHECKS]
    rights = named(checks, "rights")
    assert (rights.ok, "cluster.storage.take_ownership=true" in rights.fix) == (False, True)
    assert f"it is user {os.getuid()}'s, mode drwx" in rights.found
    assert [check.name for check in checks if check.ok is False] == ["rights"], "one cause is told once"
    refused, full = PermissionError(errno.EACCES, "no"), OSError(errno.ENOSPC, "no")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert "take_ownership" in write_fix(refused, "free some space")
    assert write_fix(full, "free some space") == "free some space"


def test_the_space_that_checkpoints_need_is_never_told_as_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_checks.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 3_000_000}))
    small = storage_checks.check_space(Wanted(storage=tmp_path, needed_bytes=25_000_000))
    assert (small.found.partition(" free")[0], "checkpoints need 25 MB" in small.fix) == ("3 MB", True)
    large = storage_checks.check_space(Wanted(storage=tmp_path, needed_bytes=300 * 2**30))
    assert "checkpoints need 300 GiB" in large.fix


def test_an_image_without_hyperpods_agent_fails_preflight_and_not_the_training_pods(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = str(Path(__file__).parents[2] / "examples" / "hyperpod-benchmark.yaml")
    wanted = wanted_of([spec], {"KUBERNETES_SERVICE_HOST": "10.0.0.1"})
    assert wanted_of([spec], {}).programs == (), "--target local"
    monkeypatch.setenv("PATH", str(tmp_path))
    check = node_checks.check_programs(wanted)
    assert (check.ok, "hyperpodrun is not in this image" in check.found) == (False, True)
    assert "--build-arg HYPERPOD_AGENT=" in check.fix
    (tmp_path / "hyperpodrun").write_text("#!/bin/sh\n")
    (tmp_path / "hyperpodrun").chmod(0o755)
    assert node_checks.check_programs(wanted).ok
    assert node_checks.check_programs(Wanted()).ok is None


def test_the_cost_of_a_save_is_told(tmp_path: Path) -> None:
    check = storage_checks.check_speed(Wanted(storage=tmp_path, saved_bytes=80_000_000_000, nodes=2))
    assert "a save of 80.0 GB from 2 nodes takes about" in check.found


def test_the_slow_node_is_named() -> None:
    pairs = [("a + b + c + d", 40.0), ("a + b", 45.0), ("c + d", 90.0), ("b + c", 42.0)]
    checks = judge_bandwidth(Wanted(fabric="efa", floor=60.0), pairs, "Libfabric")
    assert named(checks, "transport").ok
    assert named(checks, "suspect").found.startswith("b is in every slow")
    assert not [c for c in judge_bandwidth(Wanted(floor=10.0), pairs, None) if c.ok is False]


@pytest.mark.parametrize(("fabric", "transport"), [("efa", "Socket"), ("infiniband", "Socket"), ("tcp", "IB")])
def test_a_silent_fall_back_is_found(fabric: str, transport: str) -> None:
    checks = judge_bandwidth(Wanted(fabric=fabric), [("a + b", 1.0)], transport)
    assert named(checks, "transport").ok is False


def test_sharp_that_is_not_used_fails_the_stage() -> None:
    wanted = Wanted(fabric="infiniband", sharp=True)
    assert named(judge_bandwidth(wanted, [], "IBext"), "sharp").ok is False
    assert named(judge_bandwidth(wanted, [], "IBext", collnet=True), "sharp").ok


def test_a_topology_file_that_nccl_did_not_read_fails_the_stage() -> None:
    wanted = Wanted(fabric="infiniband", topology="/etc/argosy/nccl-topology.xml")
    assert named(judge_bandwidth(wanted, [], "IB"), "topology").ok is False
    assert named(judge_bandwidth(wanted, [], "IB", topology=wanted.topology), "topology").ok


def test_a_spec_says_what_its_nodes_need() -> None:
    root = Path(__file__).parents[2] / "examples"
    wanted = wanted_of([str(root / "eks-llama2-7b.yaml")], {"MASTER_ADDR": "first"})
    assert (wanted.gpus, wanted.fabric, wanted.nics, wanted.floor) == (8, "efa", 4, 60.0)
    assert wanted.needed_bytes == pytest.approx(
        4 * 12 * 6.74e9, rel=0.01
    )  # three checkpoints and the one being written
    assert wanted.names == ("first",)
    assert wanted_of([str(root / "eks-llama2-7b.yaml"), "cluster.shm=48Gi"], {}).shm_bytes == 48 * 2**30
    assert wanted_of([str(root / "aks-mpt-30b.yaml")], {}).tokens == ("HF_TOKEN",)


def test_ranks_measure_each_other_and_the_exit_code_is_honest(
    write_spec: Callable[..., Path], argosy: Callable[..., Any]
) -> None:
    cluster = {"target": "local", "gpus": 0, "ranks": 2, "allreduce_floor": 100_000}
    spec = write_spec(cluster=cluster, parallel={"dp_replicate": 2, "micro_batch": 4})
    told = argosy("doctor", spec, "--nproc", "2", "--json")
    found = json.loads(told.stdout.splitlines()[-1])
    assert told.returncode == 2, told.stderr
    assert not found["ok"]
    [measured] = [check for check in found["nodes"]["all nodes"] if check["name"] == "all-reduce"]
    assert "GB/s, at least 100000 expected" in measured["found"]
    told = argosy("doctor", spec, "--json")
    assert told.returncode == 0, told.stdout


def test_a_check_that_raises_is_a_failed_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nvidia-smi of an ailing GPU does not answer, and an exception would end the rank before its node's report is out."""

    def hangs(wanted: Wanted) -> Check:
        raise subprocess.TimeoutExpired("nvidia-smi", 60)

    hangs.__name__ = "check_gpus"
    monkeypatch.setattr(preflight, "NODE_CHECKS", (hangs, *node_checks.NODE_CHECKS[1:]))
    checks = check_node(Wanted(storage=tmp_path))
    assert (named(checks, "gpus").ok, named(checks, "shm").ok) == (False, True)
    assert "timed out after 60 seconds" in named(checks, "gpus").found


def test_every_node_says_why_the_stage_failed_whichever_ends_first(
    write_spec: Callable[..., Path], argosy: Callable[..., Any]
) -> None:
    """The pod that ends first fails the job, and Kubernetes deletes the others with their logs."""
    cluster = {"target": "local", "gpus": 0, "ranks": 1, "nodes": 2, "secrets": {"SOME_TOKEN": "secret/key"}}
    spec = write_spec(cluster=cluster, parallel={"dp_replicate": 2, "micro_batch": 4})
    port = free_port()

    def node(number: int) -> Any:
        place = {
            "NNODES": "2",
            "NODE_RANK": str(number),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "SOME_TOKEN": ["given", ""][number],
        }
        return argosy("doctor", spec, "--nproc", "1", env=os.environ | place)

    with ThreadPoolExecutor(2) as both:
        told = list(both.map(node, range(2)))
    for one in told:
        assert one.returncode == 2, one.stderr
        assert "#1: tokens: 0 of 1 set" in one.stdout + one.stderr
    assert "all-reduce" in told[0].stdout, "the first node has the whole report"
    assert not told[1].stdout
