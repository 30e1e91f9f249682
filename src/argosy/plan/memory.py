"""Predicted memory of every pipeline stage, by category, before anything is allocated.

The prediction is the peak that `torch.cuda.max_memory_allocated` would report on a rank of the stage. The allocator reserves more (a
stated share for fragmentation), and the device uses more still (CUDA's context and NCCL's buffers). The sum, `device`, has to fit on
the card.

Activations are counted tensor by tensor, as what a layer keeps for its backward pass, in bytes per token. The inputs and outputs of
both norms (8 h, plus 2 h of masks with dropout) are split only by sequence parallelism. Queries, keys, values, the attention output
and the MLP's inner tensors are split by tensor parallelism. For a GPT this gives the 34 h of Korthikanti et al. (2205.05198), and
10 h + 24 h / tp without sequence parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import ceil

from argosy.config.counts import WIDE
from argosy.config.optimizer_rule import Rule
from argosy.config.optimizers import DEFAULT
from argosy.plan.calibration import Calibration, Stack
from argosy.plan.hardware import GIB
from argosy.plan.layer import keeps_rounded, rounds_head
from argosy.plan.layouts import Layout, Work, stage_layers

# Bytes of logits in one chunk of a chunked loss.
LOSS_CHUNK = GIB
# Bytes of gradients in 8 bits for one matmul.
LOSS_GROUP = 2 * GIB


@dataclass(frozen=True)
class StageMemory:
    """The peak memory on one rank of a stage, in GiB."""

    weights: float
    gradients: float
    optimiser: float
    activations: float
    logits: float
    buffers: float
    communication: float
    # Overhead of the allocator and the device, not part of `allocated`.
    overhead: float

    @property
    def allocated(self) -> float:
        state = self.weights + self.gradients + self.optimiser
        return state + self.activations + self.logits + self.buffers + self.communication

    @property
    def device(self) -> float:
        """The memory that has to fit on the card."""
        return self.allocated + self.overhead

    def as_dict(self) -> dict[str, float]:
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        return {k: round(v, 3) for k, v in {**parts, "allocated": self.allocated, "device": self.device}.items()}


def memory_of(work: Work, layout: Layout, stack: Stack, calibration: Calibration) -> list[StageMemory]:
    """Return the memory of each pipeline stage."""
    return [stage_memory(work, layout, stack, calibration, stage) for stage in range(layout.pp)]


def stage_memory(work: Work, layout: Layout, stack: Stack, calibration: Calibration, stage: int) -> StageMemory:
    layers = stage_layers(work, layout, levelled=stack.levelled)[stage]
    first, last = layout.ends(stage)
    dense, experts = stage_parameters(work, layout, layers, first=first, last=last)
    updated = updated_by(work, layout, layers, dense, experts)
    trained = (layers * sum(work.adapters(layout)), 0.0) if work.frozen else (dense, experts)
    weights, gradients, optimiser = _state(work, layout, stack, *trained, updated)
    if work.frozen:
        weights += _frozen_bytes(work, layout, stack, dense, experts)
    tokens = work.seq_len * layout.micro_batch / layout.cp
    # Activations are counted in 16 bits, and take twice that in fp32.
    wide = 2.0 if work.precision == "fp32" else 1.0
    kept, again = (wide * part for part in _activations(work, layout, stack, stage, layers, tokens))
    logits = wide * _logits(work, layout, stack, tokens) if last else 0.0
    moments = [(gradients, kept + again, logits), (gradients + optimiser * stack.widened / stack.optimiser, 0.0, 0.0)]
    if stack.chunked_loss:
        begun = gradients if work.micro_batches(layout) > 1 else 0.0
        moments = [(begun, kept, logits), (begun, kept + again, 0.0), (gradients, again, 0.0)]
    moments.append((gradients + work.rule.working_bytes(_largest_matrix(work, layout)), 0.0, 0.0))
    buffers, communication = (wide * part for part in _transient(work, layout, stack, tokens, dense + experts, layers))
    if last and keeps_rounded(work, layout, stack):
        buffers += _rounded_head(work, layout, stack)
    parts = [weights, optimiser, *max(moments, key=sum), buffers, communication]
    overhead = calibration.fragmentation * sum(parts) / GIB + calibration.context
    weights, optimiser, gradients, activations, logits, buffers, communication = (part / GIB for part in parts)
    return StageMemory(weights, gradients, optimiser, activations, logits, buffers, communication, overhead)


def stage_parameters(work: Work, layout: Layout, layers: int, *, first: bool, last: bool) -> tuple[float, float]:
    """Return the dense and the routed-expert parameters on one rank, before data-parallel sharding.

    All ranks of a data-parallel group share the dense parameters.
    """
    sizes, moe = work.sizes, work.model.moe
    dense = layers * ((sizes.attention + sizes.mlp) / layout.tp + sizes.other)
    if first:
        dense += sizes.embedding / layout.tp
    if last and (not work.model.tied or layout.pp > 1):
        dense += sizes.head / layout.tp
    routed = (
        0.0
        if moe is None
        else layers * sizes.expert_layers * moe.experts * sizes.expert / (layout.ep * layout.expert_tp)
    )
    return dense, routed


def updated_by(
    work: Work, layout: Layout, layers: int, dense: float, experts: float
) -> list[tuple[Rule, float, float]]:
    """Return each rule of the optimiser with the number of `dense` and of `experts` parameters it updates on one rank.

    All expert parameters are in matrices inside the layers.
    """
    if work.frozen:
        matrices, magnitudes = (layers * number for number in work.adapters(layout))
        return [(rule, number, 0.0) for rule, number in work.rule.shares(matrices, magnitudes)]
    matrices = layers * (work.sizes.attention + work.sizes.mlp) / layout.tp
    shares = work.rule.shares(matrices, dense - matrices)
    return [(rule, number, experts if rule is work.rule else 0.0) for rule, number in shares]


def _state(
    work: Work, layout: Layout, stack: Stack, dense: float, experts: float, updated: list[tuple[Rule, float, float]]
) -> tuple[float, float, float]:
    """Return the bytes of weights, gradients and optimiser state, each sharded by ZeRO stage.

    A stack's figures are for the default rule. `updated` says how many parameters have the state of which rule.
    """
    # Gradients that are summed, over micro-batches or ranks, take more bits.
    once = work.micro_batches(layout) == 1 and layout.shards * layout.copies == 1
    weight, gradient, optimiser = stack.weight, stack.gradient_once if once else stack.gradient, stack.optimiser
    # Here a parameter is its own master weight.
    if work.precision == "fp32" or (stack.sharded_masters and layout.zero >= 3):
        weight, gradient, optimiser = WIDE, max(gradient, WIDE), DEFAULT.state_bytes
    shards = [layout.shards if layout.zero >= stage else 1 for stage in (3, 2, 1)]

    def spread(of_dense: float, of_experts: float, shard: int) -> float:
        return of_dense / shard + of_experts / (1 if shard == 1 else layout.expert_shards(shard))

    held = [
        size * spread(dense, experts, shard) for size, shard in zip((weight, gradient, optimiser), shards, strict=True)
    ]
    for rule, of_dense, of_experts in updated:
        held[2] += (rule.state_bytes - DEFAULT.state_bytes) * spread(of_dense, of_experts, shards[2])
    return held[0], held[1], held[2]


def _frozen_bytes(work: Work, layout: Layout, stack: Stack, dense: float, experts: float) -> float:
    """Return the bytes of weights that are not trained, which need no master weights."""
    shards = layout.shards if layout.zero >= 3 else 1
    over = 1 if shards == 1 else layout.expert_shards(shards)
    return (WIDE if work.precision == "fp32" else stack.weight) * (dense / shards + experts / over)


def _largest_matrix(work: Work, layout: Layout) -> float:
    """Return the number of elements of the largest whole matrix inside the layers. Stacked experts count as many as a rank holds."""
    model, moe = work.model, work.model.moe
    widths = [model.ffn, model.heads * model.head_dim]
    stacked = 0.0 if moe is None else moe.experts / layout.ep * moe.ffn
    return model.hidden * max(*widths, stacked)


def in_flight(layout: Layout, micro_batches: int, stage: int) -> float:
    """Return the number of micro-batches whose activations a stage holds at once, for all its layers.

    1F1B: one for the stage and one for each stage after it. Interleaved: the warm-up, counted in chunks. V-shaped: every rank holds as
    many as the first rank of 1F1B, and one more if forward and backward passes are paired (DualPipeV).
    """
    if layout.schedule == "gpipe":
        return micro_batches
    if layout.is_v_shaped:
        return min(micro_batches, layout.pp + (layout.schedule == "dualpipev"))
    if layout.vpp == 1:
        return min(micro_batches, layout.pp - stage)
    warm_up = 2 * (layout.pp - stage - 1) + (layout.vpp - 1) * layout.pp + 1
    return min(micro_batches * layout.vpp, warm_up) / layout.vpp


def kept_of_attention(work: Work, layout: Layout, stack: Stack) -> tuple[float, float]:
    """Return the bytes per token that attention keeps between its input and its output, of all tensor-parallel ranks: of queries, keys and
    values and of what attention writes, and beside these."""
    query = work.sizes.query
    key_value = query if stack.repeats_heads else work.sizes.key_value
    # Norms of the heads keep queries and keys as they were.
    beside = (query + key_value) * work.model.qk_norm
    if layout.cp > 1 and stack.attention_pieces:
        # Pieces of the queries have the keys of all ranks, and what they write is kept once more, joined.
        beside += query + 2 * key_value * (layout.cp - 1)
    return 4.0 * (query + key_value), 2.0 * beside


def layer_activations(work: Work, layout: Layout, stack: Stack) -> tuple[float, float]:
    """Return the bytes per token that a layer keeps, without what is recomputed, and the bytes per token of a running layer."""
    sizes, model = work.sizes, work.model
    outer = layout.tp if layout.sp else 1
    stream = (10 if model.dropout else 8) * sizes.stream + 4 * sizes.latent
    projections, beside = kept_of_attention(work, layout, stack)
    inner = 2 * (3 if model.gated else 2)
    routed = inner * sizes.expert_width + 2 * sizes.hidden * sizes.expert_layers * (model.moe.top_k if model.moe else 0)
    # Bytes per score: the softmax, and with dropout its mask and result as well.
    kept_of_score = 5 if model.dropout else 2
    scores = kept_of_score * model.heads * work.seq_len / layout.cp if stack.attention == "unfused" else 0.0
    split = projections + beside + inner * sizes.mlp_width + routed
    if stack.narrow_inputs and work.precision in ("fp8", "fp4"):
        # The input of the MLP's second matmul is kept in 8 bits.
        split -= sizes.mlp_width + sizes.expert_width
    # DoRA keeps the outputs of adapted layers as they are before they are scaled.
    unscaled = sum(2 * outputs for _, outputs in work.adapted(layout)) if work.decomposed else 0.0
    whole = stream / outer + (split + scores) / layout.tp + unscaled
    # With sequence parallelism, the running layer holds the whole sequence before and after a matmul. It also holds the gradients of
    # the MLP's inner tensors, in place of the input of its second matmul.
    running = whole + (6 * sizes.hidden if layout.sp else 0)
    running += (inner - 2) * (sizes.mlp_width + sizes.expert_width) / layout.tp
    if layout.recompute == "none":
        # The inputs of attention and MLP, of all tokens.
        gathered = 4 * sizes.hidden * (1 - 1 / layout.tp) if layout.sp and stack.keeps_gathered else 0.0
        return whole + gathered, running + gathered
    if layout.recompute == "full":
        return 2 * sizes.hidden / outer, running
    if stack.selective == "scores":
        return whole - scores / layout.tp, running
    products = projections + (inner - 2) * (sizes.mlp_width + sizes.expert_width)
    share = 0.5 if stack.selective == "half" else 1.0
    kept = 2 * sizes.hidden / outer + share * (products / layout.tp + 4 * sizes.hidden / outer)
    # The products of adapters are matmuls too.
    return kept + share * sum(2 * outputs for _, outputs in work.adapted(layout)), running


def _activations(
    work: Work, layout: Layout, stack: Stack, stage: int, layers: int, tokens: float
) -> tuple[float, float]:
    """Return the activation bytes kept for micro-batches in flight, and the extra bytes of the layer that runs or is recomputed."""
    kept, running = layer_activations(work, layout, stack)
    flying = in_flight(layout, work.micro_batches(layout), stage)
    ends = 2 * work.sizes.hidden * any(layout.ends(stage)) / (layout.tp if layout.sp else 1)
    return tokens * flying * (layers * kept + ends), tokens * (running - kept)


def _logits(work: Work, layout: Layout, stack: Stack, tokens: float) -> float:
    """Return the peak bytes of output head and loss.

    A chunked loss holds the logits of two chunks, the current and the previous one. At its end it also holds the gradients of the head's
    input and, in 32 bits, of the head's weight. If the vocabulary is padded, it multiplies a padded copy of the weight. In 8 bits it holds
    the transposed gradients of a group of chunks, of one chunk if the weight is frozen, and the logits of one with their gradient; then, in
    32 bits, the gradient of the weight and what the group adds to it.
    """
    vocab, judged = work.model.padded_vocab(layout.tp) / layout.tp, tokens * work.sizes.predicted
    if not stack.chunked_loss:
        return judged * vocab * stack.logit
    whole = 2 * judged * vocab
    chunks = ceil(whole / LOSS_CHUNK)
    # 8-bit matmuls need a multiple of 16 columns.
    is_padded = vocab * layout.tp > work.model.vocab_size or (rounds_head(work, stack) and vocab % 16 > 0)
    copied = 2 * vocab if is_padded else 0.0
    of_weight = 0.0 if work.frozen else 4 * vocab * max(1, work.sample_losses * layout.micro_batch)
    ends = work.sizes.hidden * (2 * judged + copied)
    of_weight *= work.sizes.hidden
    if not rounds_head(work, stack):
        return min(2, chunks) * whole / chunks + of_weight + ends
    each = whole / chunks
    together = 1 if work.frozen else min(chunks, max(1, int(LOSS_GROUP // (each / 2))))
    # In a later group's chunk, or at the matmul at a group's end.
    most = max(1.5 * each + of_weight * (together < chunks), of_weight * (1 + (together < chunks)))
    rounded = 0.0 if keeps_rounded(work, layout, stack) else _rounded_head(work, layout, stack)
    return together * each / 2 + most + ends + rounded


def _rounded_head(work: Work, layout: Layout, stack: Stack) -> float:
    """Return the bytes of the output head in 8 bits. Only its transpose is kept."""
    return work.sizes.hidden * work.model.padded_vocab(layout.tp) / layout.tp if rounds_head(work, stack) else 0.0


def _transient(
    work: Work, layout: Layout, stack: Stack, tokens: float, parameters: float, layers: int
) -> tuple[float, float]:
    """Return the bytes of workspaces and of communication buffers.

    ZeRO-3 holds two gathered layers (the current one and the prefetched one), the unsharded gradients of one layer, and the ends of the
    model. In a pipeline, where an all-gather per micro-batch would cost too much, it holds the weights and gradients of the whole stage.
    Without ZeRO-3, the buffers hold what pipeline stages send to each other. A stack that copies to communicate adds one bucket of
    gradients and one of weights.
    """
    sizes = work.sizes
    # Gradients of the residual stream.
    buffers = 4.0 * tokens * sizes.hidden / (layout.tp if layout.sp else 1)
    if layout.zero < 3:
        if keeps_rounded(work, layout, stack):
            # A byte each, plain and transposed.
            buffers += 2 * layers * (sizes.attention + sizes.mlp) / layout.tp
        copied = (stack.reduced + 2) * min(stack.bucket, parameters) if layout.zero else 0.0
        return buffers, copied + 4.0 * tokens * sizes.hidden / layout.tp * (layout.pp > 1)
    if layout.pp > 1:
        return buffers, (2 if work.frozen else 2 + 4) * parameters
    ends = sizes.embedding / layout.tp * (1 if work.model.tied else 2)
    layer = (parameters - ends) / layers
    gathered = 2 * layer if work.reshard else layers * layer
    return buffers, 2 * gathered + (0 if work.frozen else 4 * layer) + 2 * ends
