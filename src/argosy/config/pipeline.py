"""Checks of pipeline parallelism: stages against layers, the schedule against the micro-batches of a step; the pipeline bubble."""

from __future__ import annotations

from argosy.config.origins import Origins
from argosy.config.schema import RunSpec
from argosy.config.stage_layers import SEVERAL_STAGES, V_SHAPED, bubble, count_layers
from argosy.errors import ArgosyError

# The share of a step a rank is idle (the pipeline bubble) above which a run warns.
WORTH_A_WARNING = 0.2


def check_pipeline(spec: RunSpec, origins: Origins) -> None:
    """Raise an ArgosyError if the pipeline, whose pp or vpp is not 1, cannot run with these layers, this schedule or this batch."""
    parallel = spec.parallel
    if parallel.pp == 1:
        cause = "virtual pipeline stages need pipeline parallelism, and parallel.pp is 1"
        raise _refusal("vpp", parallel.vpp, cause, "parallel.vpp=1", origins)
    _check_stages(spec, origins)
    _check_compile(spec, origins)
    for size in spec.train.batches.sizes:
        check_micro_batches(spec, size, origins)


def describe_bubble(spec: RunSpec) -> tuple[str, bool]:
    """Return a description of the pipeline bubble with its arithmetic, and whether it is large enough to warn about."""
    parallel = spec.parallel
    micros = micro_batches(spec, spec.train.global_batch)
    share, arithmetic = bubble(parallel, micros)
    text = (
        f"pipeline: {parallel.pp} ranks, {micros} micro-batch{'es' if micros > 1 else ''} a step, {parallel.schedule}: bubble "
        f"{share:.0%} of the step = {arithmetic}"
    )
    if share <= WORTH_A_WARNING:
        return text, False
    more = next(n for n in range(micros, 1 << 20) if bubble(parallel, n)[0] <= WORTH_A_WARNING / 2)
    return (
        f"{text}; {more} micro-batches would make it {bubble(parallel, more)[0]:.0%}: a larger train.global_batch, a smaller "
        f"parallel.micro_batch, or fewer pipeline ranks",
        True,
    )


def micro_batches(spec: RunSpec, batch: int) -> int:
    """Number of micro-batches that pass through one pipeline in a step of `batch` samples (gradient accumulation steps)."""
    return batch // (spec.parallel.micro_batch * spec.parallel.data_parallel)


def can_interleave(micros: int, pp: int) -> bool:
    """Return whether interleaved-1f1b can run `micros` micro-batches on `pp` ranks: in equal rounds of `pp` or more, or in one round."""
    return micros % max(1, micros // pp) == 0


def _check_stages(spec: RunSpec, origins: Origins) -> None:
    parallel, layers = spec.parallel, count_layers(spec.model)
    if spec.model.retrieval is not None:
        cause = "a two-tower model cannot be split into pipeline stages"
        raise _refusal("pp", parallel.pp, cause, "parallel.pp=1", origins)
    if parallel.schedule in SEVERAL_STAGES and parallel.vpp == 1:
        why = f"{parallel.schedule} needs {'two' if parallel.schedule in V_SHAPED else 'several'} stages on each rank"
        raise _refusal("vpp", 1, why, "parallel.vpp=2, or schedule=1f1b", origins)
    if parallel.schedule in V_SHAPED and parallel.vpp != 2:
        why = f"{parallel.schedule} has two stages on each rank, one on the way down the ranks and one on the way up"
        raise _refusal("vpp", parallel.vpp, why, "parallel.vpp=2, or schedule=interleaved-1f1b", origins)
    if parallel.schedule not in SEVERAL_STAGES and parallel.vpp > 1:
        why = f"{parallel.schedule} has one stage on each rank"
        raise _refusal("vpp", parallel.vpp, why, "schedule=interleaved-1f1b, or parallel.vpp=1", origins)
    stages = parallel.pp * parallel.vpp
    if stages > layers:
        cause = f"{layers} layers cannot fill {stages} pipeline stages"
        if parallel.vpp > 1:
            cause += f" = pp {parallel.pp} x vpp {parallel.vpp}"
        most = layers // parallel.vpp
        raise _refusal("pp", parallel.pp, cause, f"use parallel.pp {most}" if most else "use fewer stages", origins)


def check_micro_batches(spec: RunSpec, batch: int, origins: Origins) -> None:
    """Raise an ArgosyError if the schedule cannot run the micro-batches of a step of `batch` samples."""
    parallel, micros = spec.parallel, micro_batches(spec, batch)
    made = (
        f"a step of {batch} samples is {micros} micro-batches of {parallel.micro_batch} on each of "
        f"{parallel.data_parallel} data-parallel ranks"
    )
    if parallel.schedule == "dualpipev" and micros < 2 * parallel.pp:
        cause = f"{made}, and dualpipev needs 2 x pp {parallel.pp} = {2 * parallel.pp} at least"
        raise _refusal("schedule", "dualpipev", cause, "more micro-batches, or schedule=zbv", origins)
    rounds = max(1, micros // parallel.pp)
    if parallel.schedule == "interleaved-1f1b" and not can_interleave(micros, parallel.pp):
        near = [n for n in range(1, 2 * micros) if can_interleave(n, parallel.pp)]
        below, above = max(n for n in near if n < micros), min(n for n in near if n > micros)
        cause = (
            f"{made}, which cannot be split into {rounds} equal rounds of pp {parallel.pp} or more micro-batches: "
            f"{micros} = {rounds} x {micros // rounds} + {micros % rounds}"
        )
        raise _refusal(
            "schedule", parallel.schedule, cause, f"{below} or {above} micro-batches, or schedule=1f1b", origins
        )


def _check_compile(spec: RunSpec, origins: Origins) -> None:
    parallel = spec.parallel
    if parallel.compile == "model":
        raise _refusal("compile", "model", "no pipeline rank holds the whole model", "compile=block", origins)
    if parallel.compile == "block" and parallel.schedule in V_SHAPED:
        cause = (
            f"{parallel.schedule} computes weight gradients separately from input gradients, and a compiled block computes both "
            "at once"
        )
        raise _refusal("compile", "block", cause, "compile=off, or schedule=1f1b", origins)


def _refusal(key: str, value: object, cause: str, fix: str, origins: Origins) -> ArgosyError:
    key = f"parallel.{key}"
    return ArgosyError("config.arithmetic", cause, key=key, value=value, origin=origins.get(key), fix=fix)
