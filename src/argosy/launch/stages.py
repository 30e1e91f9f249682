"""The stages of a launch, in order, and the command of each.

Every stage can be repeated: data stages find the corpora's manifests and do nothing, preflight measures again, and training resumes
from the newest checkpoint. A stage starts when the previous one has succeeded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from argosy.data.text.hub_names import on_hub
from argosy.launch.placement import Placement

# Where a pod sees the run's ConfigMap.
SPEC_DIRECTORY = "/etc/argosy"
SPEC_FILE = f"{SPEC_DIRECTORY}/run.yaml"


@dataclass(frozen=True)
class Stage:
    """One step of a launch: which runs have it, what it executes, and on what.

    `needed` says whether a run has this stage. `verb` builds the arguments of `program` from the run spec's file and its overrides. A
    stage `on_gpus` is one group of ranks on the run's nodes; other stages are CPU workers that split the work by index. The stage that
    `trains` is the run itself: its job is the target's own, and it resumes after a restart. A stage `as_root` is a single pod of user 0 that may
    change owners of files and nothing else.
    """

    name: str
    needed: Callable[[Placement], bool]
    verb: Callable[[Placement, list[str]], list[str]]
    on_gpus: bool = True
    trains: bool = False
    as_root: bool = False
    program: str = "argosy"

    def __str__(self) -> str:
        return self.name

    @property
    def resumes(self) -> bool:
        """True if the stage goes on where it was interrupted. Preflight measures anew."""
        return self.trains or not self.on_gpus

    def command(self, placed: Placement, spec_file: str = SPEC_FILE) -> list[str]:
        """Return the arguments that run this stage in one pod or on one node."""
        return self.verb(placed, [spec_file, *placed.overrides])


def _fetches(placed: Placement) -> bool:
    return on_hub(placed.spec.data.tokenizer) is not None or any(
        source.prepare is not None and source.prepare.fetch is not None for source in placed.spec.data.sources.values()
    )


def _prepares(placed: Placement) -> bool:
    return any(source.prepare is not None for source in placed.spec.data.sources.values())


def _takes_ownership(placed: Placement) -> bool:
    return placed.in_pods and placed.storage.take_ownership


STORAGE = Stage(
    "storage",
    _takes_ownership,
    lambda placed, _: [f"{placed.cluster.user}:{placed.cluster.user}", placed.storage.mount],
    on_gpus=False,
    as_root=True,
    program="chown",
)
FETCH = Stage("fetch", _fetches, lambda _, run: ["data", "build", *run, "--only", "fetch"], on_gpus=False)
PREPARE = Stage("prepare", _prepares, lambda _, run: ["data", "build", *run, "--only", "prepare"], on_gpus=False)
PREFLIGHT = Stage(
    "preflight",
    lambda placed: placed.cluster.preflight,
    lambda placed, run: ["doctor", *run, "--nproc", str(placed.ranks)],
)
TRAIN = Stage("train", lambda _: True, lambda placed, run: ["train", *run, "--nproc", str(placed.ranks)], trains=True)

STAGES = {stage.name: stage for stage in (STORAGE, FETCH, PREPARE, PREFLIGHT, TRAIN)}


def stages_of(placed: Placement) -> list[Stage]:
    """Return the stages of this run, in order."""
    return [stage for stage in STAGES.values() if stage.needed(placed)]
