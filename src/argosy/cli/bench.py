"""The `argosy bench` command."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from argosy.cli.arguments import require_writable
from argosy.errors import ArgosyError

if TYPE_CHECKING:
    from argosy.config.schema import RunSpec


def bench(
    model: Annotated[
        str | None,
        typer.Argument(help="A preset (`argosy config models` lists them), or a run spec.", metavar="MODEL|RUN.yaml"),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="Keys of a run spec, such as train.precision=fp8 or model.layers=4.", metavar="[KEY=VALUE]..."
        ),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Global batch size in samples; default: 16,384 tokens.")
    ] = None,
    micro_batch: Annotated[
        int | None, typer.Option(min=1, help="Samples in a forward pass; default: all (no gradient accumulation).")
    ] = None,
    seq_len: Annotated[int | None, typer.Option(min=1, help="Tokens in a sample; default: the model's.")] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps to time; default: 10, or 3 with --world-size.")
    ] = None,
    warmup: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Warmup steps before them; default: 3, or 2 with --world-size. A pass that runs as a CUDA graph is captured in the last of them.",
        ),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write the profiled step for Perfetto or chrome://tracing.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    world_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Run ranks of a job of this size, which `parallel` lays out, on this one device: real kernels and memory, and "
            "collectives that move nothing.",
        ),
    ] = None,
    rank: Annotated[
        str,
        typer.Option(
            help="With --world-size: the rank to run, or all-stages for one rank of each pipeline stage in turn.",
            metavar="RANK|all-stages",
        ),
    ] = "0",
    micro_batches: Annotated[
        int | None,
        typer.Option(
            min=1, help="With --world-size: run only so many micro-batches of the step, and scale their time to all."
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            help="With --world-size: the job's cluster, such as 128xp5.48xlarge, for the planner's communication. Default: the "
            "run spec's, or this GPU as many times."
        ),
    ] = None,
    ignore_memory: Annotated[
        bool,
        typer.Option(
            "--ignore-memory",
            help="With --world-size: run even if the planner predicts more memory than the device has.",
        ),
    ] = False,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Instead of a model: measure this GPU for `argosy plan --calibration`.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="With --calibrate: write the file here instead of printing it."),
    ] = None,
) -> None:
    """Time training steps on this device, with synthetic data.

    Prints step time, tokens/s, TFLOP/s with the formula, MFU against a named dense peak, peak memory by category, and the
    floor: the time of the same step's matmuls and attention kernels, measured in the same run. Unlike a run, it does not use
    deterministic algorithms by default; set train.deterministic=true. A run spec is timed as it is, on random tokens.

    With --world-size, the step of single ranks of a large job is run here without the others. Their compute and memory are
    measured; communication is the planner's prediction, and with it the step of the whole job. A rank that would not fit is
    refused before it is built.
    """
    import json

    if world_size is None:
        _require_world_size({
            "--rank": rank != "0", "--micro-batches": micro_batches, "--cluster": cluster, "--ignore-memory": ignore_memory
        })  # fmt: skip
    if calibrate:
        _require_alone(model, overrides, batch, micro_batch, seq_len, trace, world_size)
        _calibrate(output)
        return
    if model is None:
        raise ArgosyError(
            "config.missing-key", "no model is given", key="MODEL", fix="name a preset, or add --calibrate"
        )
    if output is not None:
        raise ArgosyError(
            "config.conflict",
            "-o is for --calibrate only; a benchmark prints its result",
            key="--output",
            value=output,
            fix=f"add --calibrate, or write --json > {output}",
        )
    timed, before = (10, 3) if world_size is None else (3, 2)
    steps, warmup = steps or timed, warmup or before
    sizes = {"train.global_batch": batch, "parallel.micro_batch": micro_batch, "data.seq_len": seq_len}
    if model.endswith((".yaml", ".yml")) or Path(model).is_file():
        given = [*(overrides or []), *(f"{key}={value}" for key, value in sizes.items() if value is not None)]
        spec = _run_spec(Path(model), given, world_size or 1)
    else:
        from argosy.config.benchmark import benchmark_spec

        spec = benchmark_spec(
            model, overrides or [], steps=steps, batch=batch, micro_batch=micro_batch, seq_len=seq_len
        )
    if trace is not None:
        require_writable(trace)
    if world_size is not None:
        from argosy.measure.rehearsed_job import rehearse_job

        job = rehearse_job(
            spec, world_size, rank, steps=steps, warmup=warmup, micro_batches=micro_batches, cluster=cluster,
            ignore_memory=ignore_memory, trace=trace,
        )  # fmt: skip
        print(json.dumps(job.as_dict()) if as_json else "\n".join(job.lines()))
        return
    from argosy.measure.step_bench import bench as run

    result = run(spec, steps=steps, warmup=warmup, trace=trace)
    print(json.dumps(result.as_dict()) if as_json else "\n".join(result.lines()))


def _run_spec(path: Path, overrides: list[str], ranks: int) -> RunSpec:
    """Resolve a run spec as training would, with a layout for `ranks` ranks. Its data need not be on this machine."""
    from argosy.config.resolve import resolve
    from argosy.train.run import settle

    return settle(resolve(path, overrides, elsewhere=True), path, overrides, ranks).spec


def _require_world_size(options: dict[str, object]) -> None:
    for option, value in options.items():
        if value:
            raise ArgosyError(
                "config.conflict",
                f"{option} is for --world-size only: it chooses what is run of a job of many ranks",
                key=option,
                fix="add --world-size N, or remove it",
            )


def _require_alone(model: str | None, *others: object) -> None:
    if model is not None or any(others):
        raise ArgosyError(
            "config.conflict",
            "--calibrate times its own matmuls, and takes no model",
            key="--calibrate",
            fix="remove the model and its options, or --calibrate",
        )


def _calibrate(output: Path | None) -> None:
    if output is not None:
        require_writable(output)
    import torch

    from argosy.measure.calibrate import calibrate

    text = calibrate(torch.device("cuda" if torch.cuda.is_available() else "cpu")).document()
    if output is None:
        print(text, end="")
        return
    output.write_text(text, encoding="utf-8")
    print(f"wrote {output}; use it with `argosy plan … --calibration {output}`, or set ARGOSY_CALIBRATION to its path")
