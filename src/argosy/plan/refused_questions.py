"""Errors for questions to the planner that have no answer."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from argosy.config.counts import least_state_bytes
from argosy.config.fp8_rules import block_widths, refused_precision, require_fp8_layers
from argosy.errors import ArgosyError
from argosy.plan.hardware import GIB, Cluster
from argosy.plan.layout_rules import violations
from argosy.plan.layouts import Layout, Work
from argosy.plan.search import UNCAPTURABLE, Found

# The share of GPU memory that weights, gradients and optimiser state of a fully sharded model may take.
FOR_STATE = 0.8


def require_precision(work: Work, cluster: Cluster, origin: str | None) -> None:
    """Raise ArgosyError if the GPUs, the widths of the model or the tokens of a batch rule out the precision for every layout.

    `origin` is where the precision was asked for: `--precision`, or the origin of the run spec's.
    """
    if work.precision not in ("bf16", "fp32") and work.precision not in cluster.gpu.dense:
        raise no_such_precision(work.precision, cluster, origin)
    if work.precision != "fp8":
        return
    require_fp8_layers(block_widths(work.model), origin)
    if (unaligned := work.fp8_refusal(Layout(), has_open_micro_batch=True)) is not None:
        raise refused_precision(*unaligned, origin)


def no_such_precision(precision: str, cluster: Cluster, origin: str | None) -> ArgosyError:
    """Return the error for a precision that the cluster's GPUs do not have."""
    return ArgosyError(
        "plan.bad-question",
        f"{cluster.gpu.name} has no {precision} matmuls, only {', '.join(cluster.gpu.dense)}",
        key="--precision" if origin == "--precision" else "train.precision",
        value=precision,
        origin=None if origin == "--precision" else origin,
        fix="use bf16, or GPUs that have it (Hopper, Ada, Blackwell)",
    )


def nothing_found(work: Work, cluster: Cluster, fixed: dict[str, object], found: Found) -> ArgosyError:
    """Return the error for a search that found no layout, with the least memory or the first rule that is broken."""
    if found.nearest is not None:
        need, state = found.nearest.fullest.device, least_state_bytes(work.model, work.rule) / GIB
        least = ceil(state / (FOR_STATE * cluster.gpu.memory))
        more = f"about {least:,} or more such GPUs" if least > cluster.gpus else "more GPUs"
        freer = (
            "parallel.graph=auto, which allows pp, ep, and recompute with dropout; or " if work.captured_only else ""
        )
        return ArgosyError(
            "plan.does-not-fit",
            f"none of {found.considered:,} layouts fits: the least memory is {need:.1f} GiB per GPU ({found.nearest.layout}), "
            f"and {cluster.gpu.name} has {cluster.gpu.memory:g}; weights, gradients and optimiser state are {state:,.0f} GiB in all",
            key="--cluster",
            value=cluster.name,
            fix=f"{freer}use {more}, GPUs with more memory, or shorter sequences",
        )
    why, fix = "they do not divide", "choose a batch that is a multiple of the number of GPUs"
    tried = Layout(**fixed) if fixed else Layout(dp=cluster.gpus)  # type: ignore[arg-type]
    unaligned = work.fp8_refusal(tried, has_open_micro_batch="micro_batch" not in fixed)
    if found.left_out[UNCAPTURABLE]:
        why, fix = "its passes cannot be captured, which parallel.graph=on requires", "parallel.graph=auto"
    elif unaligned is not None:
        why, fix = unaligned
    elif fixed:
        fix = "fix other values, or fewer"
        # An open micro-batch is one that the rules allow.
        tried = replace(tried, micro_batch=fixed.get("micro_batch", work.micro_batch_multiple(tried.cp)))  # type: ignore[arg-type]
        why = next(violations(work, tried, tried.gpus), f"no layout of {cluster.gpus} GPUs has these values")
    return ArgosyError(
        "plan.no-layout",
        f"no layout of {cluster.gpus} GPU{'s' if cluster.gpus > 1 else ''} can run {work.model.preset or work.model.family} with global_batch "
        f"{work.global_batch}: {why}",
        key="--global-batch" if not fixed else "--what-if",
        value=",".join(f"{axis}={value}" for axis, value in fixed.items()) or work.global_batch,
        fix=fix,
    )
