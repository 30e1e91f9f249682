"""A launch target of its own, for test_new_target.py: the stages in the background of this machine, under one process id."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

from argosy.launch.placement import Placement
from argosy.launch.stages import stages_of
from argosy.launch.target import Launched, LaunchOptions, RunStatus, State, Target, logged_progress, not_found


class BackgroundTarget(Target):
    name = "background"
    on_this_machine = True

    def render(self, placed: Placement) -> dict[str, str]:
        lines = [shlex.join(["argosy", *stage.command(placed, "run.yaml")]) for stage in stages_of(placed)]
        return {"run.yaml": placed.source, "background.sh": "\n".join(["set -e", *lines, ""])}

    def apply(self, placed: Placement, options: LaunchOptions) -> int:
        # The processes it starts do not have the line in the registry that this one has.
        path, known = str(options.path.resolve()), "cluster.target=local"
        commands = [
            shlex.join([sys.executable, "-m", "argosy", *stage.command(placed, path), known])
            for stage in stages_of(placed)
        ]
        started = subprocess.Popen(
            ["bash", "-c", " && ".join(commands)],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        _pid_file(Path(placed.spec.runs_dir) / placed.spec.name).write_text(str(started.pid))
        options.say(f"started in the background as process {started.pid}")
        return 0

    def status(self, run: Launched) -> RunStatus:
        alive = _pid_file(run.directory).exists()
        state = State("running", "in the background") if alive else State("absent", "not started")
        return RunStatus(run.name, stages={"train": state}, progress=logged_progress(run))

    def stop(self, run: Launched) -> list[str]:
        if not _pid_file(run.directory).exists():
            raise not_found(run, f"{run.name} was not started in the background")
        group = int(_pid_file(run.directory).read_text())
        os.killpg(group, signal.SIGTERM)
        _pid_file(run.directory).unlink()
        return [f"process group {group}"]


def _pid_file(directory: Path) -> Path:
    directory.parent.mkdir(exist_ok=True)
    return directory.parent / f"{directory.name}.pid"


TARGET = BackgroundTarget()
