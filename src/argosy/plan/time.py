"""A model of the step time from kernels and links, with every term by name.

A layer's forward and backward pass take the time of its matmuls, attention and element-wise bytes, or of the host's kernel launches
if those take longer. Recompute repeats the forward pass. Tensor, context and expert parallelism add collectives to each layer. ZeRO-3
all-gathers weights in parallel with computation; the part that does not overlap is exposed: it runs while nothing computes, which is
what `argosy train --profile` measures from a trace. Computation beside an all-gather is slower. A pipeline of stages with times T takes
m max(T) + (sum(T) - max(T)) / v for m micro-batches and v virtual stages per rank; the second term is the pipeline bubble.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from math import log2

from argosy.plan.calibration import Calibration, Stack
from argosy.plan.hardware import Cluster
from argosy.plan.kernels import Rates
from argosy.plan.layer import (
    Pass,
    accumulated_bytes,
    embedding_seconds,
    gathers,
    head_seconds,
    host_seconds,
    layer_parameters,
    layer_passes,
    remade,
    replays,
)
from argosy.plan.layouts import Layout, Work, stage_layers
from argosy.plan.links import Links, exchange, gather, group, latency, reduce, send
from argosy.plan.memory import stage_parameters, updated_by
from argosy.plan.updating_rank import UpdatingRank

# The exponent of a smooth maximum of host and device time. Measured on an H200: 184 ms where either alone took 160 to 163.
SHARPNESS = 5
# Seconds per token of the one prefetch thread (docs/benchmarks.md, a sample of 4,096 tokens).
READING = 12e-9
ACTIVE = ("products", "attention", "element-wise", "launches", "recompute", "accumulation", "slowdown", "head")
COMMUNICATION = ("tensor", "context", "experts", "gather", "pipeline", "gradients")


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by term. `terms` sum to `total`, and `bubble` is a share of the step."""

    total: float
    terms: dict[str, float]
    bubble: float
    flops: float = field(repr=False, default=0.0)
    tokens: int = 0
    gpus: int = 1

    @property
    def exposed(self) -> float:
        """Share of the step in which communication runs and nothing computes (exposed communication)."""
        return sum(self.terms[name] for name in COMMUNICATION) / self.total

    @property
    def tokens_per_gpu(self) -> float:
        return self.tokens / self.total / self.gpus

    def mfu(self, cluster: Cluster) -> float:
        """Return MFU against the dense 16-bit peak, with causal attention counted as half."""
        return self.flops / self.total / (cluster.gpus * cluster.gpu.peak() * 1e12)


@dataclass(frozen=True)
class MicroBatchTime:
    """Seconds of one micro-batch, forward and backward: of a layer by term, of the embedding, of the output head, and of the sends of
    a rank.

    `layers` is the number of layers of each pipeline rank, and `forward` the part of a layer that is its forward pass.
    """

    layout: Layout
    layers: tuple[int, ...]
    layer: dict[str, float]
    embedding: float
    head: float
    hops: float
    forward: float

    def ends_of(self, stage: int) -> float:
        first, last = self.layout.ends(stage)
        return first * self.embedding + last * self.head

    def compute(self, stage: int, *, launches: bool) -> float:
        """Return the seconds in which a rank of a stage computes, with those in which it waits for the host, or without."""
        names = [name for name in ACTIVE if launches or name != "launches"]
        return self.layers[stage] * sum(self.layer.get(name, 0.0) for name in names) + self.ends_of(stage)

    @cached_property
    def stages(self) -> list[float]:
        """Seconds of one rank of each pipeline stage."""
        each = sum(self.layer.values())
        return [count * each + self.hops + self.ends_of(stage) for stage, count in enumerate(self.layers)]


