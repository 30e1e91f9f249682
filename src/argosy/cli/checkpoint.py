"""The `argosy ckpt` commands: checkpoints of a run, and import and export of models."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from argosy.cli.arguments import Best, at_best, new_output
from argosy.cli.watch import NAMESPACE

app = typer.Typer(help="List, verify and compare checkpoints; import and export models.", no_args_is_help=True)
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check everything, say what would be done, write nothing.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("ls")
def list_checkpoints(
    run: Annotated[
        str,
        typer.Argument(
            help="A run (runs/<name>) or an imported model; or the run spec, or with -n the name, of a run in a cluster.",
            metavar="RUN",
        ),
    ],
    check: Annotated[
        bool,
        typer.Option(
            "--check/--no-check", help="Read every file and compare its hash with the manifest; not in a cluster."
        ),
    ] = True,
    as_json: Json = False,
    namespace: NAMESPACE = None,
) -> None:
    """List the checkpoints of a run.

    Shows step, age, size, tokens, losses, layout, whether the hashes match, which one `train` would resume from, and which has
    the lowest validation loss.
    """
    import json

    from argosy.checkpoint.listing import describe, list_run
    from argosy.launch.run_directory import in_cluster, run_directory

    with run_directory(run, namespace) as directory:
        found = list_run(directory, check=check and not in_cluster(run, namespace))
        print(json.dumps([one.as_dict() for one in found], indent=2) if as_json else describe(directory, found))


@app.command("verify")
def verify_checkpoints(
    run: Annotated[Path, typer.Argument(help="A run, one of its checkpoints, or an imported model.", metavar="RUN")],
    as_json: Json = False,
) -> None:
    """Check every file of every checkpoint against its hash.

    Every tensor has to be complete. The exit code is 2 if a checkpoint is damaged.
    """
    import json

    from argosy.checkpoint.listing import describe, list_run
    from argosy.errors import EXIT_REFUSED

    found = list_run(run)
    print(json.dumps([one.as_dict() for one in found], indent=2) if as_json else describe(run, found))
    if not found or not all(one.good for one in found):
        raise typer.Exit(EXIT_REFUSED)


@app.command("prune")
def prune_checkpoints(
    run: Annotated[Path, typer.Argument(help="A run (runs/<name>).", metavar="RUN")],
    keep: Annotated[int, typer.Option(min=1, help="Number of newest good checkpoints to keep.")] = 1,
    keep_every: Annotated[
        int | None, typer.Option(min=1, help="Also keep checkpoints whose step is a multiple of this.")
    ] = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Remove all but the newest checkpoints.

    The newest good one always stays, and so do all newer ones and, if the run has `checkpoint.best`, the best.
    """
    import json
    from dataclasses import asdict

    from argosy.checkpoint.pruning import prune_run

    found = prune_run(run, keep=keep, keep_every=keep_every, dry_run=dry_run)
    print(json.dumps(asdict(found)) if as_json else found.describe(done=not dry_run))


@app.command("diff")
def compare_checkpoints(
    first: Annotated[str, typer.Argument(help="A run, checkpoint, imported model, or hf:DIR.")],
    second: Annotated[str, typer.Argument(help="Another.")],
    optimizer: Annotated[bool, typer.Option("--optimizer", help="Compare the optimiser state too.")] = False,
    top: Annotated[int, typer.Option(min=1, help="Tensors to show, the most changed first.")] = 20,
    as_json: Json = False,
) -> None:
    """Compare the tensors of two models.

    Shows which changed, and by how much. The models may have been saved with different layouts.
    """
    import json

    from argosy.checkpoint.difference import compare

    found = compare(first, second, optimizer=optimizer)
    print(json.dumps(found.as_dict()) if as_json else found.describe(top))


