"""argosy ckpt: the checkpoints of a run, and models from and for Hugging Face."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="List checkpoints; import and export Hugging Face models.", no_args_is_help=True)
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check everything, say what would be done, write nothing.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("ls")
def list_checkpoints(
    run: Annotated[Path, typer.Argument(help="A run (runs/<name>) or an imported model.", metavar="RUN")],
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="Read every file and compare its SHA-256 with the manifest.")
    ] = True,
    as_json: Json = False,
) -> None:
    """The checkpoints of a run: step, size, whether the hashes are right, and which one `train` would go on from."""
    import json

    from argosy.checkpoint.listing import describe, list_run

    found = list_run(run, check=check)
    print(json.dumps([one.as_dict() for one in found], indent=2) if as_json else describe(run, found))


@app.command("import")
def import_model(
    source: Annotated[str, typer.Argument(help="hf:DIR, a directory with config.json and *.safetensors.")],
    to: Annotated[Path, typer.Option(help="The directory to make.")],
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Make a model of a Hugging Face directory, to sample, evaluate, or start a run from (`init_from:`).

    gpt2, llama, mistral, qwen3, mpt, mixtral, qwen3_moe, bert and t5, in safetensors. The weights keep their precision; one
    parameter is in memory at a time. A setting that Argosy cannot represent is refused by its name. A run can also start
    from hf:DIR directly.
    """
    import json
    from dataclasses import asdict

    from argosy.checkpoint.hf_import import import_hf

    found = import_hf(source, to, dry_run=dry_run)
    print(json.dumps(asdict(found)) if as_json else found.describe(done=not dry_run))
