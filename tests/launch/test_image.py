"""The images: an ordinary user, one entry point, nothing unpinned, no key inside."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from rendering import ROOT

from argosy.launch import node_checks

FILES = sorted((ROOT / "docker").glob("Dockerfile*"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_an_image_is_that_of_an_ordinary_user_with_one_entry_point(path: Path) -> None:
    text = path.read_text()
    assert re.findall(r"^USER (\S+)", text, re.MULTILINE)[-1] == "1000:1000"
    assert re.findall(r"^ENTRYPOINT (.*)", text, re.MULTILINE) == ['["argosy"]']
    assert "ssh" not in text.lower()
    assert not re.search(r"(TOKEN|PASSWORD|SECRET)", text)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_nothing_in_an_image_changes_by_itself(path: Path) -> None:
    text = path.read_text()
    assert set(re.findall(r"^FROM (\S+)", text, re.MULTILINE)) == {"${BASE}"}
    [base] = re.findall(r"^ARG BASE(?:=(.*))?$", text, re.MULTILINE)
    assert base == "" or re.search(r"@sha256:[0-9a-f]{64}$", base), "named by its digest, here or when it is built"
    assert ":latest" not in text
    for package in re.findall(r"pip install --no-cache-dir (?!--constraint)(\S+)", text):
        assert "==" in package
    if "curl" in text:
        assert "sha256sum --check" in text
        assert re.search(r"^ARG EFA_INSTALLER_SHA256=[0-9a-f]{64}$", text, re.MULTILINE), "it builds as documented"


def test_the_image_has_what_triton_compiles_its_launcher_with() -> None:
    text = (ROOT / "docker" / "Dockerfile").read_text()
    [installed] = re.findall(r"--no-install-recommends (.*) \\$", text, re.MULTILINE)
    assert {"gcc", "g++", "libc6-dev"} <= set(installed.split())
    assert "#include <Python.h>" in text, "a base without Python's headers ends the build"


def test_the_driver_an_image_asks_for_is_the_one_its_torch_and_the_guide_name() -> None:
    text = (ROOT / "docker" / "Dockerfile").read_text()
    [cuda] = re.findall(r"NVIDIA_REQUIRE_CUDA=cuda>=(\d+)\.\d+", text)
    driver = node_checks._DRIVERS[int(cuda)]
    assert f"driver of the {driver} series or newer" in text
    assert f"CUDA {cuda}" in (ROOT / "docs" / "guides" / "launching.md").read_text()
    assert f"driver {driver} or newer" in (ROOT / "docs" / "guides" / "launching.md").read_text()
    assert "NVIDIA_VISIBLE_DEVICES" not in text, "a pod that asks for no GPU sees none"


def test_images_are_published_by_digest_with_an_sbom_and_a_signature() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "images.yml").read_text())
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    commands = "\n".join(step.get("run", "") for step in steps)
    for part in (
        "--sbom=true",
        "--provenance=mode=max",
        "cosign sign",
        "$name@$digest",
        "--read-only --user 1000:1000",
    ):
        assert part in commands
    for path in FILES:
        assert f"build {path.name} " in commands
    assert workflow["permissions"] == {"contents": "read"}


def test_the_rendered_user_is_the_images_own() -> None:
    from argosy.config.cluster import ClusterSpec

    assert ClusterSpec().user == 1000
