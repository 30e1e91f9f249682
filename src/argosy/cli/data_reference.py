"""The `argosy data reference` command."""

from __future__ import annotations

from typing import Annotated

import typer

from argosy.cli.arguments import RUN_HELP, RUN_METAVAR, require_run, run_and_overrides


def reference(
    arguments: Annotated[list[str] | None, typer.Argument(help=RUN_HELP, metavar=RUN_METAVAR)] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: a GPU if there is one.")] = None,
) -> None:
    """Compute the reference of preference tuning.

    Stores the log-probabilities of the answers, by the model of init_from, beside the corpora of a run with data.task dpo. Training
    then needs no second model. The model has to fit on one device.
    """
    from argosy.config.resolve import resolve
    from argosy.infer.reference_answers import write_references

    path, overrides = run_and_overrides(arguments)
    for line in write_references(resolve(require_run(path), overrides).spec, device=device):
        print(line)
