"""This machine: the stages one after the other, as a script that stops at the first that fails."""

from __future__ import annotations

import shlex

from argosy.launch.placement import Placement
from argosy.launch.stages import command, stages_of

SCRIPT = "run.sh"


def local_files(placed: Placement) -> dict[str, str]:
    lines = ["#!/bin/bash", "set -euo pipefail", 'spec="$(cd "$(dirname "$0")" && pwd)/run.yaml"']
    for stage in stages_of(placed):
        words = command(placed, stage, "@spec@")
        lines.append("argosy " + " ".join('"$spec"' if word == "@spec@" else shlex.quote(word) for word in words))
    return {"run.yaml": placed.source, SCRIPT: "\n".join([*lines, ""])}
