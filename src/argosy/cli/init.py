"""The `argosy init` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from argosy.errors import ArgosyError


def init(
    corpus: Annotated[
        Path | None, typer.Argument(help="A prepared corpus (`argosy data prepare`).", metavar="[CORPUS]")
    ] = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="The file to write.")] = Path("run.yaml"),
    name: Annotated[str, typer.Option(help="The name of the run.")] = "first",
    validation: Annotated[
        Path | None,
        typer.Option(help="A prepared corpus to evaluate on; default: a share of CORPUS.", metavar="CORPUS"),
    ] = None,
) -> None:
    """Write a run spec sized to this machine and a corpus.

    The file is commented and trains as it is. Nothing is overwritten.
    """
    from argosy.plan.first_spec import ThisMachine, first_spec

    written = first_spec(corpus, name, ThisMachine.look(), validation)
    if output.exists():
        raise ArgosyError(
            "config.conflict",
            f"{output} exists already",
            key="--output",
            value=str(output),
            fix="choose another with -o FILE, or remove it",
        )
    output.write_text(written.text, encoding="utf-8")
    nproc = f" --nproc {written.ranks}" if written.ranks > 1 else ""
    print("\n".join([*written.notes, f"wrote {output}; next: argosy train {output}{nproc}"]))
