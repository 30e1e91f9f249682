"""argosy config show | models | schema | reference"""

from __future__ import annotations

from typing import Annotated

import typer

from argosy.cli.arguments import RUN_HELP, RUN_METAVAR, run_and_overrides

app = typer.Typer(
    help="The run spec: resolved values and their origins, model presets, JSON Schema.", no_args_is_help=True
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("show")
def show(
    arguments: Annotated[list[str] | None, typer.Argument(help=RUN_HELP, metavar=RUN_METAVAR)] = None,
    as_json: Json = False,
) -> None:
    """Every resolved value of a run spec and where it came from. Without a run spec: the defaults."""
    from argosy.config import show

    path, overrides = run_and_overrides(arguments)
    print(show.defaults(as_json) if path is None and not overrides else show.resolved(path, overrides, as_json))


@app.command("models")
def models(as_json: Json = False) -> None:
    """The model presets with their true sizes: layers, hidden, heads, parameters, training FLOPs a token."""
    from argosy.config import show

    print(show.models(as_json))


@app.command("schema")
def schema() -> None:
    """The JSON Schema of a run spec, for editors."""
    import json

    from argosy.config.schema import published_schema

    print(json.dumps(published_schema(), indent=2))


@app.command("reference")
def reference() -> None:
    """Every key of a run spec, as a Markdown page."""
    from argosy.config.reference import page

    print(page(), end="")
