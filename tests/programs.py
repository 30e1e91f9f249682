"""Programs that tests run: where they are, and which of them a machine cannot have."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

# Tests of a program that neither PyPI nor npm nor Debian has for every machine: (file, program, machines that have it). On those
# machines the program is required like any other. On others the tests are left out and named, which is no failure in CI.
RARE = [("launch/test_chart.py", "helm", ("x86_64",))]


def tool(name: str) -> str | None:
    """The path of a program, also of one that came with a Python package of this environment."""
    return shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


def not_available(machine: str, find: Callable[[str], str | None] = tool) -> list[tuple[str, str]]:
    """The (file, program) of `RARE` that cannot run here: no package has the program for the machine, and nobody installed it."""
    return [(file, program) for file, program, machines in RARE if machine not in machines and find(program) is None]
