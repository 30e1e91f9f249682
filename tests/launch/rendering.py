"""Shared by the tests of rendering: the examples, every target, and the objects as a cluster would get them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from argosy.launch.place import place
from argosy.launch.registry import pod_targets
from argosy.launch.render import render

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(path for path in (ROOT / "examples").rglob("*.yaml") if "\ncluster:" in path.read_text())
GPU_EXAMPLE = ROOT / "examples" / "eks-llama2-7b.yaml"
CHART = ROOT / "charts" / "argosy"
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
HYPERPOD = ("cluster.cloud=hyperpod", "cluster.namespace=hyperpod-ns-a")


def cases() -> list[tuple[str, Path, str | None, tuple[str, ...]]]:
    """(name, spec, target, overrides): every example as it is, and one of them for every target."""
    found: list[tuple[str, Path, str | None, tuple[str, ...]]] = [(path.stem, path, None, ()) for path in EXAMPLES]
    for target in (*pod_targets(), "slurm", "local"):
        more = HYPERPOD if target == "hyperpod" else ()
        if target == "local":
            more = ("cluster.nodes=1", "parallel.dp_replicate=1")
        found.append((f"eks-llama2-7b.{target}", GPU_EXAMPLE, target, more))
    curated = ("data.train.0.prepare.curate=[gopher_quality, {near_duplicates: {threshold: 0.9}}]",)
    found.append(("eks-llama2-7b.indexed-job-curated", GPU_EXAMPLE, "indexed-job", curated))
    timed = ("log.every=60s", "eval=off")  # the planner's constants change, and with them how long a silence may be
    sagemaker = (*HYPERPOD, "cluster.operator=sagemaker", "cluster.spares=1", *timed)
    found.append(("eks-llama2-7b.hyperpod-sagemaker", GPU_EXAMPLE, "hyperpod", sagemaker))
    return found


CASES = cases()
NAMES = [case[0] for case in CASES]


def changed(**parts: Any) -> dict[str, Any]:
    """The chart's values with some replaced; a key is a path joined by two underscores."""
    values: dict[str, Any] = json.loads(json.dumps(VALUES))
    for part, keys in parts.items():
        node = values[part]
        for key, value in keys.items():
            *parents, last = key.split("__")
            inner = node
            for parent in parents:
                inner = inner[parent]
            inner[last] = value
    return values


@cache
def files_of(case: tuple[str, Path, str | None, tuple[str, ...]]) -> dict[str, str]:
    _, path, target, overrides = case
    return render(place(path, overrides, target))


def objects_of(files: dict[str, str]) -> Iterator[dict[str, Any]]:
    for name, text in files.items():
        if name.endswith(".yaml") and name != "run.yaml":
            yield from yaml.safe_load_all(text)


def pods_of(node: Any) -> Iterator[dict[str, Any]]:
    """Every pod spec inside an object."""
    return _holding(node, "containers")


def jobs_of(node: Any) -> Iterator[dict[str, Any]]:
    return _holding(node, "completions")


def _holding(node: Any, key: str) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        if key in node:
            yield node
        for child in node.values():
            yield from _holding(child, key)
    elif isinstance(node, list):
        for child in node:
            yield from _holding(child, key)
