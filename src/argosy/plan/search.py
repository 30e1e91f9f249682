"""Exhaustive search over parallel layouts, fastest first.

Memory is computed first, and only layouts that fit are timed, so thousands of layouts take about a second. Layouts that do not fit
or do not divide are counted by reason. `search` and `micro_batches` rank micro-batches by the same rule, so a run that leaves only its
micro-batch open gets the one that a plan names for its layout. Layouts with recompute are an exception: `search` tries them only with the
micro-batches that do not fit with less recompute, and `micro_batches` with all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from argosy.config.batches import divisors
from argosy.config.pipeline import can_interleave
from argosy.config.stage_layers import SEVERAL_STAGES
from argosy.families.architecture import architecture_of
from argosy.plan.calibration import Calibration, Stack
from argosy.plan.hardware import Cluster
from argosy.plan.layout_rules import violations
from argosy.plan.layouts import Layout, Recompute, Work, stage_layers
from argosy.plan.memory import StageMemory, memory_of, stage_memory
from argosy.plan.time import StepTime, step_time

RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
# The pipeline bubble, as a share of a step, below which more virtual stages gain nothing.
SMALL_BUBBLE = 0.02
# The share of GPU memory a layout may need. The rest is a reserve for what the model does not predict.
MARGIN = 0.97
# The most tokens of a micro-batch on one rank, unless its smallest has more.
MOST_TOKENS = 131_072
# Predicted step times of the same layout with another micro-batch are equal up to this factor.
EQUAL = 1.01
# The share of GPU memory up to which a larger micro-batch costs nothing.
ROOMY = 0.5
# Why a layout is left out that follows all rules, and would be considered without `parallel.graph=on`.
UNCAPTURABLE = "cannot be captured as CUDA graphs"


@dataclass(frozen=True)
class Candidate:
    """One layout with its predicted memory and step time."""

    work: Work
    layout: Layout
    cluster: Cluster
    stack: Stack
    known: Calibration
    time: StepTime

    @cached_property
    def stages(self) -> tuple[StageMemory, ...]:
        return tuple(memory_of(self.work, self.layout, self.stack, self.known))

    @cached_property
    def fullest(self) -> StageMemory:
        return max(self.stages, key=lambda stage: stage.device)

    @property
    def fits(self) -> bool:
        return self.fullest.device <= self.cluster.gpu.memory

    @property
    def mfu(self) -> float:
        return self.time.mfu(self.cluster)


@dataclass(frozen=True)
class Found:
    """The result of a search: layouts that fit, fastest first, and counts of the others by reason.

    `nearest` is the layout that needs the least memory, if none fits.
    """

    best: tuple[Candidate, ...]
    considered: int
    left_out: Counter[str]
    nearest: Candidate | None


def evaluate(work: Work, layout: Layout, cluster: Cluster, stack: Stack, known: Calibration) -> Candidate:
    return Candidate(work, layout, cluster, stack, known, step_time(work, layout, cluster, stack, known))


def search(
    work: Work, cluster: Cluster, stack: Stack, known: Calibration, fixed: dict[str, object] | None = None
) -> Found:
    """Search the layouts of a cluster. `fixed` restricts axes to given values, for example {"tp": 4}."""
    fitting: list[Candidate] = []
    left_out: Counter[str] = Counter()
    nearest: tuple[float, Layout] | None = None
    considered = 0
    for layout in _recomputing(work, cluster, fixed or {}, fitting):
        considered += 1
        reason = next(violations(work, layout, cluster.gpus), None)
        if reason is not None:
            left_out["do not divide"] += 1
            continue
        if work.captured_only and not work.can_capture(layout):
            left_out[UNCAPTURABLE] += 1
            continue
        need = _need(work, layout, stack, known)
        if need > MARGIN * cluster.gpu.memory:
            left_out["do not fit"] += 1
            if nearest is None or need < nearest[0]:
                nearest = need, layout
            continue
        fitting.append(evaluate(work, layout, cluster, stack, known))
    closest = None if fitting or nearest is None else evaluate(work, nearest[1], cluster, stack, known)
    return Found(tuple(_ranked(fitting)), considered, left_out, closest)


def _recomputing(
    work: Work, cluster: Cluster, fixed: dict[str, object], fitting: Sequence[Candidate]
) -> Iterator[Layout]:
    """Yield the layouts that match `fixed`, each with increasing recompute until it fits. More recompute is only slower.

    If a layout does not fit with full recompute, larger micro-batches are skipped, except a single micro-batch per step, which
    needs no gradient accumulation.
    """
    axes = dict(fixed)
    schedule, recompute = axes.pop("schedule", None), axes.pop("recompute", None)
    # Any number of copies and any micro-batch can be asked for. The search itself tries few.
    copies, micro_batch = axes.pop("copies", None), axes.pop("micro_batch", None)
    kinds = [kind for kind in RECOMPUTE if recompute in (None, kind)]
    hopeless: set[Layout] = set()
    for layout in layouts(work, cluster, micro_batch if isinstance(micro_batch, int) else None):
        if any(getattr(layout, axis) != value for axis, value in axes.items()):
            continue
        if isinstance(copies, int):
            if layout.copies > 1 or (copies > 1 and (layout.zero != 3 or layout.ep > 1 or layout.dp % copies)):
                continue
            layout = replace(layout, copies=copies)
        if schedule is not None:
            if layout.pp == 1 or (layout.vpp > 1) != (schedule in SEVERAL_STAGES):
                continue
            layout = replace(layout, schedule=schedule)  # type: ignore[arg-type]
        found, others = len(fitting), replace(layout, micro_batch=1)
        if others in hopeless and work.micro_batches(layout) > 1:
            continue
        for kind in kinds:
            yield layout if kind == "none" else replace(layout, recompute=kind)
            if len(fitting) > found:
                break
        else:
            hopeless.add(others)


def layouts(work: Work, cluster: Cluster, micro_batch: int | None = None) -> Iterator[Layout]:
    """Yield every reasonable layout of the cluster's GPUs that Argosy can run, without recompute.

    Tensor parallelism stays within an NVLink domain and keeps key/value heads whole. Expert parallelism is over ranks that shard
    (FSDP). Micro-batches are those of `micro_batch_sizes`, or the given one. A pipeline rank has at most eight virtual stages.
    """
    model, gpus = work.model, cluster.gpus
    long = work.seq_len >= 8192 and architecture_of(model).uncuttable is None
    experts = [1] if model.moe is None else [n for n in divisors(model.moe.experts) if n <= gpus]
    for tp in [n for n in divisors(gpus) if n <= cluster.domain and model.kv_heads % n == 0]:
        for pp in [n for n in divisors(gpus // tp) if n <= work.sizes.layers]:
            for cp in [n for n in divisors(gpus // (tp * pp)) if n == 1 or (long and n <= 16)]:
                dp = gpus // (tp * pp * cp)
                if work.divided_batch % dp:
                    continue
                base = Layout(tp=tp, pp=pp, cp=cp, dp=dp, sp=tp > 1)
                sizes = micro_batch_sizes(work, base) if micro_batch is None else [micro_batch]
                variants = _variants(work, base, [n for n in experts if (dp * cp) % n == 0], sizes, cluster.domain)
                yield from variants


def _variants(work: Work, base: Layout, experts: list[int], sizes: list[int], domain: int) -> Iterator[Layout]:
    chunks = [v for v in (1, 2, 4, 8) if v == 1 or (base.pp > 1 and base.pp * v <= work.sizes.layers)]
    zeros = [(0, 1), *((3, copies) for copies in _copies(base, domain))] if base.dp > 1 else [(0, 1)]
    for ep in experts:
        for micro_batch in sizes:
            for vpp in chunks:
                m = max(1, work.global_batch // (base.dp * micro_batch))
                if vpp > 1 and (
                    m < base.pp
                    or not can_interleave(m, base.pp)
                    or (vpp > 2 and (base.pp - 1) * 2 / vpp < SMALL_BUBBLE * m)
                ):
                    continue
                for zero, copies in zeros if ep == 1 else [(3, 1)]:
                    yield replace(base, ep=ep, micro_batch=micro_batch, vpp=vpp, zero=zero, copies=copies)


def _copies(base: Layout, domain: int) -> list[int]:
    """Return the numbers of copies to try: 1 (FSDP over all data-parallel ranks), and one copy in each NVLink domain (HSDP)."""
    near = domain // (base.tp * base.cp)
    return [1, base.dp // near] if 1 < near < base.dp and base.dp % near == 0 else [1]


def micro_batch_sizes(work: Work, layout: Layout) -> list[int]:
    """Return the micro-batch sizes to consider for a layout, smallest first; nothing if no size can run.

    They divide a rank's share of every batch. With fp8 their tokens are aligned.
    """
    multiple, share = work.micro_batch_multiple(layout.cp), max(1, work.divided_batch // layout.dp)
    longest = max(multiple, MOST_TOKENS * layout.cp // work.seq_len)
    return [size for size in divisors(share, longest) if size % multiple == 0]


def micro_batches(work: Work, layout: Layout, cluster: Cluster, stack: Stack, known: Calibration) -> list[Candidate]:
    """Return a layout with each of its micro-batch sizes that fits, best first.

    If no size fits, the result is the smallest that can run. It is empty if no size can run.
    """
    every = [replace(layout, micro_batch=size) for size in micro_batch_sizes(work, layout)]
    every = [one for one in every if not any(violations(work, one, layout.gpus))]
    fitting = [one for one in every if _need(work, one, stack, known) <= MARGIN * cluster.gpu.memory]
    return _by_micro_batch([evaluate(work, one, cluster, stack, known) for one in fitting or every[:1]])


def _by_micro_batch(found: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates of one layout, which differ in the micro-batch: the chosen one, and the others by step time.

    Step times that differ by less than the prediction can tell count as equal. Of equal sizes the choice is the largest that leaves much
    of the memory free, or else the smallest.
    """
    if len(found) < 2:
        return list(found)
    equal = EQUAL * min(candidate.time.total for candidate in found)

    def place(candidate: Candidate) -> tuple[bool, int]:
        need, size = (
            _need(candidate.work, candidate.layout, candidate.stack, candidate.known),
            candidate.layout.micro_batch,
        )
        is_full = need > ROOMY * candidate.cluster.gpu.memory
        return is_full, size if is_full else -size

    chosen = min((candidate for candidate in found if candidate.time.total <= equal), key=place)
    others = [candidate for candidate in found if candidate is not chosen]
    return [chosen, *sorted(others, key=lambda candidate: candidate.time.total)]


