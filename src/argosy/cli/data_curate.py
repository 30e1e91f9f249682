"""The `argosy data curate` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from argosy.cli.arguments import local

ON_HELP = (
    "ray: a Ray cluster does the work (one of this machine if none runs); ray://HOST:10001 or HOST:6379: that cluster."
)
Cluster = Annotated[str | None, typer.Option("--on", help=ON_HELP, metavar="ray|ADDRESS")]


def curate(
    pipeline: Annotated[Path, typer.Argument(help="The pipeline file: inputs, output and steps.")],
    output: Annotated[
        Path | None, typer.Option(callback=local, help="The directory to make; default: output of the pipeline.")
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; default: one for each core.")] = None,
    shard_index: Annotated[
        int, typer.Option(min=0, help="This machine's number, if --shard-count machines divide the work.")
    ] = 0,
    shard_count: Annotated[int, typer.Option(min=1, help="Number of machines that divide the work.")] = 1,
    on: Cluster = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an output that is already there.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the pipeline and list its inputs, write nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Filter, mask and deduplicate text.

    A pipeline lists inputs, an output and steps: language, length, gopher_quality, gopher_repetition, fineweb_quality, c4_quality, field,
    mask_pii, decontaminate, exact_duplicates, near_duplicates.

    The output is JSON lines for `argosy data prepare`, or with a tokenizer a corpus to train on. curation.json counts what each step
    removed, with examples. If it is killed, run it again to resume.

    Machines that share the output directory divide the work while they run, for instance the tasks of a Slurm array: each does its shards,
    then what no other has taken, and stays until the output is finished.
    """
    import json
    from dataclasses import asdict

    from argosy.data.curate.curate_job import curate as run
    from argosy.data.curate.curate_job import preview_of
    from argosy.data.curate.curate_work import CurateSharing
    from argosy.data.curate.pipeline_spec import read_pipeline
    from argosy.errors import EXIT_RESUMABLE
    from argosy.host_cores import available_cores

    chosen = read_pipeline(pipeline, output=None if output is None else str(output))
    sharing = CurateSharing(
        workers=workers or available_cores(),
        machine=shard_index,
        machines=shard_count,
        cluster=on,
        overwrite=overwrite,
    )
    if dry_run:
        print(preview_of(chosen, sharing))
        return
    report = run(chosen, sharing)
    if report is None:
        print(
            f"{chosen.spec.output}: machine {shard_index} of {shard_count} has done its share; the file system has no locks, so run the same command again when the others have ended"
        )
        raise typer.Exit(EXIT_RESUMABLE)
    print(json.dumps(asdict(report), indent=2) if as_json else report.table())
