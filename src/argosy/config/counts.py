"""Parameters and training FLOPs of a model spec, computed without building it.

FLOPs follow one convention, named wherever they are shown. A multiply-add is two FLOPs. Training costs three forward passes: the
backward pass costs twice the forward pass. Only matmuls and attention count, with the output head but without the embedding
look-up. Causal attention counts half, since a token sees half of the sequence on average.

A checkpoint holds fp32 master weights, whatever the training precision is (16-bit parameters are rounded from them), and the
optimiser state, whose tensors its `Rule` declares: two with AdamW, 12 bytes per parameter in all. Untrained buffers have no state.
"""

from __future__ import annotations

from dataclasses import dataclass

from argosy.config.model import ModelSpec
from argosy.config.optimizer_rule import Rule
from argosy.config.optimizers import DEFAULT
from argosy.families.adapter_sizes import AdapterCount, adapter_parameters
from argosy.families.architecture import NORMS_OF_A_BLOCK, architecture_of
from argosy.families.family_registry import plan_of

FLOPS_CONVENTION = "6 x active matmul parameters (4 x frozen ones) + attention, halved where causal; no recompute"
# Target tokens per source token in T5's span corruption: 15% of the tokens in spans of 3.
TARGETS_PER_SOURCE = 114 / 512


@dataclass(frozen=True)
class ParameterCount:
    """Parameter counts of a model.

    Attributes:
        total: stored parameters.
        active: parameters that one token uses; smaller than `total` only with experts.
        matmul: the part of `active` in matmuls, with the output head counted even if it is tied.
        matrices: the part of `total` in trained matrices inside the layers.
        fixed: the part of `total` that no gradient trains.
    """

    total: int
    active: int
    matmul: int
    matrices: int = 0
    fixed: int = 0


def count_parameters(spec: ModelSpec) -> ParameterCount:
    kind = architecture_of(spec)
    embedding = spec.vocab_size * spec.hidden
    if spec.positions == "learned":
        embedding += spec.max_seq_len * spec.hidden
    if spec.type_vocab_size:
        embedding += spec.type_vocab_size * spec.hidden
    matmul, other, idle = _blocks(spec)
    matrices, ends = matmul, kind.ends(spec)
    matmul += ends.matmul
    other += ends.norms * norm_parameters(spec) + ends.other
    head = spec.vocab_size * spec.hidden if kind.has_vocabulary else 0
    one = embedding + matmul + other + (0 if spec.tied else head)
    # A token passes through only one of the towers.
    towers = kind.towers(spec)
    if spec.lora is not None:
        added = _adapters(spec)
        return ParameterCount(
            total=one + added.total,
            active=one - idle + added.total,
            matmul=matmul - idle + head + added.matrices,
            matrices=added.matrices,
            fixed=one,
        )
    return ParameterCount(
        total=one * towers,
        active=one - idle,
        matmul=matmul - idle + head,
        matrices=matrices * towers,
        fixed=_fixed(spec),
    )


def _adapters(spec: ModelSpec) -> AdapterCount:
    """Count the parameters of all adapters."""
    dense, sparse = adapter_parameters(spec)
    first = spec.layers if spec.moe is None else spec.moe.dense_layers
    return AdapterCount(
        *(first * one + (spec.layers - first) * other for one, other in zip(dense, sparse, strict=True))
    )


def _fixed(spec: ModelSpec) -> int:
    """Count the router biases for load balancing. They have an update rule of their own instead of gradients."""
    moe = spec.moe
    return 0 if moe is None or moe.bias_rate is None else (spec.layers - moe.dense_layers) * moe.experts


def describe_size(spec: ModelSpec) -> str:
    """Return the model's name and its parameter count, and the active count if it is smaller."""
    count = count_parameters(spec)
    active = f", {count.active:,} active" if count.active < count.total else ""
    trained = "" if spec.lora is None else f", {count.total - count.fixed:,} of them trained"
    return f"{spec.preset or spec.family}, {count.total:,} parameters{active}{trained}"


