"""argosy demo"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    directory: Annotated[Path, typer.Option("--dir", help="Where the demo keeps its corpus and its run.")] = Path(
        "argosy-demo"
    ),
    seconds: Annotated[int, typer.Option(min=5, help="How long all of it may take, about.")] = 120,
) -> None:
    """Train a small model end to end on this machine, with nothing to download.

    Writes a corpus of small stories, trains a tokenizer, and a model whose size fits the measured speed of this machine,
    is killed half-way and resumes, evaluates, and shows what the model wrote before training and what it writes after.
    """
    from argosy.demo.journey import run_demo

    run_demo(directory, seconds)
