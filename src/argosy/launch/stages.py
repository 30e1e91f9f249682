"""The stages of a launch, in their order, and the command of each.

Every stage can be run again: data stages find the corpora's manifests and have nothing to do, preflight measures anew,
training goes on from the newest checkpoint. A stage starts when the one before it has succeeded.
"""

from __future__ import annotations

from typing import Literal

from argosy.launch.placement import Placement

Stage = Literal["fetch", "prepare", "preflight", "train"]
STAGES: tuple[Stage, ...] = ("fetch", "prepare", "preflight", "train")
DATA_STAGES: tuple[Stage, ...] = ("fetch", "prepare")
SPEC_FILE = "/etc/argosy/run.yaml"


def stages_of(placed: Placement) -> list[Stage]:
    """Those this run has."""
    recipes = [source.prepare for source in placed.spec.data.train if source.prepare is not None]
    wanted = {
        "fetch": any(recipe.fetch is not None for recipe in recipes),
        "prepare": bool(recipes),
        "preflight": placed.cluster.preflight,
        "train": True,
    }
    return [stage for stage in STAGES if wanted[stage]]


def command(placed: Placement, stage: Stage, spec_file: str = SPEC_FILE) -> list[str]:
    """The arguments of `argosy` that do a stage's work in one pod or on one node."""
    run = [spec_file, *placed.overrides]
    if stage in DATA_STAGES:
        return ["data", "build", *run, "--only", stage]
    if stage == "preflight":
        return ["doctor", *run, "--nproc", str(placed.ranks)]
    return ["train", *run, "--nproc", str(placed.ranks)]
