"""The `argosy config` commands: show, models, clusters, schema, reference, from-megatron, from-foundry."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from argosy.cli.arguments import RUN_HELP, RUN_METAVAR, run_and_overrides

app = typer.Typer(help="Show run specs, models, clusters, the schema; convert others.", no_args_is_help=True)

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("show")
def show(
    arguments: Annotated[list[str] | None, typer.Argument(help=RUN_HELP, metavar=RUN_METAVAR)] = None,
    as_json: Json = False,
) -> None:
    """Print every value of a run spec and where it came from.

    Without a run spec: the defaults.
    """
    from argosy.config import show

    path, overrides = run_and_overrides(arguments)
    print(show.defaults(as_json) if path is None and not overrides else show.resolved(path, overrides, as_json))


@app.command("models")
def models(as_json: Json = False) -> None:
    """List the model presets with their computed sizes.

    Shows layers, hidden size, heads, parameters, and training FLOPs per token.
    """
    from argosy.config import show

    print(show.models(as_json))


@app.command("clusters")
def clusters(as_json: Json = False) -> None:
    """List the node types and GPUs that the planner knows.

    Shows GPUs, their memory, the network, and an estimate of the price.
    """
    from argosy.plan import cluster_list

    print(cluster_list.clusters(as_json))


@app.command("schema")
def schema() -> None:
    """Print the JSON Schema of a run spec, for editors."""
    import json

    from argosy.config.json_schema import published_schema

    print(json.dumps(published_schema(), indent=2))


@app.command("reference")
def reference() -> None:
    """Print every key of a run spec, as a Markdown page."""
    from argosy.config.reference import page

    print(page(), end="")


Output = Annotated[Path | None, typer.Option("-o", "--output", help="Write the run spec here instead of printing it.")]


@app.command("from-megatron", context_settings={"ignore_unknown_options": True})
def from_megatron(
    command: Annotated[
        str,
        typer.Argument(
            help="The arguments of pretrain_gpt.py (or _bert, _t5, _ict), or the whole command, in one pair of quotes."
        ),
    ],
    output: Output = None,
) -> None:
    """Convert Megatron-LM's arguments to a run spec.

    Arguments without a counterpart are listed at its top.
    """
    from argosy.config.foreign.megatron import from_megatron as translate

    _hand_over(translate(command).text("Megatron-LM's arguments"), output)


@app.command("from-foundry")
def from_foundry(
    train_yaml: Annotated[Path, typer.Argument(help="A train.yaml of LLM-Foundry.")], output: Output = None
) -> None:
    """Convert LLM-Foundry's train.yaml to a run spec.

    Settings without a counterpart are listed at its top.
    """
    from argosy.config.foreign.foundry import from_foundry as translate

    _hand_over(translate(train_yaml).text(train_yaml.name), output)


def _hand_over(text: str, output: Path | None) -> None:
    if output is None:
        print(text, end="")
        return
    # Never overwrites an existing file.
    with output.open("x") as file:
        file.write(text)
    print("\n".join(line for line in text.splitlines() if line.startswith("#")))
