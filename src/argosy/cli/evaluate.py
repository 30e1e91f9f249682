"""The `argosy eval` command."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from argosy.cli.arguments import MODEL_HELP, Best, at_best


class SplitName(StrEnum):
    train = "train"
    validation = "validation"
    test = "test"


def evaluate(
    run: Annotated[str, typer.Argument(help=MODEL_HELP, metavar="RUN")],
    split: Annotated[SplitName, typer.Option(help="Which split of the run's data.")] = SplitName.validation,
    data: Annotated[
        str | None, typer.Option(help="A corpus to use whole instead of the run's; needed for an imported model.")
    ] = None,
    seq_len: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens in a sample of --data; default: the run's data.seq_len, or for an imported model its max_seq_len, at "
            "most 4096.",
        ),
    ] = None,
    batches: Annotated[int | None, typer.Option(min=1, help="Global batches; default: the whole split.")] = None,
    best: Best = False,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: as the run was trained.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compute the loss of a model on a split of its data, or a corpus.

    A run's newest checkpoint is used. The loss is over all of the split, and for each source.
    """
    import json

    from argosy.infer.evaluate_run import evaluate_run

    run = at_best(run, best)
    result, step = evaluate_run(run, split=split.value, batches=batches, device=device, data=data, seq_len=seq_len)
    facts = {"run": run, "step": step, "split": result.split, "loss": result.loss, "perplexity": result.perplexity}
    facts |= {"tokens": result.tokens, "samples": result.samples}
    facts["metrics"] = result.metrics
    facts["sets"] = {name: {"loss": one.loss, "tokens": one.tokens} for name, one in result.sets.items()}
    if as_json:
        print(json.dumps(facts))
    else:
        print(f"{run} step {step}: {result.describe()} over {result.tokens:,} tokens")
