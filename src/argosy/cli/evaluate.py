"""The `argosy eval` command."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from argosy.cli.arguments import MODEL_HELP, Best, alone_or_on_ranks, at_best, layout_keys, split_list
from argosy.errors import ArgosyError

if TYPE_CHECKING:
    from argosy.suites.harness_tasks import TaskScores
    from argosy.supervise.world import World


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
    tasks: Annotated[
        str | None,
        typer.Option(help="Tasks of lm-evaluation-harness to score instead, with commas between: arc_easy,hellaswag."),
    ] = None,
    icl_tasks: Annotated[
        Path | None, typer.Option(help="A tasks.yaml of LLM-Foundry (icl_tasks), to score as --tasks.")
    ] = None,
    task_dir: Annotated[
        Path | None, typer.Option(help="A directory with task files of your own, which need no network.")
    ] = None,
    few_shot: Annotated[
        int | None, typer.Option(min=0, help="Examples before each question; default: as each task says.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Score only the first so many samples of each task.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Texts in a forward pass of --tasks.")] = 8,
    nproc: Annotated[
        int | None,
        typer.Option(min=1, help="Score --tasks with this many ranks on this machine, which share the requests."),
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(
            help="With --nproc, ranks that share the model: keys of `parallel` with commas between, such as tp=2 or pp=2,tp=2."
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Also write the scores of --tasks to this JSON file.")] = None,
    best: Best = False,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: as the run was trained.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compute the loss of a model on a corpus, or its scores on tasks.

    A run's newest checkpoint is used. The loss is over all of the split, and for each source. With --tasks, a decoder is scored by
    lm-evaluation-harness, by one process or by several (--nproc), with the same scores up to rounding.
    """
    import json

    run = at_best(run, best)
    if tasks is not None or icl_tasks is not None:

        def score(world: World | None) -> int:
            from argosy.infer.evaluate_tasks import evaluate_tasks, read_icl_tasks

            shared = layout_keys(layout, world)
            found, step = evaluate_tasks(
                run, split_list(tasks), icl=[] if icl_tasks is None else read_icl_tasks(icl_tasks), directory=task_dir,
                shots=few_shot, limit=limit, batch=batch_size, device=device, layout=shared, world=world,
            )  # fmt: skip
            if world is None or world.rank == 0:
                scores = {"run": run, "step": step, "tasks": {name: one.as_dict() for name, one in found.items()}}
                if output is not None:
                    output.write_text(json.dumps(scores, indent=2) + "\n")
                print(json.dumps(scores) if as_json else _table(run, step, found))
            return 0

        raise typer.Exit(alone_or_on_ranks(score, nproc))
    if nproc is not None or layout is not None:
        raise ArgosyError(
            "config.conflict",
            "several ranks score tasks only; the loss is computed in one process",
            key="--layout" if nproc is None else "--nproc",
            fix="add --tasks, or leave --nproc and --layout out",
        )

    from argosy.infer.evaluate_run import evaluate_run

    result, step = evaluate_run(run, split=split.value, batches=batches, device=device, data=data, seq_len=seq_len)
    facts = {"run": run, "step": step, "split": result.split, "loss": result.loss, "perplexity": result.perplexity}
    facts |= {"tokens": result.tokens, "samples": result.samples}
    facts["metrics"] = result.metrics
    facts["sets"] = {name: {"loss": one.loss, "tokens": one.tokens} for name, one in result.sets.items()}
    if as_json:
        print(json.dumps(facts))
    else:
        print(f"{run} step {step}: {result.describe()} over {result.tokens:,} tokens")


def _table(run: str, step: int, found: Mapping[str, TaskScores]) -> str:
    """Return the scores as a table, one line for each metric."""
    lines = [
        f"{run} step {step}",
        f"{'task':<28} {'metric':<24} {'value':>10} {'stderr':>8} {'samples':>8} {'few-shot':>8}",
    ]
    for name, one in found.items():
        for metric, value in one.metrics.items():
            error = f"{one.errors[metric]:.4f}" if metric in one.errors else ""
            samples, shots = ("" if count is None else f"{count}" for count in (one.samples, one.shots))
            lines.append(f"{name:<28} {metric:<24} {value:>10.4f} {error:>8} {samples:>8} {shots:>8}")
    return "\n".join(lines)
