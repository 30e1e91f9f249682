"""Memory of every pipeline stage, by category, before anything is allocated.

Predicted is the peak that `torch.cuda.max_memory_allocated` would report on a rank of the stage. The allocator reserves
more (`reserved`: a stated share for fragmentation), and the device shows more still (`device`: CUDA's context and NCCL's
buffers), which is what has to fit on the card.

Activations are counted tensor by tensor for what a layer keeps for its backward pass, in bytes of a token: the inputs
and outputs of both norms (8 h; with dropout 2 h of masks), which only sequence parallelism splits; queries, keys and
values, attention's result, and the MLP's inner tensors, which tensor parallelism splits. For a GPT that is the 34 h of
Korthikanti et al. (2205.05198), and 10 h + 24 h / tp without sequence parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import ceil

from argosy.config.counts import WIDE
from argosy.config.optimizer_rule import Rule
from argosy.config.optimizers import DEFAULT
from argosy.plan.calibration import Calibration, Stack
from argosy.plan.hardware import GIB
from argosy.plan.layouts import Layout, Work, stage_layers

LOSS_CHUNK = GIB  # of logits at a time, where the loss is made in chunks


@dataclass(frozen=True)
class StageMemory:
    """GiB on one rank of a stage, when it is fullest."""

    weights: float
    gradients: float
    optimiser: float
    activations: float
    logits: float
    buffers: float
    communication: float
    overhead: float  # of the allocator and the device: not in `allocated`

    @property
    def allocated(self) -> float:
        state = self.weights + self.gradients + self.optimiser
        return state + self.activations + self.logits + self.buffers + self.communication

    @property
    def device(self) -> float:
        """What has to fit on the card."""
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
    weights, gradients, optimiser = _state(work, layout, stack, dense, experts, updated)
    tokens = work.seq_len * layout.micro_batch / layout.cp
    wide = 2.0 if work.precision == "fp32" else 1.0  # against the 16 bits that activations are counted in
    kept, again = (wide * part for part in _activations(work, layout, stack, stage, layers, tokens))
    logits = wide * _logits(work, layout, stack, tokens) if last else 0.0
    moments = [(gradients, kept + again, logits), (gradients + optimiser * stack.widened / stack.optimiser, 0.0, 0.0)]
    if stack.chunked_loss:
        begun = gradients if work.micro_batches(layout) > 1 else 0.0
        moments = [(begun, kept, logits), (begun, kept + again, 0.0), (gradients, again, 0.0)]
    moments.append((gradients + work.rule.working_bytes(_largest_matrix(work, layout)), 0.0, 0.0))
    buffers, communication = (wide * part for part in _transient(work, layout, stack, tokens, dense + experts, layers))
    parts = [weights, optimiser, *max(moments, key=sum), buffers, communication]
    overhead = calibration.fragmentation * sum(parts) / GIB + calibration.context
    weights, optimiser, gradients, activations, logits, buffers, communication = (part / GIB for part in parts)
    return StageMemory(weights, gradients, optimiser, activations, logits, buffers, communication, overhead)


def stage_parameters(work: Work, layout: Layout, layers: int, *, first: bool, last: bool) -> tuple[float, float]:
    """(shared by all ranks of a data-parallel group, in routed experts) on one rank, before sharding over data."""
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
    """Each rule of the optimiser with the parameters of one rank that it updates, of `dense` and of `experts`. All of the latter are
    matrices inside the layers."""
    matrices = layers * (work.sizes.attention + work.sizes.mlp) / layout.tp
    shares = work.rule.shares(matrices, dense - matrices)
    return [(rule, number, experts if rule is work.rule else 0.0) for rule, number in shares]


def _state(
    work: Work, layout: Layout, stack: Stack, dense: float, experts: float, updated: list[tuple[Rule, float, float]]
) -> tuple[float, float, float]:
    """Bytes of weights, gradients and optimiser, each sharded as the ZeRO stage says. A stack's figures are for the default rule;
    `updated` says how many parameters have which rule's state."""
    once = work.micro_batches(layout) == 1 and layout.shards * layout.copies == 1  # else they are summed in more bits
    weight, gradient, optimiser = stack.weight, stack.gradient_once if once else stack.gradient, stack.optimiser
    if work.precision == "fp32" or (stack.sharded_masters and layout.zero >= 3):  # a parameter is its own master
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


def _largest_matrix(work: Work, layout: Layout) -> float:
    """Elements of the largest matrix inside the layers: whole, and of experts as many as a rank holds."""
    model, moe = work.model, work.model.moe
    widths = [model.ffn, model.heads * model.head_dim]
    stacked = 0.0 if moe is None else moe.experts / layout.ep * moe.ffn
    return model.hidden * max(*widths, stacked)