def training_flops_per_token(
    spec: ModelSpec, seq_len: int | None = None, target_len: int | None = None, predicted: float | None = None
) -> float:
    """Return the training FLOPs per token of a sample of `seq_len` tokens (default: the model's maximum length).

    For T5 a sample has `seq_len` encoder tokens and `target_len` decoder tokens, and the result is the average over both. `predicted` is the
    share of the tokens that the output head runs on (default: the architecture's).
    """
    seq, kind = seq_len or spec.max_seq_len, architecture_of(spec)
    width = spec.heads * spec.head_dim
    if kind.two_sequences:
        return _encoder_decoder_flops(spec, seq, target_len or max(1, round(seq * TARGETS_PER_SOURCE)))
    # Two matmuls, queries x keys and scores x values, of two FLOPs per multiply-add.
    attention = 4 * width * sum(layer_keys(spec, seq))
    matmul: float = count_parameters(spec).matmul
    if kind.has_vocabulary:
        share = kind.predicted if predicted is None else predicted
        matmul -= (1 - share) * (kind.ends(spec).matmul + spec.vocab_size * spec.hidden)
    # The backward pass computes no gradients of frozen weights.
    frozen = 0.0 if spec.lora is None else matmul - _adapters(spec).matrices
    return 3 * (2 * matmul + attention) - 2 * frozen


def layer_flops(spec: ModelSpec, seq_len: int) -> tuple[list[float], float]:
    """Return the forward FLOPs of each layer for one sample, encoder layers before decoder layers, and those of the output head.

    Targets of an encoder-decoder are as long as its task makes them by default."""
    width, kind = spec.heads * spec.head_dim, architecture_of(spec)
    attention, dense = attention_parameters(spec)[0], mlp_parameters(spec, spec.ffn)[0]
    head = 2.0 * spec.hidden * spec.vocab_size * seq_len * kind.has_vocabulary
    if kind.two_sequences:
        target = max(1, round(seq_len * TARGETS_PER_SOURCE))
        each = zip(kind.stacks(spec), _sides_flops(spec, seq_len, target), strict=True)
        return [flops for count, flops in each for _ in range(count)], head * target / seq_len
    head = kind.predicted * (head + 2.0 * kind.ends(spec).matmul * seq_len)
    moe, sparse = spec.moe, 0
    if moe is not None:
        expert = mlp_parameters(spec, moe.ffn)[0]
        sparse = (moe.top_k + moe.shared_experts) * expert + spec.hidden * (moe.experts + moe.shared_gate)
    first = spec.layers if moe is None else moe.dense_layers
    mlps = [dense] * first + [sparse] * (spec.layers - first)
    each_keys = layer_keys(spec, seq_len)
    return [
        seq_len * (2 * (attention + mlp) + 4 * width * keys) for mlp, keys in zip(mlps, each_keys, strict=True)
    ], head


def layer_keys(spec: ModelSpec, seq: int) -> list[float]:
    """Return how many keys a query sees on average in each layer.

    This is the whole sequence, or half of it with causal attention, or less if the layer has a sliding window.
    """
    plan = plan_of(spec)
    if not architecture_of(spec).causal:
        return [float(seq)] * len(plan)
    return [_causal_keys(seq, layer.attention.window) for layer in plan]


def _causal_keys(seq: int, window: int | None) -> float:
    reach = min(seq, window or seq)
    return reach - reach * reach / (2 * seq)


def norm_parameters(spec: ModelSpec, width: int | None = None) -> int:
    return (2 if spec.norm_bias else 1) * (width or spec.hidden)


def attention_parameters(spec: ModelSpec) -> tuple[int, int]:
    """Return the parameters of one attention block, in matmuls and elsewhere."""
    query, key_value = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    matmul = spec.hidden * (2 * query + 2 * key_value)
    other = (query + 2 * key_value + spec.hidden) if spec.attention_bias else 0
    return matmul, other + (2 * norm_parameters(spec, spec.head_dim) if spec.qk_norm else 0)


