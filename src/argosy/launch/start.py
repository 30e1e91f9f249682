"""Starting a placed run: the stages on this machine, the chain handed to Slurm, or conducted on Kubernetes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from argosy.errors import EXIT_DONE, ArgosyError
from argosy.launch.placement import Placement
from argosy.launch.render import render, write
from argosy.launch.stages import Stage, command, stages_of
from argosy.launch.targets.slurm import SUBMIT

Say = Callable[[str], None]


def start(
    placed: Placement, path: Path, *, stage: Stage | None, follow: bool, in_cluster: bool, output: Path | None, say: Say
) -> int:
    """Run or submit, and return the exit code."""
    if stage is not None and stage not in stages_of(placed):
        raise ArgosyError(
            "launch.no-stage",
            f"this run has no stage {stage}: it has {', '.join(stages_of(placed))}",
            key="--stage",
            value=stage,
            fix="fetch and prepare come from data.train.N.prepare, preflight from cluster.preflight",
        )
    if placed.cluster.target == "local":
        return _on_this_machine(placed, path, stage, say)
    if placed.cluster.target == "slurm":
        return _to_slurm(placed, stage, output, say)
    return _on_kubernetes(placed, stage, follow=follow, in_cluster=in_cluster, say=say)


def _on_this_machine(placed: Placement, path: Path, only: Stage | None, say: Say) -> int:
    """Each stage as the command a user would type; the first that fails ends the chain."""
    for stage in stages_of(placed) if only is None else [only]:
        arguments = command(placed, stage, str(path))
        if placed.ranks == 1 and "--nproc" in arguments:
            arguments = arguments[: arguments.index("--nproc")]  # the one process needs no agent
        say(f"{stage}: argosy {' '.join(arguments[: arguments.index(str(path)) + 1])} …")
        code = subprocess.run([sys.executable, "-m", "argosy", *arguments], check=False).returncode
        if code != EXIT_DONE:
            say(f"{stage}: exit code {code if code >= 0 else 128 - code}")
            return code if code >= 0 else 128 - code
    return EXIT_DONE


def _to_slurm(placed: Placement, only: Stage | None, output: Path | None, say: Say) -> int:
    """Submit the chain. The spec has to lie where every node sees it: beside the run directories, unless --output says where."""
    directory = output or Path(placed.spec.runs_dir) / f".launch-{placed.name}"
    write(render(placed), directory)
    line = [str(directory / SUBMIT)]
    if only is not None:
        line = ["sbatch", "--parsable", str(directory / f"{only}.sbatch")]
    environment = os.environ | {"ARGOSY_SPEC": str(directory.resolve() / "run.yaml")}
    try:
        done = subprocess.run(line, check=False, env=environment, text=True, capture_output=True)
    except FileNotFoundError:
        done = None
    if done is None or done.returncode:
        raise ArgosyError(
            "launch.slurm",
            "sbatch is not on this machine" if done is None else f"Slurm refused the job: {done.stderr.strip()}",
            fix=f"submit {directory / SUBMIT} where Slurm's commands are"
            if done is None
            else "see what Slurm says; partition, account and time are in cluster.slurm",
        )
    say(done.stdout.strip() if only is None else f"{only} {done.stdout.strip()}")
    return EXIT_DONE


def _on_kubernetes(placed: Placement, only: Stage | None, *, follow: bool, in_cluster: bool, say: Say) -> int:
    from argosy.launch.api import connect
    from argosy.launch.conduct import Conductor

    cluster = connect(placed.cluster.namespace, in_cluster=in_cluster)
    return Conductor(cluster, placed, say).run(only, follow=follow)
