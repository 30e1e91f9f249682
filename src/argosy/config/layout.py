"""Checks that a parallel layout fits the model, the samples and the world size.

Each refusal has the arithmetic and the nearest sizes that work. Nothing here imports torch, so a wrong layout is refused before
a GPU is allocated.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from argosy.config.origins import Origins
from argosy.config.pipeline import check_pipeline
from argosy.config.schema import ParallelSpec, RunSpec
from argosy.errors import ArgosyError
from argosy.families.architecture import architecture_of
from argosy.tasks.task_registry import task_of

# The mesh axes, ordered from the slowest links to the fastest.
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


def describe_layout(parallel: ParallelSpec) -> str:
    """Name the axes of a layout that are larger than one, for example `dp_shard 4 x tp 2`."""
    sizes = [f"{axis} {getattr(parallel, axis)}" for axis in (*AXES, "ep") if getattr(parallel, axis) > 1]
    return " x ".join(sizes) or "one process"


class _Cut(NamedTuple):
    """A dimension that a mesh axis splits into `times` x (size of the axis) equal parts."""

    axis: str
    whole: int
    what: str
    times: int = 1


def _cuts(spec: RunSpec) -> Iterator[_Cut]:
    model, parallel = spec.model, spec.parallel
    if parallel.tp > 1:
        # Each tensor-parallel shard holds whole heads.
        yield _Cut("tp", model.heads, "the model's heads")
        yield _Cut("tp", model.kv_heads, "the model's key/value heads")
        if model.moe is None or model.moe.dense_layers:
            yield _Cut("tp", model.ffn, "the model's ffn")
        if model.moe is not None:
            yield _Cut("tp", model.moe.ffn, "the experts' ffn")
    if parallel.cp > 1:
        # Each rank gets one chunk from the front and one from the back, which balances the work of causal attention.
        yield _Cut("cp", spec.data.seq_len, "data.seq_len", times=2)
        if parallel.cp_kind == "ulysses":
            each = "" if parallel.tp == 1 else f" on each of tp {parallel.tp} ranks"
            yield _Cut("cp", model.heads // parallel.tp, f"the model's heads{each}")
    if parallel.ep > 1 and model.moe is not None:
        yield _Cut("ep", model.moe.experts, "the model's experts")
        yield _Cut("ep", parallel.dp_shard * parallel.cp, "the dp_shard x cp ranks that hold the experts")


def check_layout(spec: RunSpec, origins: Origins) -> None:
    """Raise an ArgosyError if an axis does not divide the dimensions it splits."""
    model, parallel = spec.model, spec.parallel
    if parallel.cp > 1 and (why := architecture_of(model).uncuttable) is not None:
        cause = f"context parallelism supports decoders only: {why}"
        raise _refusal("cp", parallel.cp, cause, "1, and more dp_shard", origins)
    if parallel.ep > 1 and model.moe is None:
        raise _refusal("ep", parallel.ep, "the model has no experts to spread", 1, origins)
    for cut in _cuts(spec):
        size = getattr(parallel, cut.axis)
        if cut.whole % (cut.times * size):
            parts = f"{cut.times} x {cut.axis} {size} = {cut.times * size}" if cut.times > 1 else f"{cut.axis} {size}"
            cause = f"{cut.what}, {cut.whole}, cannot be cut into {parts} equal parts"
            raise _refusal(cut.axis, size, cause, _nearest(spec, cut.axis), origins)
    if parallel.tp > 1:
        _check_tensor_parallel(spec, origins)
    if max(spec.parallel.pp, spec.parallel.vpp) > 1:
        check_pipeline(spec, origins)
    if parallel.ep > 1 and parallel.compile != "off" and parallel.recompute != "none":
        raise ArgosyError(
            "config.conflict",
            "compile cannot be combined with expert parallelism and recompute: expert row counts are data-dependent, which "
            "breaks the graph of a block",
            key="parallel.recompute",
            value=parallel.recompute,
            origin=origins.get("parallel.recompute"),
            fix="parallel.compile=off, or parallel.recompute=none",
        )
    if parallel.graph == "on" and (found := uncapturable(spec)) is not None:
        raise ArgosyError(
            "config.conflict",
            f"passes cannot be captured as a CUDA graph with parallel.{found.key} {found.value}: {found.why}",
            key="parallel.graph",
            value=parallel.graph,
            origin=origins.get("parallel.graph"),
            fix=f"parallel.graph=auto, or parallel.{found.key}={found.instead}",
        )


class Uncapturable(NamedTuple):
    """A key whose value rules out CUDA graphs, the reason, and the value that does not."""

    key: str
    value: object
    why: str
    instead: object


def uncapturable(spec: RunSpec) -> Uncapturable | None:
    """Return what keeps the passes of a layout from being captured as CUDA graphs; None if nothing in the run spec does."""
    parallel = spec.parallel
    if parallel.compile != "off":
        return Uncapturable("compile", parallel.compile, "a compiled pass launches its kernels itself", "off")
    if parallel.pp > 1:
        return Uncapturable("pp", parallel.pp, "a pipeline's messages are between the passes of its schedule", 1)
    if parallel.ep > 1:
        return Uncapturable("ep", parallel.ep, "the host has to know how many rows each expert gets", 1)
    if parallel.dp_shard > 1 and parallel.dp_replicate > 1:
        why = "with dp_shard, FSDP keeps the gradients of a step's passes until the last of them sums these over the replicas"
        return Uncapturable("dp_replicate", parallel.dp_replicate, why, 1)
    if spec.model.dropout > 0 and parallel.recompute != "none":
        why = "with dropout, a block that is run again needs the random numbers of its first run"
        return Uncapturable("recompute", parallel.recompute, why, "none")
    return None


def _nearest(spec: RunSpec, axis: str) -> str:
    """Return the closest sizes of an axis, below and above, that divide every dimension it splits."""

    def works(size: int) -> bool:
        other = spec.model_copy(update={"parallel": spec.parallel.model_copy(update={axis: size})})
        cuts = [cut for cut in _cuts(other) if cut.axis == axis]
        filled = axis != "tp" or _fills(spec.model.vocab_size, size)
        return filled and all(cut.whole % (cut.times * size) == 0 for cut in cuts)

    size = getattr(spec.parallel, axis)
    most = min(cut.whole // cut.times for cut in _cuts(spec) if cut.axis == axis)
    # Size 1 always works.
    below = next(n for n in range(size - 1, 0, -1) if works(n))
    above = next((n for n in range(size + 1, most + 1) if works(n)), None)
    return str(below) if above is None else f"{below} or {above}"


def _fills(rows: int, ranks: int) -> bool:
    """True if every rank gets at least one row of a vocabulary split into equal parts and a shorter last one."""
    return -(-rows // ranks) * (ranks - 1) < rows


def _check_tensor_parallel(spec: RunSpec, origins: Origins) -> None:
    """Raise if a tensor-parallel rank has no vocabulary rows or, with sp, a smaller share of a sequence than the others."""
    tp, rows = spec.parallel.tp, spec.model.vocab_size
    if not _fills(rows, tp):
        cause = f"a vocabulary of {rows} in parts of {-(-rows // tp)} leaves no rows for the last of tp {tp} ranks"
        raise _refusal("tp", tp, cause, _nearest(spec, "tp"), origins)
    check_shares(spec.parallel, spec.data.seq_len, "data.seq_len", origins)
    for key, length in task_of(spec).other_lengths(spec).items():
        if length is not None:
            check_shares(spec.parallel, length, key, origins)


def check_shares(parallel: ParallelSpec, seq_len: int, what: str, origins: Origins | None = None) -> None:
    """Raise if sequence parallelism cannot split `seq_len` tokens into equal shares.

    With context parallelism a rank has two chunks of the sequence, and tensor parallelism splits both.
    """
    tp, cp = parallel.tp, parallel.cp
    parts = tp if cp == 1 else 2 * cp * tp
    if not parallel.sp or tp == 1 or seq_len % parts == 0:
        return
    ranks = f"tp {tp}" if cp == 1 else f"2 x cp {cp} x tp {tp} = {parts}"
    raise ArgosyError(
        "config.arithmetic",
        f"{what}, {seq_len}, cannot be cut into {ranks} equal shares of tokens",
        key="parallel.sp",
        value=True,
        origin=(origins or {}).get("parallel.sp"),
        fix=f"parallel.sp=false, or a length of {seq_len // parts * parts or parts}",
    )


def _refusal(axis: str, size: int, cause: str, near: object, origins: Origins) -> ArgosyError:
    key = f"parallel.{axis}"
    return ArgosyError(
        "config.arithmetic", cause, key=key, value=size, origin=origins.get(key), fix=f"use {key} {near}"
    )


def check_world(
    parallel: ParallelSpec, ranks: int, source: str, batch: int | None = None, per_node: int | None = None
) -> None:
    """Raise if the number of processes is not the world size of the layout.

    Args:
        ranks: number of processes.
        source: where `ranks` comes from, for the message.
        batch: the global batch, so that the suggested layout divides it.
        per_node: ranks on a node, if the processes are started by a launch and their number is that of its nodes.
    """
    if ranks == parallel.world_size:
        return
    numbers = " x ".join(str(getattr(parallel, axis)) for axis in AXES)
    raise ArgosyError(
        "launch.world-size",
        f"the layout {describe_layout(parallel)} needs {' x '.join(AXES)} = {numbers} = {parallel.world_size} "
        f"process{'es' if parallel.world_size > 1 else ''}, and there {'is' if ranks == 1 else 'are'} {ranks} ({source})",
        key="parallel",
        value=describe_layout(parallel),
        fix=f"{_other_number(parallel.world_size, per_node)}; {_other_layout(parallel, ranks, batch)}",
    )


# Ranks that one machine may have; more come from several.
_MOST_ON_A_MACHINE = 16


def _other_number(world: int, per_node: int | None) -> str:
    """Suggest how to start the number of processes that the layout needs."""
    if per_node is None:
        one_machine = f"argosy train RUN.yaml --nproc {world}"
        return f"start {world} processes: {one_machine if world <= _MOST_ON_A_MACHINE else 'argosy launch RUN.yaml'}"
    if world % per_node:
        return f"{world} processes are no whole number of nodes of {per_node} ranks"
    return f"cluster.nodes={world // per_node}, of {per_node} ranks each"


def _other_layout(parallel: ParallelSpec, ranks: int, batch: int | None) -> str:
    """Suggest a layout for `ranks` processes, or a nearby number, that differs in data-parallel ranks only."""
    inner = parallel.pp * parallel.cp * parallel.tp
    if ranks % inner:
        fewer, more = ranks // inner * inner, (ranks // inner + 1) * inner
        near = f"{fewer} or {more}" if fewer else str(more)
        return f"pp x cp x tp = {inner} fits {near} processes with another number of data-parallel ranks"
    data, keys = ranks // inner, ""
    if batch is not None and batch % (parallel.micro_batch * data):
        micro = next((n for n in range(parallel.micro_batch, 0, -1) if batch % (n * data) == 0), None)
        if micro is None:
            return (
                f"for {ranks} there would be {data} data-parallel ranks, which do not divide train.global_batch {batch}"
            )
        keys = f" parallel.micro_batch={micro}"
    if data % parallel.dp_replicate == 0 and parallel.dp_replicate > 1:
        return f"or for {ranks}: parallel.dp_shard={data // parallel.dp_replicate}{keys}"
    replicas = " parallel.dp_replicate=1" if parallel.dp_replicate > 1 else ""
    return f"or for {ranks}: parallel.dp_shard={data}{replicas}{keys}"
