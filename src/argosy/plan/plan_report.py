"""The output of `argosy plan` as text and JSON: the ranked table, why other layouts lost, every term of one layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from argosy.config.counts import FLOPS_CONVENTION, checkpoint_bytes, describe_size
from argosy.plan.layouts import Work, parallel_keys
from argosy.plan.search import EQUAL, Candidate, Found, warnings

# The mean error of step times that the planner's constants have never seen: docs/benchmarks.md.
MEAN_ERROR = 0.10
_UNITS = (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))
LEGEND = [
    "layout: keys of `parallel`; dp_shard is FSDP (ZeRO-3), dp_replicate copies; the rest of the batch is accumulated",
    "memory: of the rank that uses most; bubble, exposed: shares of a step that wait for the pipeline and for communication",
    f"± is the mean error of the planner's times, {MEAN_ERROR:.0%}; half of them are within 7%",
]
FORMULAS = {
    "products": "m x layers x (forward + backward matmuls), FLOPs / (peak x share reached x tile and wave efficiency)",
    "attention": "FLOPs of the causal half (backward 2.5 x forward) / (peak x share reached)",
    "element-wise": "bytes of norms, residual sums, rope and activation / memory bandwidth reached",
    "launches": "time the GPU waits for the host to launch a layer's kernels; partly even if both take equally long",
    "recompute": "activation checkpointing: the forward pass again, or its cheap operations",
    "accumulation": "gradient accumulation: bytes to add each micro-batch's gradients, if matmuls do not / memory bandwidth reached",
    "slowdown": "ZeRO-3: computation beside all-gathers and reduce-scatters is slower, by a share of the time they overlap, or by their copies",
    "head": "m x (output head's matmuls, bytes of the loss, copies of embedding and head), if the slowest stage has them",
    "tensor": "m x layers x 4 all-reduces (6 with full recompute) of 2 x tokens x hidden bytes, less what overlaps",
    "context": "all-gather of keys and values in each layer, and reduce-scatter of their gradients",
    "experts": "4 all-to-alls of top_k x tokens x hidden, each NVLink domain reached once",
    "gather": "ZeRO-3: two all-gathers of each layer's weights and a reduce-scatter, less what overlaps with computation",
    "pipeline": "m x vpp x 2 sends of 2 x tokens x hidden / tp bytes",
    "gradients": "all-reduce over data-parallel ranks, or over copies of a sharded model, less what the last backward pass overlaps",
    "bubble": "(sum of the stages' times - the slowest's) / vpp; a third of that with zbv and dualpipev",
    "optimiser": "bytes of each parameter held / memory bandwidth reached",
    "data": "12 ns for each token a data-parallel rank prefetches, less the rest of the step",
    "outside": "overhead of a step outside the layers: taking a prefetched batch, logging, synchronisation",
    "waiting": "for the slowest node (straggler): a share for each doubling of nodes",
}


def distinct(found: Found, count: int) -> list[Candidate]:
    """Return the first layout of every mesh, at most `count`.

    Variants of one mesh that differ in recompute or micro-batch are not shown as alternatives, unless there is only one mesh.
    """
    seen: dict[tuple[int, ...], Candidate] = {}
    for candidate in found.best:
        mesh = candidate.layout
        seen.setdefault((mesh.tp, mesh.pp, mesh.cp, mesh.ep, mesh.zero == 3, mesh.copies), candidate)
    return list(found.best if len(seen) == 1 else seen.values())[:count]


def run_length(candidate: Candidate, tokens: int | None) -> tuple[float, float | None] | None:
    """Return days and dollars of the whole run, or None if its length is not known."""
    if tokens is None:
        return None
    hours = tokens / candidate.work.tokens * candidate.time.total / 3600
    price = candidate.cluster.price
    return hours / 24, None if price is None else hours * price


def length_texts(candidate: Candidate, tokens: int | None) -> tuple[str, str]:
    """Return time and cost of the whole run with their errors, as texts; empty if they are not known."""
    length = run_length(candidate, tokens)
    if length is None:
        return "", ""
    days, dollars = length
    seconds = 86400 * days
    unit, size = next(((unit, size) for unit, size in _UNITS if seconds >= size), _UNITS[-1])
    return f"{_with_error(seconds / size, 1)} {unit}", "" if dollars is None else f"${_with_error(dollars, 0)}"


def as_dict(candidate: Candidate, tokens: int | None) -> dict[str, Any]:
    length, (time, cost) = run_length(candidate, tokens), length_texts(candidate, tokens)
    return {
        "layout": asdict(candidate.layout),
        "parallel": parallel_keys(candidate.layout),
        "notation": str(candidate.layout),
        "micro_batches": candidate.work.micro_batches(candidate.layout),
        "step_s": round(candidate.time.total, 5),
        "tokens_per_s_gpu": round(candidate.time.tokens_per_gpu, 1),
        "mfu": round(candidate.mfu, 4),
        "mfu_against": f"{candidate.cluster.gpu.name} {candidate.cluster.gpu.peak():g} TFLOP/s; {FLOPS_CONVENTION}",
        "fits": candidate.fits,
        "bubble": round(candidate.time.bubble, 4),
        "exposed_communication": round(candidate.time.exposed, 4),
        "terms_s": {name: round(value, 6) for name, value in candidate.time.terms.items()},
        "memory_gib": [stage.as_dict() for stage in candidate.stages],
        "card_gib": candidate.cluster.gpu.memory,
        "checkpoint_gb": round(checkpoint_bytes(candidate.work.model, candidate.work.rule) / 1e9, 3),
        "days": None if length is None else _rounded(length[0], 3),
        "dollars": None if length is None or length[1] is None else _rounded(length[1], 2),
        "time": time,
        "cost": cost,
        "warnings": list(warnings(candidate)),
    }


def _rounded(value: float, digits: int) -> float:
    """Round a figure of the whole run; one below 1 keeps three significant digits."""
    return round(value, digits) if value >= 1 else float(f"{value:.3g}")


def header(
    candidate: Candidate,
    found: Found | None,
    tokens: int | None,
    storage: float,
    *,
    length_from: str,
    price_from: str,
) -> list[tuple[str, str]]:
    """Return what was asked, as names and texts: model, cluster, step, checkpoint, length and size of the search."""
    work, cluster = candidate.work, candidate.cluster
    price = "; no price is known: --price, or the name of an instance"
    if cluster.price is not None:
        price = f", ${cluster.price:,.2f} an hour" + (f" ({price_from})" if price_from else "")
    kept = " and ".join(rule.keeps for rule in work.rule.parts)
    size = checkpoint_bytes(work.model, work.rule) / 1e9
    sample = f"{work.seq_len:,}"
    if work.sizes.decoder.targets:
        sample = f"({work.seq_len:,} + {round(work.seq_len * work.sizes.decoder.targets):,})"
    nodes = f"{cluster.nodes} node{'s' if cluster.nodes > 1 else ''}"
    facts = [
        ("model", describe_size(work.model)),
        ("cluster", f"{cluster.name}: {cluster.gpus} x {cluster.gpu.name}, {nodes}{price}"),
        ("step", f"{work.global_batch:,} x {sample} = {work.tokens:,} tokens, {work.precision}, {work.rule.name}"),
        ("checkpoint", f"{size:,.1f} GB (32-bit weights, {kept}): {size / storage:,.0f} s at {storage:g} GB/s"),
    ]
    if tokens is not None:
        origin = f" ({length_from})" if length_from else ""
        facts.append(("run", f"{tokens:,} tokens{origin}, {-(-tokens // work.tokens):,} steps"))
    elif length_from:
        facts.append(("run", length_from))
    if found is not None:
        left = ", ".join(f"{count:,} {why}" for why, count in found.left_out.items())
        facts.append(("searched", f"{found.considered:,} layouts" + (f": {left}" if left else "")))
    return facts


def verdict(candidate: Candidate, tokens: int | None) -> str:
    """Answer whether a layout fits, how long the run takes and what it costs."""
    card, used = candidate.cluster.gpu.memory, candidate.fullest.device
    fits = f"{'fits' if candidate.fits else 'does not fit'} ({used:.1f} of {card:g} GiB)"
    time, cost = length_texts(candidate, tokens)
    return f"{fits}, {time}, {cost or 'no price is known'}" if time else fits


def copied(candidate: Candidate) -> list[str]:
    """Return a layout as lines to copy: into a run spec, and onto a command line."""
    keys = parallel_keys(candidate.layout)
    return [
        "parallel: {" + ", ".join(f"{key}: {value}" for key, value in keys.items()) + "}",
        " ".join(f"parallel.{key}={value}" for key, value in keys.items()),
    ]


def table(candidates: Sequence[Candidate], tokens: int | None) -> list[str]:
    rows = [["", "layout", "step", "tok/s/GPU", "MFU", "memory", "", "bubble", "exposed", "time", "cost"]]
    for rank, candidate in enumerate(candidates, 1):
        used = candidate.fullest.device / candidate.cluster.gpu.memory
        rows.append([
            str(rank), str(candidate.layout), duration(candidate.time.total), f"{candidate.time.tokens_per_gpu:,.0f}",
            f"{candidate.mfu:.1%}", f"{candidate.fullest.device:.1f}G", _bar(used), f"{candidate.time.bubble:.0%}",
            f"{candidate.time.exposed:.0%}", *length_texts(candidate, tokens),
        ])  # fmt: skip
    columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
    padded = [
        [
            cell.ljust(max(map(len, column))) if number in (1, 6) else cell.rjust(max(map(len, column)))
            for cell in column
        ]
        for number, column in enumerate(columns)
    ]
    return ["  ".join(row).rstrip() for row in zip(*padded, strict=True)]


def _with_error(value: float, digits: int) -> str:
    """Format a figure of the whole run with its error. Small ones have two significant digits."""
    if value < 1:
        return f"{value:.2g} ±{MEAN_ERROR * value:.1g}"
    return f"{value:,.{digits}f} ±{MEAN_ERROR * value:,.{digits}f}"


def why_lost(best: Candidate, other: Candidate) -> str:
    """Describe the terms in which a layout is slower than the best one, and those in which it is faster.

    A layout that is not slower differs in memory, or is one that the search does not try.
    """
    terms = {name: value - best.time.terms[name] for name, value in other.time.terms.items()}
    worse = sorted(((v, n) for n, v in terms.items() if v > 0.005 * best.time.total), reverse=True)[:3]
    better = sorted((v, n) for n, v in terms.items() if v < -0.005 * best.time.total)[:2]
    slower = other.time.total / best.time.total - 1
    if slower <= 0:
        return f"{other.layout}: {_not_slower(best, other, -slower)}"
    lost = ", ".join(f"{name} +{duration(value)}" for value, name in worse) or "nothing large"
    gain = "".join(f", {name} -{duration(-value)}" for value, name in better)
    return f"{other.layout}: {slower:+.1%}: {lost}{gain}"


def _not_slower(best: Candidate, other: Candidate, gain: float) -> str:
    """Describe a layout that is as fast as the best one or faster, by a share `gain` of its time."""
    if other.layout == best.layout:
        return "the same as the first"
    faster = "as fast within 1%" if gain <= EQUAL - 1 else f"{gain:.1%} faster"
    more = other.fullest.device - best.fullest.device
    return f"{faster}, needs {abs(more):.1f} GiB {'more' if more > 0 else 'less'} memory"


def explain(candidate: Candidate) -> list[str]:
    """List every term of the step time with its formula, and the memory categories of the first, middle and last stage."""
    work, layout = candidate.work, candidate.layout
    lines = [f"{layout}: {duration(candidate.time.total)} a step, m = {work.micro_batches(layout)} micro-batches"]
    for name, seconds in candidate.time.terms.items():
        if seconds > 0:
            share = seconds / candidate.time.total
            lines.append(f"  {name:<13}{duration(seconds):>9} {share:>4.0%}  {_formula(name, work)}")
    lines.append(
        f"memory in GiB, of {candidate.cluster.gpu.memory:g} on the GPU; `allocated` is the peak that torch reports,"
    )
    lines.append("`device` adds the allocator's reserve and the CUDA context, and has to fit")
    shown = sorted({0, layout.pp // 2, layout.pp - 1})
    for stage in shown:
        parts = candidate.stages[stage].as_dict()
        lines.append(f"  stage {stage}: " + "  ".join(f"{name} {value:.2f}" for name, value in parts.items() if value))
    return lines


def _formula(term: str, work: Work) -> str:
    if term != "optimiser":
        return FORMULAS[term]
    rules = work.rule.parts
    moved = " and ".join(sorted({f"{rule.bytes_moved:g}" for rule in rules}))
    extra = [f"{rule.name}: {rule.extra_formula}" for rule in rules if rule.extra_formula]
    return "; ".join([f"{moved} {FORMULAS[term]}", *extra])


def duration(seconds: float) -> str:
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    return (
        f"{seconds:.2f} s"
        if seconds >= 1
        else f"{1000 * seconds:.0f} ms"
        if seconds >= 0.01
        else f"{1000 * seconds:.1f} ms"
    )


def _bar(share: float, width: int = 10) -> str:
    filled = min(width, round(share * width))
    return f"[{'#' * filled}{'.' * (width - filled)}] {share:.0%}"
