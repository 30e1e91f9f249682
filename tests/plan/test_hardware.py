"""Hardware facts are found by the names people and drivers use, and overridden by a user's file; unknown names get a hint."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from argosy.errors import ArgosyError
from argosy.plan.hardware import dense_peak, facts, find_gpu, find_instance, parse_cluster


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA A100-SXM4-40GB", "A100-40 312"),
        ("NVIDIA A100-SXM4-80GB", "A100-80 312"),
        ("NVIDIA H100 80GB HBM3", "H100 989"),
        ("NVIDIA H100 PCIe", "H100-PCIe 756"),
        ("NVIDIA H200", "H200 989"),
        ("NVIDIA GB200", "GB200 2450"),
        ("Tesla V100-SXM2-32GB", "V100-32 125"),
        ("NVIDIA L40S", "L40S 362"),
    ],
)
def test_a_device_is_known_by_its_drivers_name(device: str, peak: str) -> None:
    assert str(dense_peak(device)) == peak


@pytest.mark.parametrize("device", ["NVIDIA GeForce RTX 3060", "NVIDIA L400", "NVIDIA H2000"])
def test_a_peak_is_never_guessed(device: str) -> None:
    assert dense_peak(device) is None


def test_a_cluster_of_named_nodes() -> None:
    cluster = parse_cluster("2xp4d.24xlarge")
    assert (cluster.gpus, cluster.nodes, cluster.domain, cluster.gpu.name) == (16, 2, 8, "A100-40")
    assert cluster.network == pytest.approx(400 / 8 / 8)  # GB/s of one GPU's share
    assert parse_cluster("2xml.p4d.24xlarge").gpus == 16
    assert parse_cluster("2xp4d.24xlarge", price=10.0).price == 20.0


def test_a_rack_of_one_nvlink_domain() -> None:
    cluster = parse_cluster("18xGB200-NVL72")
    assert (cluster.gpus, cluster.domain) == (72, 72)


def test_superchips_without_a_named_node_are_a_rack() -> None:
    cluster = parse_cluster("144xGB200")
    assert (cluster.gpus_per_node, cluster.nodes, cluster.domain) == (4, 36, 72)
    assert parse_cluster("2xGB300").domain == 2


@pytest.mark.parametrize(("said", "meant"), [("p5", "p5.48xlarge"), ("ND96isr_H100_v5", "Standard_ND96isr_H100_v5")])
def test_a_part_of_a_name_is_answered_with_the_whole(said: str, meant: str) -> None:
    with pytest.raises(ArgosyError, match=f"did you mean {meant}"):
        parse_cluster(f"2x{said}")


def test_gpus_without_a_named_node() -> None:
    cluster = parse_cluster("16xh100")
    assert (cluster.gpus, cluster.nodes, cluster.price) == (16, 2, None)


@pytest.mark.parametrize("text", ["", "0xp4d.24xlarge", "two p4d", "2x", "-1xH100"])
def test_what_is_no_cluster_is_refused(text: str) -> None:
    with pytest.raises(ArgosyError, match="a cluster is a number") as refused:
        parse_cluster(text)
    assert refused.value.code == "plan.bad-cluster"


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(ArgosyError, match="did you mean p4d"):
        find_instance("p4d.24xlrge")
    with pytest.raises(ArgosyError, match="did you mean H200"):
        find_gpu("h2000")


def test_a_users_file_is_laid_over(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(
        "gpus:\n  H200: {memory: 100}\n"
        "  X1: {device: [X1], sms: 10, dense: {bf16: 50}, memory: 8, bandwidth: 300}\n"
        "instances:\n  ours: {gpu: X1, gpus: 4, network: 100, price: 2}\n"
    )
    assert find_gpu("H200", str(mine)).memory == 100
    assert find_gpu("H200", str(mine)).bandwidth == 4800
    cluster = parse_cluster("3xours", user_file=str(mine))
    assert (cluster.gpus, cluster.gpu.name, cluster.price) == (12, "X1", 6.0)


@pytest.mark.parametrize(
    "text",
    ["gpu: {}", "gpus: {X1: {sms: 3}}", "gpus: {H200: {memory: -1}}", "gpus: {H200: {speed: 1}}", "- a", "gpus: 3"],
)
def test_a_bad_file_of_facts_is_refused(tmp_path: Path, text: str) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(text)
    with pytest.raises(ArgosyError) as refused:
        facts(str(mine))
    assert refused.value.code == "plan.bad-facts"


def test_every_instance_names_a_known_gpu() -> None:
    known = facts()
    assert {instance.gpu for instance in known.instances.values()} <= set(known.gpus)


def test_planning_does_not_import_torch() -> None:
    code = "import sys, argosy.plan.hardware as h; h.facts(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
