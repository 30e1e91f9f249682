"""Whether a layout fits the model, the samples and the processes there are: each refusal has the arithmetic and the nearest
sizes that work. Needs no torch, so that a wrong layout is refused before a device is held."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from argosy.config.pipeline import check_pipeline
from argosy.config.schema import ParallelSpec, RunSpec
from argosy.errors import ArgosyError
from argosy.families.architecture import architecture_of
from argosy.tasks.registry import task_of

Origins = dict[str, str]
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")  # from the slowest links to the fastest


def describe_layout(parallel: ParallelSpec) -> str:
    """Its axes that are larger than one."""
    sizes = [f"{axis} {getattr(parallel, axis)}" for axis in (*AXES, "ep") if getattr(parallel, axis) > 1]
    return " x ".join(sizes) or "one process"


class _Cut(NamedTuple):
    """Something an axis cuts into equal parts."""

    axis: str
    whole: int
    what: str
    times: int = 1  # as many parts as ranks, or twice as many


def _cuts(spec: RunSpec) -> Iterator[_Cut]:
    model, parallel = spec.model, spec.parallel
    if parallel.tp > 1:  # every matrix, each part with whole heads
        yield _Cut("tp", model.heads, "the model's heads")
        yield _Cut("tp", model.kv_heads, "the model's key/value heads")
        if model.moe is None or model.moe.dense_layers:
            yield _Cut("tp", model.ffn, "the model's ffn")
        if model.moe is not None:
            yield _Cut("tp", model.moe.ffn, "the experts' ffn")
    if parallel.cp > 1:
        # Each rank gets one piece from the front and one from the back, which levels causal attention.
        yield _Cut("cp", spec.data.seq_len, "data.seq_len", times=2)
        if parallel.cp_kind == "ulysses":
            each = "" if parallel.tp == 1 else f" on each of tp {parallel.tp} ranks"
            yield _Cut("cp", model.heads // parallel.tp, f"the model's heads{each}")
    if parallel.ep > 1 and model.moe is not None:
        yield _Cut("ep", model.moe.experts, "the model's experts")
        yield _Cut("ep", parallel.dp_shard * parallel.cp, "the dp_shard x cp ranks it is laid over")


def check_layout(spec: RunSpec, origins: Origins) -> None:
    """Each axis against what it cuts."""
    model, parallel = spec.model, spec.parallel
    if parallel.cp > 1 and (why := architecture_of(model).uncuttable) is not None:
        cause = f"context parallelism cuts the sequences of decoders only: {why}"
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
        _check_shares_of_tensors(spec, origins)
    check_pipeline(spec, origins)
    if parallel.ep > 1 and parallel.compile != "off" and parallel.recompute != "none":
        raise ArgosyError(
            "config.conflict",
            "how many rows an expert gets is known only while it runs, so that a block with experts elsewhere is not compiled "
            "as one: torch cannot then recompute it",
            key="parallel.recompute",
            value=parallel.recompute,
            origin=origins.get("parallel.recompute"),
            fix="parallel.compile=off, or parallel.recompute=none",
        )


def _nearest(spec: RunSpec, axis: str) -> str:
    """The closest sizes of an axis, below and above, with which it divides all that it cuts."""

    def works(size: int) -> bool:
        other = spec.model_copy(update={"parallel": spec.parallel.model_copy(update={axis: size})})
        cuts = [cut for cut in _cuts(other) if cut.axis == axis]
        filled = axis != "tp" or _fills(spec.model.vocab_size, size)
        return filled and all(cut.whole % (cut.times * size) == 0 for cut in cuts)

    size = getattr(spec.parallel, axis)
    most = min(cut.whole // cut.times for cut in _cuts(spec) if cut.axis == axis)
    below = next(n for n in range(size - 1, 0, -1) if works(n))  # one rank cuts nothing
    above = next((n for n in range(size + 1, most + 1) if works(n)), None)
    return str(below) if above is None else f"{below} or {above}"


def _fills(rows: int, ranks: int) -> bool:
    """Whether a vocabulary in parts of one size, the last of what is left, leaves something for every rank."""
    return -(-rows // ranks) * (ranks - 1) < rows


def _check_shares_of_tensors(spec: RunSpec, origins: Origins) -> None:
    """The vocabulary in parts of which none is empty; and, with sp, equal shares of every sequence."""
    tp, rows = spec.parallel.tp, spec.model.vocab_size
    if not _fills(rows, tp):
        cause = f"a vocabulary of {rows} in parts of {-(-rows // tp)} leaves nothing for the last of tp {tp} ranks"
        raise _refusal("tp", tp, cause, _nearest(spec, "tp"), origins)
    check_shares(spec.parallel, spec.data.seq_len, "data.seq_len", origins)
    for key, length in task_of(spec).other_lengths(spec).items():
        if length is not None:
            check_shares(spec.parallel, length, key, origins)


def check_shares(parallel: ParallelSpec, seq_len: int, what: str, origins: Origins | None = None) -> None:
    """Whether each tensor-parallel rank can have an equal share of a sequence's tokens."""
    tp, cp = parallel.tp, parallel.cp
    parts = tp if cp == 1 else 2 * cp * tp  # of a rank's piece from the front, and of that from the back
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


def check_world(parallel: ParallelSpec, ranks: int, source: str, batch: int | None = None) -> None:
    """The processes there are against those the layout needs; `batch` is the global one, which another layout has to share."""
    if ranks == parallel.world_size:
        return
    numbers = " x ".join(str(getattr(parallel, axis)) for axis in AXES)
    raise ArgosyError(
        "launch.world-size",
        f"the layout {describe_layout(parallel)} needs {' x '.join(AXES)} = {numbers} = {parallel.world_size} "
        f"process{'es' if parallel.world_size > 1 else ''}, and there {'is' if ranks == 1 else 'are'} {ranks} ({source})",
        key="parallel",
        value=describe_layout(parallel),
        fix=f"start {parallel.world_size} processes: argosy train RUN.yaml --nproc {parallel.world_size}; "
        + _other_layout(parallel, ranks, batch),
    )


def _other_layout(parallel: ParallelSpec, ranks: int, batch: int | None) -> str:
    """With another number of data-parallel ranks, for as many processes as there are, or nearly."""
    inner = parallel.pp * parallel.cp * parallel.tp
    if ranks % inner:
        fewer, more = ranks // inner * inner, (ranks // inner + 1) * inner
        near = f"{fewer} or {more}" if fewer else str(more)
        return f"pp x cp x tp = {inner} fits {near} processes with another number of data-parallel ranks"
    data, keys = ranks // inner, ""
    if batch is not None and batch % (parallel.micro_batch * data):
        micro = next((n for n in range(parallel.micro_batch, 0, -1) if batch % (n * data) == 0), None)
        if micro is None:
            return f"for {ranks} there would be {data} data-parallel ranks, which train.global_batch {batch} does not divide into"
        keys = f" parallel.micro_batch={micro}"
    if data % parallel.dp_replicate == 0 and parallel.dp_replicate > 1:
        return f"or for {ranks}: parallel.dp_shard={data // parallel.dp_replicate}{keys}"
    replicas = " parallel.dp_replicate=1" if parallel.dp_replicate > 1 else ""
    return f"or for {ranks}: parallel.dp_shard={data}{replicas}{keys}"
