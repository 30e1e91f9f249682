"""Time of one layer, of the embedding and of the output head on one rank, without communication.

A layer has five parts: matmuls, attention and element-wise kernels of both passes, recompute in the backward pass, host time for kernel
launches, and gradient accumulation.
"""

from __future__ import annotations

from dataclasses import dataclass

from argosy.config.counts import layer_keys
from argosy.families.architecture import architecture_of
from argosy.plan.calibration import Calibration, Stack
from argosy.plan.kernels import Rates, linear, product
from argosy.plan.layouts import Layout, Work

# Five matmuls in the backward pass for two in the forward pass.
BACKWARD_ATTENTION = 2.5
# Ratio of the bytes that element-wise kernels move in the backward and in the forward pass.
BACKWARD_ELEMENTS = 1.7
# Bytes per element to cast the input of an 8-bit matmul: read in 16 bits, written twice in 8 bits, plain and transposed.
CAST_BYTES = 4
# Bytes per element of the embedding's output, forward and backward; and those that tensor parallelism adds, whose ranks mask what they
# do not have and sum what they have.
EMBEDDED_BYTES, SUMMED_BYTES = 12, 12


@dataclass
class Pass:
    """The seconds of one pass of a layer, forward or backward."""

    products: float = 0.0
    attention: float = 0.0
    elements: float = 0.0
    # The last of the matmuls, which is part of `products`.
    last: float = 0.0

    @property
    def total(self) -> float:
        return self.products + self.attention + self.elements