def in_flight(layout: Layout, micro_batches: int, stage: int) -> float:
    """Micro-batches whose activations a stage holds at once, of all its layers. 1F1B: those ahead of it in the pipeline
    and its own. Interleaved: its warm-up, in chunks. V-shaped: every rank as many as the first of 1F1B, and where forward
    and backward passes are paired one more."""
    if layout.schedule == "gpipe":
        return micro_batches
    if layout.is_v_shaped:
        return min(micro_batches, layout.pp + (layout.schedule == "dualpipev"))
    if layout.vpp == 1:
        return min(micro_batches, layout.pp - stage)
    warm_up = 2 * (layout.pp - stage - 1) + (layout.vpp - 1) * layout.pp + 1
    return min(micro_batches * layout.vpp, warm_up) / layout.vpp


def layer_activations(work: Work, layout: Layout, stack: Stack) -> tuple[float, float]:
    """Bytes of a token that a layer keeps (with what the layout recomputes left out), and that one has while it runs."""
    sizes, model = work.sizes, work.model
    outer = layout.tp if layout.sp else 1
    stream = (10 if model.dropout else 8) * sizes.stream + 4 * sizes.latent
    key_value = sizes.query if stack.repeats_heads else sizes.key_value
    projections = 2 * (2 * sizes.query + 2 * key_value)
    inner = 2 * (3 if model.gated else 2)
    routed = inner * sizes.expert_width + 2 * sizes.hidden * sizes.expert_layers * (model.moe.top_k if model.moe else 0)
    kept_of_score = 5 if model.dropout else 2  # the softmax; with dropout its mask and result as well
    scores = kept_of_score * model.heads * work.seq_len / layout.cp if stack.attention == "unfused" else 0.0
    split = projections + inner * sizes.mlp_width + routed
    if stack.narrow_inputs and work.precision in ("fp8", "fp4"):
        split -= sizes.mlp_width + sizes.expert_width  # the second product's input is kept in 8 bits
    whole = stream / outer + (split + scores) / layout.tp
    # Sequence parallelism gathers the whole sequence before a product, and has it whole after one, for the layer at work.
    # Beside it are the gradients of the MLP's inner tensors, in place of its second product's input.
    running = whole + (6 * sizes.hidden if layout.sp else 0)
    running += (inner - 2) * (sizes.mlp_width + sizes.expert_width) / layout.tp
    if layout.recompute == "none":
        return whole, running
    if layout.recompute == "full":
        return 2 * sizes.hidden / outer, running
    if stack.selective == "scores":
        return whole - scores / layout.tp, running
    products = projections + (inner - 2) * (sizes.mlp_width + sizes.expert_width)
    share = 0.5 if stack.selective == "half" else 1.0
    return 2 * sizes.hidden / outer + share * (products / layout.tp + 4 * sizes.hidden / outer), running


def _activations(
    work: Work, layout: Layout, stack: Stack, stage: int, layers: int, tokens: float
) -> tuple[float, float]:
    """Bytes kept of the micro-batches in flight, and those of a layer that is made again or at work."""
    kept, running = layer_activations(work, layout, stack)
    flying = in_flight(layout, work.micro_batches(layout), stage)
    ends = 2 * work.sizes.hidden * any(layout.ends(stage)) / (layout.tp if layout.sp else 1)
    return tokens * flying * (layers * kept + ends), tokens * (running - kept)


def _logits(work: Work, layout: Layout, stack: Stack, tokens: float) -> float:
    """Bytes of output head and loss at their peak. A chunked loss has the logits of two chunks, the one at work and the one
    before, and by its end the gradients of the head's input and, in 32 bits, of its weight."""
    vocab, judged = work.model.vocab_size / layout.tp, tokens * work.sizes.predicted
    if not stack.chunked_loss:
        return judged * vocab * stack.logit
    whole = 2 * judged * vocab
    chunks = ceil(whole / LOSS_CHUNK)
    return min(2, chunks) * whole / chunks + work.sizes.hidden * (2 * judged + 4 * vocab)


def _transient(
    work: Work, layout: Layout, stack: Stack, tokens: float, parameters: float, layers: int
) -> tuple[float, float]:
    """Workspaces, and what communication holds. ZeRO-3: two gathered layers (the one in use and the next), one layer's
    whole gradients, and the ends; in a pipeline, where gathering for each micro-batch would cost too much, the whole
    stage's weights and gradients. Else: what pipeline stages pass on, and a bucket of gradients and one of weights, where
    the stack copies them to exchange them."""
    sizes = work.sizes
    buffers = 4.0 * tokens * sizes.hidden / (layout.tp if layout.sp else 1)  # gradients of the residual stream
    if layout.zero < 3:
        copied = (stack.reduced + 2) * min(stack.bucket, parameters) if layout.zero else 0.0
        return buffers, copied + 4.0 * tokens * sizes.hidden / layout.tp * (layout.pp > 1)
    if layout.pp > 1:
        return buffers, (2 + 4) * parameters
    ends = sizes.embedding / layout.tp * (1 if work.model.tied else 2)
    layer = (parameters - ends) / layers
    gathered = 2 * layer if work.reshard else layers * layer
    return buffers, 2 * gathered + 4 * layer + 2 * ends
