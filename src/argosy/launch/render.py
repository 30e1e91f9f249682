"""Rendering: a placed run to the files that start it, and plan.json beside them. Pure: the same spec gives the same bytes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import yaml

from argosy import __version__
from argosy.config.layout import describe_layout
from argosy.files import replace_file
from argosy.launch.placement import KUBERNETES, Placement
from argosy.launch.pod import Manifest, labels
from argosy.launch.stages import DATA_STAGES, Stage, command, stages_of
from argosy.launch.storage import storage_objects
from argosy.launch.targets.hyperpod import hyperpod_job
from argosy.launch.targets.indexed import data_job, ranks_job
from argosy.launch.targets.jobset import job_set
from argosy.launch.targets.local import local_files
from argosy.launch.targets.pytorchjob import pytorch_job, resumed_by_hyperpod
from argosy.launch.targets.slurm import slurm_files
from argosy.launch.targets.trainjob import train_job

PLAN = "plan.json"


def render(placed: Placement) -> dict[str, str]:
    """File names and contents, in the order they are used."""
    if placed.cluster.target == "slurm":
        files = slurm_files(placed)
    elif placed.cluster.target == "local":
        files = local_files(placed)
    else:
        files = {name: as_yaml(objects) for name, objects in kubernetes_objects(placed).items() if objects}
    return files | {PLAN: json.dumps(plan(placed, files), indent=2) + "\n"}


def kubernetes_objects(placed: Placement) -> dict[str, list[Manifest]]:
    """By file: the volume, the run spec, and each stage."""
    files = {"00-storage.yaml": storage_objects(placed), "10-spec.yaml": [_spec(placed)]}
    for number, stage in enumerate(stages_of(placed), start=2):
        files[f"{number}0-{stage}.yaml"] = stage_objects(placed, stage)
    return files


def stage_objects(placed: Placement, stage: Stage) -> list[Manifest]:
    if stage in DATA_STAGES:
        return data_job(placed, stage)
    if stage == "preflight":
        return ranks_job(placed, stage)
    makers = {
        "jobset": job_set,
        "indexed-job": lambda run: ranks_job(run, "train"),
        "pytorchjob": pytorch_job,
        "trainjob": train_job,
        "hyperpod": resumed_by_hyperpod if placed.cluster.operator == "kubeflow" else hyperpod_job,
    }
    return makers[placed.cluster.target](placed)


def _spec(placed: Placement) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": f"{placed.name}-spec",
            "namespace": placed.cluster.namespace,
            "labels": labels(placed),
        },
        "data": {"run.yaml": placed.source},
    }


def plan(placed: Placement, files: dict[str, str]) -> dict[str, Any]:
    """What was resolved and what is expected, for people and programs that look at the files later."""
    cluster = placed.cluster
    digest = hashlib.sha256("".join(f"{name}\0{text}\0" for name, text in files.items()).encode()).hexdigest()
    return {
        "argosy": __version__,
        "run": placed.spec.name,
        "object": placed.name if cluster.target in KUBERNETES else None,
        "target": cluster.target,
        "cloud": cluster.cloud,
        "namespace": cluster.namespace if cluster.target in KUBERNETES else None,
        "nodes": cluster.nodes,
        "ranks_per_node": placed.ranks,
        "gpus_per_node": placed.gpus,
        "fabric": placed.fabric,
        "layout": describe_layout(placed.spec.parallel),
        "parallel": placed.spec.parallel.model_dump(mode="json"),
        "stages": {stage: ["argosy", *command(placed, stage)] for stage in stages_of(placed)},
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


class _Plain(yaml.SafeDumper):
    """No anchors, long lines, and text of several lines as it was written."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Plain.add_representer(str, _text)


def as_yaml(objects: list[Manifest]) -> str:
    return yaml.dump_all(objects, Dumper=_Plain, sort_keys=False, width=1000, explicit_start=True)