def layer_passes(
    work: Work, layout: Layout, stack: Stack, known: Calibration, rates: Rates, tokens: float
) -> tuple[Pass, Pass]:
    """Return the forward and the backward pass of an average layer on one rank, without communication."""
    sizes, model, tp = work.sizes, work.model, layout.tp
    narrow = work.precision in ("fp8", "fp4")
    forward, backward = Pass(), Pass()
    inputs = 2 if model.gated else 1
    linears = _projections(work, layout, tokens)
    if sizes.mlp_width:
        linears += [
            (tokens, sizes.hidden, inputs * sizes.mlp_width / tp, 1, 1.0),
            (tokens, sizes.mlp_width / tp, sizes.hidden, 1, 1.0),
        ]
    if model.moe is not None:
        local = max(1, model.moe.experts // layout.ep)
        routed, width = tokens * model.moe.top_k / local, model.moe.ffn / layout.expert_tp
        # Tensor-parallel ranks that do not split the experts split the tokens.
        routed *= layout.expert_tp / tp
        share = sizes.expert_layers
        linears += [
            (routed, sizes.hidden, inputs * width, local, share),
            (routed, width, sizes.hidden, local, share),
        ]
    for rows, inner, outer, groups, share in linears:
        summed = 8.0 if _sums_in_matmul(work, layout, stack, grouped=groups > 1) else 2.0
        ahead, back = linear(rates, rows, inner, outer, narrow=narrow, groups=groups, summed=summed)
        forward.products += share * ahead
        forward.last = share * ahead
        # Frozen weights have no gradients: a backward pass multiplies once.
        backward.products += share * (ahead if work.frozen else back)
    _add_adapters(work, layout, rates, tokens, forward, backward)
    forward.attention, backward.attention = _attention(work, layout, stack, known, rates, tokens)
    elements = tokens * _element_bytes(work, layout) * rates.passes / rates.memory
    forward.elements += elements
    backward.elements += BACKWARD_ELEMENTS * elements
    if narrow:
        forward.elements += (
            sum(CAST_BYTES * share * g * rows * inner for rows, inner, _, g, share in linears) / rates.memory
        )
        backward.elements += (
            sum(CAST_BYTES * share * g * rows * outer for rows, _, outer, g, share in linears) / rates.memory
        )
    return forward, backward


# (rows, inputs, outputs, how many, share of the layers that have it)
Linear = tuple[float, float, float, int, float]


def _projections(work: Work, layout: Layout, tokens: float) -> list[Linear]:
    """Return the linear layers of attention."""
    sizes, latent, tp = work.sizes, work.latent, layout.tp
    if latent is None:
        shapes = [(sizes.hidden, (sizes.query + 2 * sizes.key_value) / tp), (sizes.query / tp, sizes.hidden)]
    else:
        shapes = [(sizes.hidden, latent.width), *((i, o / tp) for i, o in latent.matrices(work.model))]
        shapes.append((work.model.heads * work.model.head_dim / tp, sizes.hidden))
    return [(tokens, inputs, outputs, 1, 1.0) for inputs, outputs in shapes]


def _add_adapters(work: Work, layout: Layout, rates: Rates, tokens: float, forward: Pass, backward: Pass) -> None:
    """Add the seconds of a layer's adapters to both passes.

    With DoRA a forward pass computes the norms of rows, for which it reads the frozen weight in 16 bits, and multiplies it with A. Both
    passes scale the outputs, which the backward pass reads again."""
    rank = 0 if work.model.lora is None else work.model.lora.rank
    for inner, outer in work.adapted(layout):
        for width, height in ((inner, rank), (rank, outer)):
            ahead, back = linear(rates, tokens, width, height)
            forward.products += ahead
            backward.products += back
        if work.decomposed:
            forward.products += linear(rates, outer, inner, rank)[0]
            forward.elements += (2 * inner + 4 * tokens) * outer / rates.memory
            backward.elements += 6 * tokens * outer / rates.memory


def _attention(
    work: Work, layout: Layout, stack: Stack, known: Calibration, rates: Rates, tokens: float
) -> tuple[float, float]:
    model, seq = work.model, work.seq_len
    width = work.sizes.query / layout.tp
    if stack.attention != "unfused":
        # Context parallelism cuts the queries into pieces.
        rate = rates.pieces if layout.cp > 1 and stack.attention_pieces else rates.attention
        forward = 4 * tokens * _keys(work) * width / rate
        return forward, BACKWARD_ATTENTION * forward
    heads = max(1, round(model.heads / layout.tp)) * layout.micro_batch
    forward = product(rates, seq / layout.cp, seq, model.head_dim, groups=heads)
    forward += product(rates, seq / layout.cp, model.head_dim, seq, groups=heads)
    scores = tokens * seq * model.heads / layout.tp
    forward += scores * known.constants["score_bytes"] / rates.memory
    return forward, 2 * forward


def _keys(work: Work) -> float:
    """Return how many keys a query sees on average, over all layers."""
    model, seq = work.model, work.seq_len
    if not architecture_of(model).two_sequences:
        keys = layer_keys(model, seq)
        return sum(keys) / len(keys)
    decoder, targets = work.sizes.decoder, work.sizes.decoder.targets
    return seq * decoder.mean(1, targets * targets / 2 + targets) / decoder.mean(1, 2 * targets)


def _element_bytes(work: Work, layout: Layout) -> float:
    """Return the bytes per token that a layer's forward pass reads and writes outside matmuls.

    These are norms and residual additions on the residual stream, and rope and activation function on tensor-parallel shards.
    """
    sizes, model = work.sizes, work.model
    stream = 20.0 * sizes.stream / (layout.tp if layout.sp else 1)
    inner = 2 * (3 if model.gated else 2) * (sizes.mlp_width + sizes.expert_width)
    routing = 8.0 * sizes.hidden * sizes.expert_layers * (model.moe.top_k if model.moe else 0)
    return stream + (inner + routing + 4 * (sizes.query + sizes.key_value)) / layout.tp


def layer_parameters(work: Work, layout: Layout) -> float:
    """Return the parameters of an average layer on one rank, before sharding over data-parallel ranks."""
    return (work.sizes.attention + work.sizes.mlp) / layout.tp + expert_parameters(work, layout)


def expert_parameters(work: Work, layout: Layout) -> float:
    sizes, moe = work.sizes, work.model.moe
    return 0.0 if moe is None else sizes.expert_layers * moe.experts * sizes.expert / layout.ep / layout.expert_tp


def accumulated_bytes(work: Work, layout: Layout, stack: Stack) -> float:
    """Return the bytes that gradient accumulation moves for one layer, beside its matmuls."""
    experts = 0.0 if work.frozen else expert_parameters(work, layout)
    others = sum(work.adapters(layout)) if work.frozen else layer_parameters(work, layout) - experts
    parts = ((others, False), (experts, True))
    apart = sum(size for size, grouped in parts if not _sums_in_matmul(work, layout, stack, grouped=grouped))
    return apart * _accumulated(work, layout, stack)


def _accumulated(work: Work, layout: Layout, stack: Stack) -> float:
    """Return the bytes that gradient accumulation moves for a parameter. Sharded gradients are reduced first, and cost nothing here."""
    return stack.accumulated if _accumulates(work, layout, stack) else 0.0


def _sums_in_matmul(work: Work, layout: Layout, stack: Stack, *, grouped: bool) -> bool:
    """Return whether the matmul that computes a gradient adds it to the sum. Neither matmuls of groups nor 8-bit ones can. With FSDP in a
    pipeline they do, but how long that takes has not been measured: it is planned as if they did not."""
    can = stack.sums_in_matmul and layout.zero < 3 and not grouped and work.precision not in ("fp8", "fp4")
    return not stack.accumulated or (can and _accumulates(work, layout, stack))


def _accumulates(work: Work, layout: Layout, stack: Stack) -> bool:
    once = work.micro_batches(layout) == 1 and stack.gradient_once < stack.gradient
    return not once and not gathers(layout)


def gathers(layout: Layout) -> bool:
    """Return whether weights are all-gathered in each micro-batch. In a pipeline they stay gathered."""
    return layout.zero == 3 and layout.pp == 1


def replays(work: Work, layout: Layout, stack: Stack) -> bool:
    """Return whether passes run as CUDA graphs."""
    return stack.replays and work.replays(layout)


def host_seconds(work: Work, layout: Layout, stack: Stack, known: Calibration) -> float:
    """Return the host seconds for one layer and micro-batch: its modules in the forward pass, and twice that in the backward pass.

    A CUDA graph replay takes no host time. If the graph leaves experts out, their share of a layer remains.
    """
    if replays(work, layout, stack):
        return 0.0
    again = 0
    if layout.recompute == "full":
        again = 3 if stack.hooked else 1
    modules = known.constants["launch.plain" if stack.plain else "launch.modules"]
    share = work.sizes.expert_layers
    others = 1 - share if stack.replays_routed else 1.0
    experts = known.constants["launch.experts"] * (stack.dispatch if layout.ep > 1 else 1.0)
    return (3 + again) * modules * (others + (experts - 1) * share)


def remade(layout: Layout, stack: Stack, forward: Pass) -> float:
    """Return the seconds of recompute in the backward pass."""
    if layout.recompute == "none":
        return 0.0
    if layout.recompute == "full":
        return forward.total - (forward.last if stack.early_stop else 0.0)
    if stack.selective == "scores":
        return forward.attention if stack.attention == "unfused" else 0.0
    return forward.elements + (forward.products / 2 if stack.selective == "half" else 0.0)


def embedding_seconds(work: Work, layout: Layout, stack: Stack, rates: Rates, tokens: float) -> float:
    """Return the seconds of the embedding for one micro-batch: of its activations, and of its parameters, whose gradient is zeroed."""
    activations = (EMBEDDED_BYTES + SUMMED_BYTES * (layout.tp > 1)) * tokens * work.sizes.hidden
    zeroed = 0 if work.frozen else 2
    of_parameters = (zeroed + _end_bytes(work, layout, stack)) * work.sizes.embedding / layout.tp
    return stack.ends * (activations + of_parameters) / rates.memory


def head_seconds(work: Work, layout: Layout, stack: Stack, rates: Rates, tokens: float) -> float:
    """Return the seconds of output head and loss for one micro-batch."""
    # All stacks pad the vocabulary.
    vocab = work.model.padded_vocab(layout.tp) // layout.tp
    tokens *= work.sizes.predicted
    ahead, back = linear(rates, tokens, work.sizes.hidden, vocab)
    once, casts = ahead, 0.0
    if rounds_head(work, stack):
        once, back = linear(rates, tokens, work.sizes.hidden, vocab, narrow=True)
        passes = work.micro_batches(layout) if keeps_rounded(work, layout, stack) else 1
        casts = CAST_BYTES * work.sizes.hidden * (vocab / passes + tokens * (not work.frozen)) / rates.memory
    # A tied head on the rank of the embedding is the same parameter.
    own = 0.0 if work.model.tied and layout.pp == 1 else work.sizes.hidden * vocab
    copies = stack.ends * _end_bytes(work, layout, stack) * own / rates.memory
    return ahead + (once if work.frozen else back) + stack.loss * tokens * vocab / rates.memory + casts + copies


def rounds_head(work: Work, stack: Stack) -> bool:
    """Return whether the backward matmuls of the output head are 8-bit."""
    return stack.narrow_head and work.precision in ("fp8", "fp4") and not work.sample_losses


def keeps_rounded(work: Work, layout: Layout, stack: Stack) -> bool:
    """Return whether the 8-bit copies of weights are kept for all micro-batches of a step."""
    narrow = work.precision in ("fp8", "fp4")
    return stack.rounds_once and narrow and work.micro_batches(layout) > 1 and layout.zero < 3


def _end_bytes(work: Work, layout: Layout, stack: Stack) -> float:
    """Return the bytes moved for a parameter of embedding or head, beside matmuls. What is gathered stays until the backward pass."""
    if gathers(layout):
        return (2 - work.frozen) / 3 * stack.copied
    return 0.0 if work.frozen else _accumulated(work, layout, stack)
