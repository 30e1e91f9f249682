"""The `argosy bench` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from argosy.cli.arguments import require_writable
from argosy.errors import ArgosyError


def bench(
    model: Annotated[
        str | None, typer.Argument(help="A preset; `argosy config models` lists them.", metavar="MODEL")
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
    steps: Annotated[int, typer.Option(min=1, help="Steps to time.")] = 10,
    warmup: Annotated[int, typer.Option(min=1, help="Warmup steps before them.")] = 3,
    trace: Annotated[
        Path | None, typer.Option(help="Write the profiled step for Perfetto or chrome://tracing.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
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
    deterministic algorithms by default; set train.deterministic=true.
    """
    import json

    from argosy.config.benchmark import benchmark_spec

    if calibrate:
        _require_alone(model, overrides, batch, micro_batch, seq_len, trace)
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
    spec = benchmark_spec(model, overrides or [], steps=steps, batch=batch, micro_batch=micro_batch, seq_len=seq_len)
    if trace is not None:
        require_writable(trace)
    from argosy.measure.step_bench import bench as run

    result = run(spec, steps=steps, warmup=warmup, trace=trace)
    print(json.dumps(result.as_dict()) if as_json else "\n".join(result.lines()))


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
