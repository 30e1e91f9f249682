"""Whether a layout fits the model, the samples and the processes there are: each refusal has the arithmetic and the nearest
sizes that work. Needs no torch, so that a wrong layout is refused before a device is held."""

from __future__ import annotations

from argosy.config.pipeline import check_pipeline
from argosy.config.schema import ParallelSpec, RunSpec
from argosy.errors import ArgosyError

Origins = dict[str, str]
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")  # from the slowest links to the fastest


def describe_layout(parallel: ParallelSpec) -> str:
    """Its axes that are larger than one."""
    sizes = [f"{axis} {getattr(parallel, axis)}" for axis in (*AXES, "ep") if getattr(parallel, axis) > 1]
    return " x ".join(sizes) or "one process"


def check_layout(spec: RunSpec, origins: Origins) -> None:
    """Each axis against what it cuts."""
    model, parallel = spec.model, spec.parallel
    if parallel.tp > 1:
        _check_tensor(spec, origins)
    if parallel.cp > 1:
        _check_context(spec, origins)
    check_pipeline(spec, origins)
    if parallel.ep == 1:
        return
    if model.moe is None:
        raise _refusal("ep", parallel.ep, "the model has no experts to spread", 1, origins)
    _divides(parallel.ep, model.moe.experts, "ep", "the model's experts", origins)
    _divides(parallel.ep, parallel.dp_shard * parallel.cp, "ep", "the dp_shard x cp ranks it is laid over", origins)
    if parallel.compile != "off" and parallel.recompute != "none":
        raise ArgosyError(
            "config.conflict",
            "how many rows an expert gets is known only while it runs, so that a block with experts elsewhere is not compiled "
            "as one: torch cannot then recompute it",
            key="parallel.recompute",
            value=parallel.recompute,
            origin=origins.get("parallel.recompute"),
            fix="parallel.compile=off, or parallel.recompute=none",
        )


def _check_tensor(spec: RunSpec, origins: Origins) -> None:
    """Every matrix in equal parts, each with whole heads; the vocabulary in parts of which none is empty; and, with sp, equal
    shares of every sequence."""
    model, tp = spec.model, spec.parallel.tp
    _divides(tp, model.heads, "tp", "the model's heads", origins)
    _divides(tp, model.kv_heads, "tp", "the model's key/value heads", origins)
    if model.moe is None or model.moe.dense_layers:
        _divides(tp, model.ffn, "tp", "the model's ffn", origins)
    if model.moe is not None:
        _divides(tp, model.moe.ffn, "tp", "the experts' ffn", origins)
    rows = model.vocab_size
    works = [n for n in range(1, tp + 1) if -(-rows // n) * (n - 1) < rows]
    if tp not in works:
        cause = f"a vocabulary of {rows} in parts of {-(-rows // tp)} leaves nothing for the last of tp {tp} ranks"
        raise _refusal("tp", tp, cause, works[-1], origins)
    check_shares(spec.parallel, spec.data.seq_len, "data.seq_len", origins)
    if spec.data.ict is not None:
        check_shares(spec.parallel, spec.data.ict.query_len, "data.ict.query_len", origins)


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


def _check_context(spec: RunSpec, origins: Origins) -> None:
    model, parallel = spec.model, spec.parallel
    if model.architecture != "decoder":
        why = {
            "encoder": "an encoder judges a sequence as a whole, by its first token or by positions in it",
            "encoder-decoder": "an encoder-decoder has two sequences, which look at each other",
        }
        cause = f"context parallelism cuts the sequences of decoders only: {why[model.architecture]}"
        raise _refusal("cp", parallel.cp, cause, "1, and more dp_shard", origins)
    # Each rank gets one piece from the front and one from the back, which levels causal attention.
    _divides(2 * parallel.cp, spec.data.seq_len, "cp", "data.seq_len", origins, times=2)
    if parallel.cp_kind == "ulysses":
        heads = "the model's heads" if parallel.tp == 1 else f"the model's heads on each of tp {parallel.tp} ranks"
        _divides(parallel.cp, model.heads // parallel.tp, "cp", heads, origins)


def _divides(parts: int, whole: int, axis: str, what: str, origins: Origins, times: int = 1) -> None:
    if whole % parts:
        size = parts // times
        cut = f"{times} x {axis} {size} = {parts}" if times > 1 else f"{axis} {size}"
        near = _nearest(whole, size, times)
        raise _refusal(axis, size, f"{what}, {whole}, cannot be cut into {cut} equal parts", near, origins)


def _nearest(whole: int, size: int, times: int) -> str:
    """The closest sizes below and above that do divide."""
    works = [n for n in range(1, whole // times + 1) if whole % (n * times) == 0] or [1]
    below, above = [n for n in works if n < size], [n for n in works if n > size]
    return " or ".join(str(n) for n in (*below[-1:], *above[:1]))


def _refusal(axis: str, size: int, cause: str, near: object, origins: Origins) -> ArgosyError:
    key = f"parallel.{axis}"
    return ArgosyError(
        "config.arithmetic", cause, key=key, value=size, origin=origins.get(key), fix=f"use {key} {near}"
    )


def check_world(parallel: ParallelSpec, ranks: int, source: str) -> None:
    """The processes there are against those the layout needs."""
    if ranks == parallel.world_size:
        return
    numbers = " x ".join(str(getattr(parallel, axis)) for axis in AXES)
    raise ArgosyError(
        "launch.world-size",
        f"the layout {describe_layout(parallel)} needs {' x '.join(AXES)} = {numbers} = {parallel.world_size} "
        f"process{'es' if parallel.world_size > 1 else ''}, and there {'is' if ranks == 1 else 'are'} {ranks} ({source})",
        key="parallel",
        value=describe_layout(parallel),
        fix=_other_layouts(parallel, ranks),
    )


def _other_layouts(parallel: ParallelSpec, ranks: int) -> str:
    start = f"start {parallel.world_size} processes: argosy train RUN.yaml --nproc {parallel.world_size}"
    inner = parallel.pp * parallel.cp * parallel.tp
    if ranks % inner:
        fewer, more = ranks // inner * inner, (ranks // inner + 1) * inner
        near = f"{fewer} or {more}" if fewer else str(more)
        return f"{start}; pp x cp x tp = {inner} fits {near} processes with another number of data-parallel ranks"
    data = ranks // inner
    if data % parallel.dp_replicate == 0 and parallel.dp_replicate > 1:
        return f"{start}; or for {ranks}: parallel.dp_shard={data // parallel.dp_replicate}"
    replicas = " parallel.dp_replicate=1" if parallel.dp_replicate > 1 else ""
    return f"{start}; or for {ranks}: parallel.dp_shard={data}{replicas}"