def micro_batch_time(
    work: Work, layout: Layout, cluster: Cluster, stack: Stack, known: Calibration, *, alone: bool = False
) -> MicroBatchTime:
    """Return the seconds of a micro-batch. `alone`: of a rank whose collectives are launched, and move nothing."""
    rates = known.rates(cluster.gpu, stack, work.precision)
    links = _links(cluster, known, alone)
    tokens = work.seq_len * layout.micro_batch / layout.cp
    forward, backward = layer_passes(work, layout, stack, known, rates, tokens)
    layer = _layer_terms(work, layout, cluster, stack, known, links, rates, tokens, forward, backward)
    passed = 2 * tokens * work.sizes.hidden / (1 if stack.whole_sends else layout.tp)
    hop = send(links, group(layout, "pp", cluster), passed)
    return MicroBatchTime(
        layout,
        stage_layers(work, layout, levelled=stack.levelled),
        layer,
        embedding_seconds(work, layout, stack, rates, tokens),
        head_seconds(work, layout, stack, rates, tokens),
        2 * layout.vpp * hop * (1 - known.hidden(stack, "send")),
        forward.total,
    )


def _links(cluster: Cluster, known: Calibration, alone: bool) -> Links:
    links = known.links(cluster)
    return links.unlimited() if alone else links


def once_a_step(
    work: Work, layout: Layout, cluster: Cluster, stack: Stack, known: Calibration, micro: MicroBatchTime,
    *, alone: bool = False,
) -> tuple[float, float]:  # fmt: skip
    """Return the seconds of the parts that run once a step: the exposed gradient reduction, and the optimiser.

    `alone`: those of a rank whose collectives move nothing."""
    slowest = micro.stages.index(max(micro.stages))
    backward = micro.layers[slowest] * (sum(micro.layer.values()) - micro.forward)
    rates, links = known.rates(cluster.gpu, stack, work.precision), _links(cluster, known, alone)
    return _once(work, layout, cluster, stack, known, links, rates, backward)


def step_time(work: Work, layout: Layout, cluster: Cluster, stack: Stack, known: Calibration) -> StepTime:
    """Return the time of a step by its parts. Where passes may be replayed as CUDA graphs or launched, of the faster way."""
    found = [_step_time(way, layout, cluster, stack, known) for way in _ways(work, layout, stack)]
    return min(found, key=lambda step: step.total)


def as_run(work: Work, layout: Layout, cluster: Cluster, stack: Stack, known: Calibration) -> Work:
    """Return the work as a run does it, with replayed passes or launched ones: what is faster."""
    return min(_ways(work, layout, stack), key=lambda way: _step_time(way, layout, cluster, stack, known).total)


def _ways(work: Work, layout: Layout, stack: Stack) -> list[Work]:
    """Return the work with passes that are replayed as CUDA graphs and, if a run may choose, with launched ones.

    A replayed pass takes no host time, but gradients are summed after it, not beside it. Several ranks choose by the clock.
    """
    may_choose = replays(work, layout, stack) and layout.gpus > 1 and not work.captured_only
    return [work, replace(work, replayed=False)] if may_choose else [work]


def _step_time(work: Work, layout: Layout, cluster: Cluster, stack: Stack, known: Calibration) -> StepTime:
    terms = dict.fromkeys((*ACTIVE, *COMMUNICATION, "bubble", "optimiser", "data", "outside", "waiting"), 0.0)
    micro = micro_batch_time(work, layout, cluster, stack, known)
    slowest = micro.stages.index(max(micro.stages))
    m = work.micro_batches(layout)
    for name, seconds in micro.layer.items():
        terms[name] += m * micro.layers[slowest] * seconds
    terms["head"] += m * micro.ends_of(slowest)
    terms["pipeline"] += m * micro.hops
    terms["bubble"] = bubble_seconds(layout, m, micro.stages)
    terms["gradients"], terms["optimiser"] = once_a_step(work, layout, cluster, stack, known, micro)
    terms["outside"] = known.outside(stack)
    terms["data"] = max(0.0, READING * work.seq_len * work.global_batch / layout.dp - sum(terms.values()))
    busy = sum(terms.values())
    terms["waiting"] = busy * known.constants["straggle"] * log2(max(1, cluster.nodes))
    total = busy + terms["waiting"]
    flops = work.flops_per_token * work.tokens
    return StepTime(total, terms, terms["bubble"] / total, flops, work.tokens, cluster.gpus)


