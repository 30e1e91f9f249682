"""Render a placed run to the files that start it, with a plan.json. Rendering is pure: the same spec gives the same bytes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from argosy import __version__
from argosy.config.layout import describe_layout
from argosy.files import replace_file
from argosy.launch.placement import Placement
from argosy.launch.registry import find_target
from argosy.launch.stages import stages_of

PLAN = "plan.json"


def render(placed: Placement) -> dict[str, str]:
    """Return the rendered files by name, in the order they are used."""
    files = find_target(placed.cluster.target).render(placed)
    return files | {PLAN: json.dumps(plan(placed, files), indent=2) + "\n"}


def plan(placed: Placement, files: dict[str, str]) -> dict[str, Any]:
    """Return the contents of plan.json: the resolved settings and the planner's prediction, for later readers of the files."""
    cluster = placed.cluster
    digest = hashlib.sha256("".join(f"{name}\0{text}\0" for name, text in files.items()).encode()).hexdigest()
    return {
        "argosy": __version__,
        "run": placed.spec.name,
        "object": placed.name if placed.in_pods else None,
        "target": cluster.target,
        "cloud": cluster.cloud,
        "namespace": cluster.namespace if placed.in_pods else None,
        "nodes": cluster.nodes,
        "ranks_per_node": placed.ranks,
        "gpus_per_node": placed.gpus,
        "fabric": placed.fabric,
        "layout": describe_layout(placed.spec.parallel),
        "parallel": placed.spec.parallel.model_dump(mode="json"),
        "stages": {stage.name: [stage.program, *stage.command(placed)] for stage in stages_of(placed)},
        "prediction": placed.prediction,
        "files": list(files),
        "sha256": digest,
    }


def write(files: dict[str, str], directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        replace_file(directory / name, text.encode())
        if name.endswith((".sh", ".sbatch")):
            (directory / name).chmod(0o755)
