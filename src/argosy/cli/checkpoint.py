"""argosy ckpt: the checkpoints of a run, and models from and for Hugging Face."""

from __future__ import annotations

from enum import StrEnum
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


class Precision(StrEnum):
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


@app.command("export")
def export_model(
    run: Annotated[str, typer.Argument(help="A run, one of its checkpoints, or an imported model.", metavar="RUN")],
    to: Annotated[Path, typer.Option(help="The directory to make.")],
    dtype: Annotated[
        Precision | None, typer.Option(help="Precision of the weights; default: as they are kept.")
    ] = None,
    shard_size: Annotated[str, typer.Option(help="Largest weight file, as 5GB or 500MB.")] = "5GB",
    keep_padding: Annotated[
        bool, typer.Option("--keep-padding", help="Keep rows of the vocabulary that the tokenizer does not have.")
    ] = False,
    no_verify: Annotated[
        bool, typer.Option("--no-verify", help="Do not read the weights back nor compare logits with transformers.")
    ] = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Write a model for Hugging Face: weights, config, tokenizer; `from_pretrained` loads it.

    One parameter is in memory at a time and no GPU is needed. Padding of the vocabulary is left out. Before the directory
    takes its name, every tensor is read back, and the logits on random tokens are compared with those of transformers'
    own model (of its first layers, where memory does not hold two whole models).
    """
    import json
    from dataclasses import asdict

    from argosy.checkpoint.hf_export import ExportOptions, export_hf, shard_bytes

    options = ExportOptions(
        dtype=None if dtype is None else dtype.value,
        shard_size=shard_bytes(shard_size),
        verify=not no_verify,
        keep_padding=keep_padding,
    )
    found = export_hf(run, to, options, dry_run=dry_run)
    print(json.dumps(asdict(found)) if as_json else found.describe(done=not dry_run))