def bubble_seconds(layout: Layout, micro_batches: int, stages: list[float]) -> float:
    """Return the seconds of the pipeline bubble on the slowest stage.

    With fewer micro-batches than ranks, an interleaved schedule waits for the first micro-batch before each further virtual stage.
    A V-shaped schedule splits a stage's work in three passes (forward, input gradients, weight gradients) and idles for one of
    them where other schedules idle for all three. `zbv` idles longer if the micro-batches are too few to fill its way down and up.
    """
    others = sum(stages) - max(stages)
    if not layout.is_v_shaped or layout.pp == 1:
        waits = (layout.vpp - 1) * max(0, layout.pp - micro_batches) / max(1, layout.pp - 1)
        return (1 + waits) * others / layout.vpp
    passes = float(layout.pp - 1)
    if layout.schedule == "zbv":
        passes = max(passes, 2 * (2 * layout.pp - 1 - micro_batches))
    return passes * others / (layout.pp - 1) / (3 * layout.vpp)


def _layer_terms(
    work: Work, layout: Layout, cluster: Cluster, stack: Stack, known: Calibration, links: Links, rates: Rates,
    tokens: float, forward: Pass, backward: Pass,
) -> dict[str, float]:  # fmt: skip
    """Return the seconds of one layer and micro-batch, forward and backward, by term."""
    sizes, again = work.sizes, remade(layout, stack, forward)
    stream = 2 * tokens * sizes.stream
    repeats = 1.0 if layout.recompute == "full" else 0.0
    reduces = (4 + 2 * repeats) * (1 - known.hidden(stack, "tensor")) - 2 * known.hidden(stack, "tensor-backward")
    ranks = group(layout, "tp", cluster)
    tensor = reduces * reduce(links, ranks, stream) * _reduced_share(work, layout)
    ring = group(layout, "cp", cluster)
    key_values = 4 * tokens * sizes.key_value / layout.tp * layout.cp
    context = gather(links, ring, key_values) * (3 + repeats)
    # Ring attention overlaps its sends with attention.
    if "context" in stack.overlaps:
        context = max(0.1 * context, context - forward.attention - backward.attention)
    experts = (4 + 2 * repeats) * (1 - known.hidden(stack, "experts"))
    experts *= _to_experts(work, layout, cluster, stack, links, stream)
    launched, busy = host_seconds(work, layout, stack, known), forward.total + backward.total + again
    # The host launches every collective too.
    if launched:
        launched += reduces * latency(links, ranks)
    exposed, slowdown = _gathered(work, layout, cluster, stack, links, rates, known, max(busy, launched) + tensor)
    return {
        "products": forward.products + backward.products,
        "attention": forward.attention + backward.attention,
        "element-wise": forward.elements + backward.elements,
        "recompute": again,
        "accumulation": accumulated_bytes(work, layout, stack) / rates.memory,
        "launches": _waited(launched, busy + tensor + context + experts),
        "tensor": tensor,
        "context": context,
        "experts": experts,
        "gather": exposed,
        "slowdown": slowdown,
    }


def _waited(host: float, device: float) -> float:
    """Return the seconds a GPU waits for the host to launch kernels.

    It is the difference if the host is slower, and somewhat more if both take about as long, because each is late in turn.
    """
    return max(0.0, float((host**SHARPNESS + device**SHARPNESS) ** (1 / SHARPNESS)) - device)


def _reduced_share(work: Work, layout: Layout) -> float:
    """Return the bytes of tensor parallelism's all-reduces relative to a dense model.

    Half of them belong to attention. Experts without tensor parallelism need none; experts with it receive tokens from all ranks.
    """
    moe, share = work.model.moe, work.sizes.expert_layers
    if moe is None:
        return 1.0
    routed = 0.0 if layout.expert_tp == 1 else float(moe.top_k)
    return 0.5 + 0.5 * ((1 - share) + share * max(routed, float(moe.shared_experts > 0)))


