"""The registry of launch targets: the name of each, as `cluster.target` and `--target` take it, and the module that has it.

It stands below the schema and the command line, which take their choices from it, and imports nothing: `argosy.launch.registry`
loads a target's module when the target is asked for. The module defines `TARGET`, an `argosy.launch.target.Target`.
"""

from __future__ import annotations

TARGETS: dict[str, str] = {
    "local": "argosy.launch.targets.local",
    "slurm": "argosy.launch.targets.slurm",
    "jobset": "argosy.launch.targets.jobset",
    "indexed-job": "argosy.launch.targets.indexed_job",
    "pytorchjob": "argosy.launch.targets.pytorchjob",
    "trainjob": "argosy.launch.targets.trainjob",
    "hyperpod": "argosy.launch.targets.hyperpod",
}
