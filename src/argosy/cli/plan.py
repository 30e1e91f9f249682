"""The `argosy plan` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from argosy.errors import ArgosyError


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
    measured: Annotated[
        Path | None,
        typer.Option(
            help="What `argosy bench RUN.yaml --world-size N --json` wrote: also plan the run spec's own layout with this compute and "
            "memory, and the planner's communication."
        ),
    ] = None,
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

    logged = None if log is None else read_log(log)

    def ask(where: str | None) -> Advice:
        question = Question.read(
            target, overrides or [], cluster=where,
            global_batch=global_batch or (None if logged is None else logged.global_batch), seq_len=seq_len, tokens=tokens,
            precision=precision, what_if=what_if, price=price, hardware=hardware, spot=spot,
        )  # fmt: skip
        return answer(question, top=top, storage=storage, log=logged, calibrated=calibrated)

    asked = cluster or []
    if len(asked) > 1 or within is not None:
        if measured is not None:
            raise ArgosyError(
                "config.conflict",
                "--measured plans a layout that was measured, on one cluster of its size",
                key="--measured",
                value=measured,
                fix="one --cluster and no --within, or no --measured",
            )
        compared = compare(asked or [ask(None).question.cluster.name], ask, within)
        print(json.dumps(compared.as_dict()) if as_json else "\n".join(compared.lines()))
        return
    advice = ask(asked[0] if asked else None)
    if plot is not None:
        write_plot(advice.shown, plot)
    answered, lines = advice.as_dict() if as_json else {}, [] if as_json else advice.lines(explained=explain)
    if measured is not None:
        from argosy.config.default_micro_batch import is_micro_batch_open
        from argosy.config.resolve import resolve
        from argosy.plan.measured_plan import read_measured

        if not Path(target).is_file():
            raise ArgosyError(
                "config.conflict",
                "--measured needs the run spec whose rank was measured",
                key="--measured",
                value=measured,
                fix=f"RUN.yaml in place of {target}",
            )
        found = resolve(Path(target), overrides or [], elsewhere=True)
        is_open = is_micro_batch_open(found.origins)
        own = read_measured(measured, found.spec, advice.question.cluster, has_open_micro_batch=is_open)
        answered["measured"] = own.as_dict()
        lines += ["", *own.lines()]
    print(json.dumps(answered) if as_json else "\n".join(lines))