def _to_experts(work: Work, layout: Layout, cluster: Cluster, stack: Stack, links: Links, stream: float) -> float:
    """Return the seconds of one all-to-all of an MoE layer.

    A token is sent to each of its experts (with `routes_once`: once to each rank that has some of them), and over the network once
    to each NVLink domain that has one of them.
    """
    moe = work.model.moe
    if moe is None:
        return 0.0
    ranks = group(layout, "ep", cluster)
    domains = ranks.size / ranks.near
    reached = _distinct(domains, moe.top_k) if domains > 1 else 0.0
    reached = min(reached, domains * moe.top_groups / moe.groups)
    sent = stream / layout.tp * work.sizes.expert_layers
    copies = _distinct(ranks.size, moe.top_k) if stack.routes_once else float(moe.top_k)
    return exchange(links, ranks, sent * copies, sent * reached * (domains - 1) / domains)


def _distinct(places: float, drawn: int) -> float:
    """Return the expected number of distinct places hit by `drawn` random draws."""
    return min(drawn, places * (1 - (1 - 1 / places) ** drawn))


def _gathered(
    work: Work, layout: Layout, cluster: Cluster, stack: Stack, links: Links, rates: Rates, known: Calibration,
    compute: float,
) -> tuple[float, float]:  # fmt: skip
    """Return the exposed seconds of ZeRO-3's all-gathers and reduce-scatter for one layer, and the slowdown of what they overlap.

    A slowdown is at least the time of the copies of what is gathered and reduced. A pipeline keeps its gathered weights for all
    micro-batches.
    """
    if not gathers(layout):
        return 0.0, 0.0
    shards, parameters = group(layout, "shards", cluster), layer_parameters(work, layout)
    gathers_each = 2 if work.reshard else 1
    moved = gathers_each * gather(links, shards, 2 * parameters)
    # Frozen weights have no gradients.
    if not work.frozen:
        moved += gather(links, shards, _bytes_reduced(work, stack) * parameters)
    copied = (gathers_each + (not work.frozen)) / 3 * stack.copied * parameters / rates.memory
    return max(0.0, moved - compute), max(copied, known.constants["interference"] * min(moved, compute))


def _bytes_reduced(work: Work, stack: Stack) -> float:
    """Return the bytes of a gradient element while it is summed over ranks."""
    return stack.reduced if work.reduced is None else work.reduced


def _once(
    work: Work, layout: Layout, cluster: Cluster, stack: Stack, known: Calibration, links: Links, rates: Rates,
    backward: float,
) -> tuple[float, float]:  # fmt: skip
    """Return the seconds of the parts that run once a step: the exposed gradient reduction, and the optimiser."""
    layers = stage_layers(work, layout, levelled=stack.levelled)[0]
    first, last = layout.ends(0)
    dense, experts = stage_parameters(work, layout, layers, first=first, last=last)
    shards = group(layout, "shards", cluster)
    own = layers * sum(work.adapters(layout)) if work.frozen else dense + experts
    ranks = shards.size if layout.zero else 1
    of_experts = ranks if ranks == 1 else layout.expert_shards(ranks)
    optimiser = UpdatingRank(work, layout, cluster, links, rates, layers).extra_seconds()
    for rule, some_dense, some_experts in updated_by(work, layout, layers, dense, experts):
        optimiser += rule.bytes_moved * (some_dense / ranks + some_experts / of_experts) / rates.memory
    reduced = _bytes_reduced(work, stack)
    exchanged = 0.0
    # HSDP: each rank all-reduces its shard over the copies.
    if layout.copies > 1:
        exchanged += reduce(links, group(layout, "copies", cluster), reduced * own / ranks)
    if layout.zero == 0:
        exchanged += reduce(links, shards, reduced * own)
    elif layout.zero < 3 or layout.pp > 1:
        exchanged += gather(links, shards, reduced * own) + gather(links, shards, 2 * own)
    what = "gradients"
    if layout.copies > 1 and layout.pp == 1 and "copies" in stack.overlaps:
        what = "copies"
    elif layout.zero == 0 and "replicas" in stack.overlaps:
        what = "replicas"
    hidden = 0.0 if replays(work, layout, stack) else known.hidden(stack, what)
    return max(0.0, exchanged - hidden * backward), optimiser
