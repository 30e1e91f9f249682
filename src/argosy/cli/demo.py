"""argosy demo"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    directory: Annotated[Path, typer.Option("--dir", help="Where the demo keeps its corpus and its run.")] = Path(
        "argosy-demo"
    ),
    seconds: Annotated[int, typer.Option(min=5, help="How long to train, about.")] = 60,
) -> None:
    """Train a small model end to end on this machine, with nothing to download.

    Makes a corpus from the Python standard library's own sources, trains a tokenizer and a model of about 5 M
    parameters on it, is killed half-way and resumes, evaluates, and shows what the model writes.
    """
    from argosy.demo import run_demo

    run_demo(directory, seconds)