def _ranked(fitting: Iterable[Candidate]) -> list[Candidate]:
    """Return candidates in the order of their step times, but the chosen micro-batch of a layout before its others."""
    layouts_found: dict[Layout, list[Candidate]] = {}
    for candidate in fitting:
        layouts_found.setdefault(replace(candidate.layout, micro_batch=1), []).append(candidate)
    placed: list[tuple[float, Candidate]] = []
    for same in layouts_found.values():
        [chosen, *others] = _by_micro_batch(same)
        placed.append((chosen.time.total, chosen))
        placed += [(max(chosen.time.total, other.time.total), other) for other in others]
    # The sort is stable, so others that are faster than the chosen one follow it in the order of their times.
    return [candidate for _, candidate in sorted(placed, key=lambda one: one[0])]


def _need(work: Work, layout: Layout, stack: Stack, known: Calibration) -> float:
    """Return the GiB that a layout needs of a GPU.

    The first stage has the most micro-batches in flight, and the last one has the logits. Of those between, the first of each size
    needs the most.
    """
    layers = stage_layers(work, layout, levelled=stack.levelled)
    fullest = {0, *map(layers.index, set(layers)), layout.pp - 1}
    return max(stage_memory(work, layout, stack, known, stage).device for stage in fullest)


def warnings(candidate: Candidate) -> Iterator[str]:
    """Yield warnings about a layout: pipeline bubble, links, memory and MFU."""
    layout, cluster, work = candidate.layout, candidate.cluster, candidate.work
    m = work.micro_batches(layout)
    if layout.pp > 1 and m < layout.pp:
        yield f"{m} micro-batches for {layout.pp} stages: the pipeline bubble is {candidate.time.bubble:.0%} of the step"
    if layout.tp > cluster.domain:
        yield f"tp {layout.tp} crosses nodes of {cluster.domain} GPUs: every layer waits for the network"
    if layout.pp > 1:
        low, high = (pick(stage.device for stage in candidate.stages) for pick in (min, max))
        if high > 1.25 * low:
            yield f"memory is uneven over the stages: {low:.1f} to {high:.1f} GiB"
    if candidate.fullest.device > 0.92 * cluster.gpu.memory:
        yield f"{candidate.fullest.device:.1f} of {cluster.gpu.memory:.1f} GiB: little memory is left in reserve"
    if work.seq_len > work.model.max_seq_len:
        yield (
            f"samples of {work.seq_len:,} tokens are longer than the model's {work.model.max_seq_len:,} positions: a run needs "
            f"model.max_seq_len={work.seq_len}"
        )
    if work.precision == "bf16" and "bf16" not in cluster.gpu.dense:
        yield f"a {cluster.gpu.name} has no bf16: use train.precision=fp16 with loss scaling, which takes the time planned here"
    if work.precision == "fp32":
        yield "fp32: memory is planned for fp32, but time for 16-bit matmuls, so the time is far too short"
    if candidate.mfu < 0.2:
        yield f"MFU {candidate.mfu:.1%}: the GPUs are idle most of the time"
