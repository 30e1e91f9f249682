"""The `argosy sample` command."""

from __future__ import annotations

from typing import Annotated

import typer

from argosy.cli.arguments import MODEL_HELP, Best, at_best


def sample(
    run: Annotated[str, typer.Argument(help=MODEL_HELP, metavar="RUN")],
    prompt: Annotated[
        str,
        typer.Option(help="Text to continue; for BERT with [MASK]s to fill in, for T5 with <extra_id_0> …"),
    ] = "",
    tokens: Annotated[int, typer.Option(min=1, help="Most tokens to generate.")] = 200,
    temperature: Annotated[float, typer.Option(min=0.0, help="Sampling temperature; 0: greedy decoding.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Sample among this many most likely tokens; 0: among all.")] = 50,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same text.")] = 0,
    best: Best = False,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: as the run was trained.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Generate text with a run's newest checkpoint, or another model."""
    import json

    from argosy.infer.generate import sample as write
    from argosy.model.decoding import Sampling

    text = write(at_best(run, best), prompt, Sampling(tokens, temperature, top_k, seed), device)
    print(json.dumps({"text": text}) if as_json else text)
