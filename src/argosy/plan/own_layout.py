"""The layout that a run spec itself has, as the run will have it: with the micro-batch that the run takes, or why it is refused."""

from __future__ import annotations

from argosy.config.checks import check
from argosy.config.default_micro_batch import default_micro_batch, is_micro_batch_open, with_micro_batch
from argosy.config.origins import Origins
from argosy.config.resolve import Resolved
from argosy.config.schema import ParallelSpec, RunSpec
from argosy.errors import ArgosyError
from argosy.plan.calibration import Calibration, Stack
from argosy.plan.hardware import Cluster
from argosy.plan.layouts import Layout, Work
from argosy.plan.search import Candidate, evaluate, micro_batches


def layout_of(parallel: ParallelSpec) -> Layout:
    """Return the layout of a run spec as the planner describes it."""
    zero = 3 if parallel.dp_shard > 1 else 0
    return Layout(
        tp=parallel.tp, pp=parallel.pp, vpp=parallel.vpp, cp=parallel.cp, ep=parallel.ep, dp=parallel.data_parallel, zero=zero,
        copies=parallel.dp_replicate if zero else 1,
        sp=parallel.tp > 1 and parallel.sp, micro_batch=parallel.micro_batch, recompute=parallel.recompute,
        schedule=None if parallel.pp == 1 else parallel.schedule,
    )  # fmt: skip


def own_run(own: Resolved, global_batch: int | None, seq_len: int | None, precision: str | None) -> Resolved:
    """Return a run with another batch, samples or precision, and with the default micro-batch for them if its own is open."""
    spec = own.spec
    train = {
        key: value for key, value in (("global_batch", global_batch), ("precision", precision)) if value is not None
    }
    data = {} if seq_len is None else {"seq_len": seq_len}
    spec = spec.model_copy(
        update={"train": spec.train.model_copy(update=train), "data": spec.data.model_copy(update=data)}
    )
    is_open = is_micro_batch_open(own.origins)
    return Resolved(with_micro_batch(spec, default_micro_batch(spec)) if is_open else spec, own.origins)


def own_candidate(
    own: Resolved, work: Work, cluster: Cluster, stack: Stack, known: Calibration, *, leaves_micro_batch: bool
) -> tuple[Candidate | None, str | None]:
    """Return the layout of a run with the micro-batch that the run takes; or None, and why the run is refused.

    Args:
        leaves_micro_batch: the run leaves its micro-batch to the planner.
    """
    layout = layout_of(own.spec.parallel)
    # As `settle_micro_batch` does: the first that the checks of the run accept, or the size that the run was resolved with.
    for candidate in micro_batches(work, layout, cluster, stack, known) if leaves_micro_batch else ():
        if refusal_of(with_micro_batch(own.spec, candidate.layout.micro_batch), own.origins) is None:
            return candidate, None
    refusal = refusal_of(own.spec, own.origins)
    return (evaluate(work, layout, cluster, stack, known), None) if refusal is None else (None, refusal)


def refusal_of(spec: RunSpec, origins: Origins) -> str | None:
    """Return why a run is refused, or None."""
    try:
        check(spec, origins)
    except ArgosyError as error:
        return error.cause
    return None
