"""This machine: the stages run one after the other, as a script or as child processes. The first failure ends the chain."""

from __future__ import annotations

import shlex
import subprocess
import sys

from argosy.errors import EXIT_DONE
from argosy.launch.placement import Placement
from argosy.launch.stages import stages_of
from argosy.launch.target import WATCH_IT, Launched, LaunchOptions, Target, not_found

SCRIPT = "run.sh"


class LocalTarget(Target):
    name = "local"
    on_this_machine = True

    def render(self, placed: Placement) -> dict[str, str]:
        lines = ["#!/bin/bash", "set -euo pipefail", 'spec="$(cd "$(dirname "$0")" && pwd)/run.yaml"']
        for stage in stages_of(placed):
            words = stage.command(placed, "@spec@")
            lines.append("argosy " + " ".join('"$spec"' if word == "@spec@" else shlex.quote(word) for word in words))
        return {"run.yaml": placed.source, SCRIPT: "\n".join([*lines, ""])}

    def apply(self, placed: Placement, options: LaunchOptions) -> int:
        """Run each stage as the command a user would type."""
        path = str(options.path)
        for stage in stages_of(placed) if options.only is None else [options.only]:
            arguments = stage.command(placed, path)
            if placed.ranks == 1 and "--nproc" in arguments:
                # A single rank needs no launcher.
                arguments = arguments[: arguments.index("--nproc")]
            options.say(f"{stage}: argosy {' '.join(arguments[: arguments.index(path) + 1])} …")
            code = subprocess.run([sys.executable, "-m", "argosy", *arguments], check=False).returncode
            if code != EXIT_DONE:
                # Report a signal as a shell does, as 128 plus its number.
                code = code if code >= 0 else 128 - code
                options.say(f"{stage}: exit code {code}")
                return code
        return EXIT_DONE

    def stop(self, run: Launched) -> list[str]:
        cause = f"{run.name} runs on this machine, if it does: Ctrl-C or SIGTERM ends it in order"
        raise not_found(run, cause, WATCH_IT)


TARGET = LocalTarget()