def mlp_parameters(spec: ModelSpec, ffn: int) -> tuple[int, int]:
    """Return the parameters of one MLP of inner width `ffn`, in matmuls and elsewhere."""
    inputs = 2 if spec.gated else 1
    return (inputs + 1) * spec.hidden * ffn, (inputs * ffn + spec.hidden) if spec.mlp_bias else 0


def _blocks(spec: ModelSpec) -> tuple[int, int, int]:
    """Return (matmul, other, idle) parameters of the blocks of all stacks; idle ones are in experts a token is not routed to."""
    attention, attention_other = attention_parameters(spec)
    dense, dense_other = mlp_parameters(spec, spec.ffn)
    plan, moe = plan_of(spec), spec.moe
    sparse_layers = 0 if moe is None else spec.layers - moe.dense_layers
    dense_layers = len(plan) - sparse_layers
    matmul = len(plan) * attention + dense_layers * dense
    norms = sum(NORMS_OF_A_BLOCK[layer.norms] for layer in plan)
    other = len(plan) * attention_other + norms * norm_parameters(spec) + dense_layers * dense_other
    # Decoder layers have cross-attention to the output of the first stack.
    for across in architecture_of(spec).stacks(spec)[1:]:
        query_norms = 2 * norm_parameters(spec, spec.head_dim) if spec.qk_norm else 0
        matmul += across * attention
        other += across * (attention_other - query_norms + norm_parameters(spec))
    if moe is None:
        return matmul, other, 0
    expert = mlp_parameters(spec, moe.ffn)[0]
    router = spec.hidden * (moe.experts + moe.shared_gate)
    matmul += sparse_layers * ((moe.experts + moe.shared_experts) * expert + router)
    return matmul, other + _fixed(spec), sparse_layers * (moe.experts - moe.top_k) * expert


def _encoder_decoder_flops(spec: ModelSpec, source: int, target: int) -> float:
    encoder, decoder = _sides_flops(spec, source, target)
    encoder_layers, decoder_layers = architecture_of(spec).stacks(spec)
    head = target * 2 * spec.vocab_size * spec.hidden
    return 3 * (encoder_layers * encoder + decoder_layers * decoder + head) / (source + target)


def _sides_flops(spec: ModelSpec, source: int, target: int) -> tuple[float, float]:
    """Return the forward FLOPs of an encoder layer and of a decoder layer for one sample."""
    attention, mlp = attention_parameters(spec)[0], mlp_parameters(spec, spec.ffn)[0]
    width = spec.heads * spec.head_dim
    # Cross-attention: queries and output come from the target, keys and values from the source.
    query_side = spec.hidden * 2 * width
    encoder = source * (2 * (attention + mlp) + 4 * width * source)
    decoder = target * (2 * (attention + query_side + mlp) + 4 * width * (target / 2 + source))
    return encoder, decoder + source * 2 * (attention - query_side)


WIDE = 4  # bytes of a 32-bit number


def checkpoint_bytes(model: ModelSpec, rule: Rule = DEFAULT) -> int:
    """Bytes of the tensors of one checkpoint; its headers and index are small beside them."""
    count = count_parameters(model)
    others = count.total - count.fixed - count.matrices
    state = sum(part.state_bytes * int(number) for part, number in rule.shares(count.matrices, others))
    return WIDE * count.total + state


def least_state_bytes(model: ModelSpec, rule: Rule = DEFAULT) -> int:
    """Bytes of weights, gradients and optimiser that all ranks of one replica keep at least, in any precision: a 32-bit parameter is its
    own master and has a 32-bit gradient, and a 16-bit one has as many bytes in its copy and gradient together."""
    count = count_parameters(model)
    # Frozen weights have 16 bits at least, and no gradient.
    return checkpoint_bytes(model, rule) - WIDE // 2 * count.fixed + WIDE * (count.total - count.fixed)
