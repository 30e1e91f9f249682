"""The `argosy demo` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    directory: Annotated[Path, typer.Option("--dir", help="Where the demo keeps its corpus and its run.")] = Path(
        "argosy-demo"
    ),
    seconds: Annotated[int, typer.Option(min=5, help="Approximate duration of the whole demo.")] = 120,
) -> None:
    """Train a small model end to end, with nothing to download.

    Writes a corpus of small stories, trains a tokenizer and then a model whose size fits the measured speed of this machine.
    Training is killed half-way and resumes. The demo then evaluates, and shows what the model writes before and after training.
    """
    from argosy.demo.journey import run_demo

    run_demo(directory, seconds)
