"""Rendering is pure: the same spec, the same bytes, held to golden files; no torch, no network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rendering import CASES, GPU_EXAMPLE, NAMES, files_of, objects_of

from argosy.launch.place import place
from argosy.launch.render import PLAN, render

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_every_example_and_target_renders_the_golden_bytes(case: tuple[str, Path, str | None, tuple[str, ...]]) -> None:
    files = dict(files_of(case))
    assert files == files_of.__wrapped__(case)
    planned = json.loads(files.pop(PLAN))
    del planned["prediction"], planned["parallel"], planned["argosy"]  # these have tests of their own
    files[PLAN] = json.dumps(planned, indent=2) + "\n"
    text = "".join(f"# ---------- {name}\n{content}" for name, content in files.items())
    golden = GOLDEN / f"{case[0]}.txt"
    if os.environ.get("ARGOSY_GOLDEN") == "write":
        golden.write_text(text)
    assert text == golden.read_text(), f"rendered files changed: ARGOSY_GOLDEN=write pytest {Path(__file__).name}"


def test_every_golden_file_belongs_to_a_case() -> None:
    assert sorted(path.stem for path in GOLDEN.glob("*.txt")) == sorted(NAMES)


def test_rendering_needs_neither_torch_nor_the_kubernetes_client() -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['kubernetes'] = sys.modules['numpy'] = None\n"
        "from pathlib import Path\nfrom argosy.launch.place import place\nfrom argosy.launch.render import render\n"
        f"print(len(render(place(Path({str(GPU_EXAMPLE)!r})))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_plan_says_what_was_resolved_and_what_is_expected() -> None:
    planned = json.loads(render(place(GPU_EXAMPLE))[PLAN])
    assert planned["layout"] == "dp_replicate 2 x dp_shard 4 x tp 2"
    assert planned["fabric"] == "efa"
    assert planned["prediction"]["fits"]
    assert planned["stages"]["train"][:2] == ["argosy", "train"]


def test_a_layout_left_to_argosy_follows_the_number_of_nodes_and_the_batch_stays(tmp_path: Path) -> None:
    spec = tmp_path / "run.yaml"
    lines = [line for line in GPU_EXAMPLE.read_text().splitlines() if not line.startswith("parallel:")]
    spec.write_text("\n".join(lines))
    worlds = {}
    for nodes in (2, 4):
        placed = place(spec, [f"cluster.nodes={nodes}"])
        assert placed.spec.train.global_batch == 512
        assert placed.prediction is not None
        assert placed.prediction["fits"]
        worlds[nodes] = placed.spec.parallel.world_size
        written = next(pod for pod in objects_of(render(placed)) if pod["kind"] == "JobSet")
        assert f"parallel.micro_batch={placed.spec.parallel.micro_batch}" in json.dumps(written)
    assert worlds == {2: 16, 4: 32}


def test_files_are_written_whole_and_scripts_can_be_run(tmp_path: Path) -> None:
    from argosy.launch.render import write

    write(render(place(GPU_EXAMPLE, target="slurm")), tmp_path / "out")
    assert os.access(tmp_path / "out" / "submit.sh", os.X_OK)
    assert (tmp_path / "out" / "run.yaml").read_bytes() == GPU_EXAMPLE.read_bytes()
