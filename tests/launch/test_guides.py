"""The guides' commands work: every `sh` block of a scenario is run as it stands, in a new directory with the examples in it."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from rendering import ROOT

import forking

GUIDES = ("gpt3-on-aks", "mpt-on-aks", "llama-on-eks", "gpt3-on-hyperpod", "parallelism-lab")


@pytest.mark.parametrize("guide", GUIDES)
def test_the_commands_of_a_guide_run(guide: str, tmp_path: Path) -> None:
    text = (ROOT / "docs" / "guides" / f"{guide}.md").read_text()
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    assert blocks
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "bin").mkdir()
    environment = os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    script = "set -eu\n" + "\n".join(blocks)
    with forking.command(tmp_path / "bin"):
        done = subprocess.run(
            ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    trained = list((tmp_path / "runs").glob("*/checkpoints/step-00000010"))
    assert trained
    for rendered in re.findall(r"-o (out/\S+)", script):
        assert (tmp_path / rendered / "plan.json").exists()


def test_every_launched_example_has_a_guide() -> None:
    guides = "".join((ROOT / "docs" / "guides" / f"{guide}.md").read_text() for guide in (*GUIDES, "launching"))
    for path in (ROOT / "examples").glob("*.yaml"):
        if "\ncluster:" in path.read_text() and not path.name.startswith("slurm"):
            assert f"examples/{path.name}" in guides, f"no guide speaks of {path.name}"


def test_parallelism_lab_renders_for_a_cluster(tmp_path: Path) -> None:
    """Its specs name no cluster: any of them is launched by adding one on the command line."""
    from argosy.launch.place import place
    from argosy.launch.render import render

    labs = sorted((ROOT / "examples" / "parallelism-lab").glob("*.yaml"))
    assert len(labs) >= 5
    cluster = (
        "cluster={target: jobset, gpus: %d, nodes: 1, cpus: 8, memory: 64Gi, image: r/argosy@sha256:0, storage: claim}"
    )
    for path in labs:
        gpus = 1 if path.stem == "baseline" else 2
        assert "JobSet" in "".join(render(place(path, [cluster % gpus])).values()), path.name