@app.command("average")
def average_checkpoints(
    checkpoints: Annotated[list[str], typer.Argument(help="Checkpoints of one model; or one run, with --last.")],
    to: Annotated[Path, typer.Option(callback=new_output, help="The directory to make.")],
    last: Annotated[int | None, typer.Option(min=2, help="Average the last N checkpoints of a run.")] = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Average the weights of several checkpoints to one model."""
    import json
    from dataclasses import asdict

    from argosy.checkpoint.average import average

    found = average(checkpoints, to, last=last, dry_run=dry_run)
    print(json.dumps(asdict(found)) if as_json else found.describe(done=not dry_run))


@app.command("import")
def import_model(
    source: Annotated[
        str,
        typer.Argument(
            help="hf:DIR, with config.json and *.safetensors; or megatron:DIR, the directory of Megatron-LM's --save.",
        ),
    ],
    to: Annotated[Path, typer.Option(callback=new_output, help="The directory to make.")],
    changes: Annotated[
        list[str] | None,
        typer.Argument(help="megatron: keys of the model, such as vocab_size=50257.", metavar="[KEY=VALUE]..."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="megatron: a preset for the model, instead of the arguments in the checkpoint.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="megatron: the tokenizer to store with the weights; tells padding rows apart.")
    ] = None,
    masters: Annotated[
        bool,
        typer.Option(
            "--masters/--no-masters", help="megatron: use the optimiser's fp32 master weights, if it has any."
        ),
    ] = True,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Import a model from Hugging Face or Megatron-LM.

    It can then be sampled, evaluated, or started from (`init_from:`).

    Hugging Face: gpt2, llama, mistral, qwen3, mpt, mixtral, qwen3_moe, bert and t5, in safetensors. A run can also start
    from hf:DIR directly. Megatron-LM: GPT models, dense or MoE, in the format torch_dist, saved with any layout. Its pickles
    are parsed as data and never executed.

    The weights keep their precision; one parameter is in memory at a time. A setting that Argosy does not support is refused
    by name.
    """
    import json
    from dataclasses import asdict

    from argosy.checkpoint.import_model import import_model

    found = import_model(
        source, to, model=model, changes=changes or (), tokenizer=tokenizer, masters=masters, dry_run=dry_run
    )
    print(json.dumps(asdict(found)) if as_json else found.describe(done=not dry_run))


class Precision(StrEnum):
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


@app.command("export")
def export_model(
    run: Annotated[str, typer.Argument(help="A run, one of its checkpoints, or an imported model.", metavar="RUN")],
    to: Annotated[Path, typer.Option(callback=new_output, help="The directory to make.")],
    best: Best = False,
    dtype: Annotated[
        Precision | None, typer.Option(help="Precision of the weights; default: as they are kept.")
    ] = None,
    shard_size: Annotated[str, typer.Option(help="Largest weight file, such as 5GB or 500MB.")] = "5GB",
    keep_padding: Annotated[
        bool, typer.Option("--keep-padding", help="Keep vocabulary rows that the tokenizer does not have.")
    ] = False,
    no_verify: Annotated[
        bool, typer.Option("--no-verify", help="Do not read the weights back or compare logits with transformers.")
    ] = False,
    adapter: Annotated[
        bool,
        typer.Option("--adapter", help="Only the adapters of a LoRA run, for PEFT; default: merged into the model."),
    ] = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Export a model to Hugging Face format.

    The directory has weights, config and tokenizer, and `from_pretrained` loads it.

    One parameter is in memory at a time and no GPU is needed. Padding rows of the vocabulary are dropped. Before the directory
    gets its name, every tensor is read back, and the logits on random tokens are compared with those of transformers' own
    model (of fewer layers and tokens, if the model is larger than two weight files).
    """
    import json
    from dataclasses import asdict

    from argosy.checkpoint.hf.hf_adapter import export_adapter
    from argosy.checkpoint.hf.hf_export import ExportOptions, export_hf, shard_bytes

    if adapter:
        found = export_adapter(at_best(run, best), to, dry_run=dry_run)
        print(json.dumps(asdict(found)) if as_json else found.describe(done=not dry_run))
        return
    options = ExportOptions(
        dtype=None if dtype is None else dtype.value,
        shard_size=shard_bytes(shard_size),
        verify=not no_verify,
        keep_padding=keep_padding,
    )
    found = export_hf(at_best(run, best), to, options, dry_run=dry_run)
    print(json.dumps(asdict(found)) if as_json else found.describe(done=not dry_run))


@app.command("push")
def push_model(
    directory: Annotated[Path, typer.Argument(help="A directory that `argosy ckpt export` made.", metavar="DIR")],
    repo: Annotated[str, typer.Argument(help="The repository on the Hub, OWNER/NAME.", metavar="REPO")],
    private: Annotated[bool, typer.Option("--private/--public", help="Who sees a new repository.")] = True,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Upload an exported model to the Hugging Face Hub.

    Needs huggingface_hub and its token: HF_TOKEN, or `hf auth login`. A new repository is private unless --public is given.
    """
    import json
    from dataclasses import asdict

    from argosy.checkpoint.hf.hf_push import push_model

    found = push_model(directory, repo, private=private, dry_run=dry_run)
    print(json.dumps(asdict(found)) if as_json else found.describe())
