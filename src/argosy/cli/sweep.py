"""The `argosy sweep` command."""

from __future__ import annotations

from typing import Annotated

import typer

from argosy.cli.arguments import require_run, run_and_overrides


def sweep(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            help="The run spec (default: ./run.yaml), then overrides; a key with several values is varied.",
            metavar="[RUN.yaml] [KEY=VALUE,VALUE]...",
        ),
    ] = None,
    nproc: Annotated[int | None, typer.Option(min=1, help="Ranks of each run, as in `argosy train`.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check every run, list the commands, start nothing.")
    ] = False,
) -> None:
    """Train one run for each combination of values.

    `argosy sweep run.yaml optim.lr=1e-3,3e-3 train.seed=1,2` trains four runs in runs/NAME-sweep, one after the other, and lists them
    with the lowest validation loss first. Interrupted, the same command goes on. `argosy dash` compares the runs.
    """
    from argosy.launch.sweep_trials import plan_sweep, run_sweep
    from argosy.watch.run_table import describe_runs, list_runs

    path, overrides = run_and_overrides(arguments)
    planned = plan_sweep(require_run(path, "sweep"), overrides)
    if dry_run:
        print("\n".join(f"argosy {' '.join(planned.command(trial, nproc))}" for trial in planned.trials))
        return
    code = run_sweep(planned, nproc, lambda text: print(text, flush=True))
    rows = list_runs(planned.root)
    print(
        describe_runs(
            planned.root, sorted(rows, key=lambda row: (row.validation_loss is None, row.validation_loss or 0.0))
        )
    )
    raise typer.Exit(code)
