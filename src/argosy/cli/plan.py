"""The `argosy plan` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def plan(
    target: Annotated[
        str, typer.Argument(help="A preset (`argosy config models`), or a run spec.", metavar="MODEL|RUN.yaml")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="Overrides, such as layers=4 for a model or train.global_batch=64 for a run.", metavar="[KEY=VALUE]..."
        ),
    ] = None,
    cluster: Annotated[
        list[str] | None,
        typer.Option(
            help="Nodes and their type (2xp4d.24xlarge), or GPUs (16xH100); `argosy config clusters` lists them. Default: the run "
            "spec's, or 1xH100. If repeated, they are compared."
        ),
    ] = None,
    within: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            help="Find the cheapest cluster that takes at most this many days; a --cluster without a number gets as many nodes as it "
            "needs.",
        ),
    ] = None,
    global_batch: Annotated[int | None, typer.Option(min=1, help="Global batch size: samples in a step.")] = None,
    seq_len: Annotated[int | None, typer.Option(min=1, help="Tokens in a sample; default: the model's.")] = None,
    tokens: Annotated[
        str | None,
        typer.Option(help="Tokens of the whole run, such as 20B; default: the run spec's, or 20 a parameter."),
    ] = None,
    precision: Annotated[str | None, typer.Option(help="bf16, fp16 or fp8.")] = None,
    what_if: Annotated[str | None, typer.Option(help="Only layouts with these values, such as tp=4,pp=2.")] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show every term of the best layout, with its formula.")
    ] = False,
    top: Annotated[int, typer.Option(min=1, help="Layouts to show.")] = 8,
    price: Annotated[
        float | None, typer.Option(min=0, help="US dollars per hour of one node; default: an estimate.")
    ] = None,
    spot: Annotated[
        float | None,
        typer.Option(min=0.01, max=1, help="Price of spot (preemptible) nodes as a share of on-demand, such as 0.4."),
    ] = None,
    storage: Annotated[float, typer.Option(min=0.001, help="Write bandwidth for checkpoints in GB/s.")] = 2.0,
    hardware: Annotated[
        str | None, typer.Option(help="A file of GPUs and instances that overrides the known ones.")
    ] = None,
    calibrated: Annotated[
        str | None, typer.Option("--calibration", help="A file that `argosy bench --calibrate` wrote on your GPU.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Write memory and time of the best layouts as a PNG.")] = None,
    log: Annotated[Path | None, typer.Option(help="A log of Megatron-LM to compare with the plan.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Predict memory, time and cost of a run; find its layout.

    Searches tensor, pipeline, context, expert and data parallelism, sharding, micro-batch and recompute; shows the fastest
    layouts that fit, why the others lost, and warnings. Nothing is run, and no GPU is needed.
    """
    import json

    from argosy.plan.advise import Advice, Question, answer
    from argosy.plan.clusters import compare
    from argosy.plan.figure import write_plot
    from argosy.plan.log import read_log

    measured = None if log is None else read_log(log)

    def ask(where: str | None) -> Advice:
        question = Question.read(
            target, overrides or [], cluster=where,
            global_batch=global_batch or (None if measured is None else measured.global_batch), seq_len=seq_len, tokens=tokens,
            precision=precision, what_if=what_if, price=price, hardware=hardware, spot=spot,
        )  # fmt: skip
        return answer(question, top=top, storage=storage, log=measured, calibrated=calibrated)

    asked = cluster or []
    if len(asked) > 1 or within is not None:
        compared = compare(asked or [ask(None).question.cluster.name], ask, within)
        print(json.dumps(compared.as_dict()) if as_json else "\n".join(compared.lines()))
        return
    advice = ask(asked[0] if asked else None)
    if plot is not None:
        write_plot(advice.shown, plot)
    print(json.dumps(advice.as_dict()) if as_json else "\n".join(advice.lines(explained=explain)))
