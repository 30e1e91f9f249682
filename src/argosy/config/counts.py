"""Parameters and training FLOPs of a model spec, computed without building it.

FLOPs follow one convention, named wherever they are shown: two per multiply-add, three passes (forward, and backward
at twice its cost), matrix products and attention only, the output head included, the embedding look-up not, and causal
attention counted at the half it needs (a token sees half of the sequence on average).
"""

from __future__ import annotations

from dataclasses import dataclass

from argosy.config.model import ModelSpec, RetrievalSpec

FLOPS_CONVENTION = "6 x active matmul parameters + attention, halved where causal; no recompute"
RELATIVE_BUCKETS = 32  # T5's relative position buckets
PREDICTED_SHARE = 0.15  # of the tokens, as BERT hides them: only there is the head asked
TARGETS_PER_SOURCE = 114 / 512  # tokens, as T5 corrupts: 15% in spans of 3


@dataclass(frozen=True)
class ParameterCount:
    """`total` is what is stored; `active` is what one token uses (smaller only with experts); `matmul` is the part of
    `active` that multiplies each token, with the output head counted even where it is tied. `matrices` is the part of `total` in
    matrices inside the layers, and `fixed` what no gradient trains."""

    total: int
    active: int
    matmul: int
    matrices: int = 0
    fixed: int = 0


def count_parameters(spec: ModelSpec) -> ParameterCount:
    embedding = spec.vocab_size * spec.hidden
    if spec.positions == "learned":
        embedding += spec.max_seq_len * spec.hidden
    if spec.type_vocab_size:
        embedding += spec.type_vocab_size * spec.hidden
    head = spec.vocab_size * spec.hidden

    if spec.architecture == "encoder-decoder":
        matmul, other = _encoder_decoder(spec)
        idle = 0
    else:
        matmul, other, idle = _stack(spec)
    matrices = matmul
    if spec.retrieval is not None:
        return _towers(spec, spec.retrieval, embedding, matmul, other)
    if spec.architecture == "encoder":
        matmul += spec.hidden * spec.hidden  # the masked-LM transform
        other += norm_parameters(spec)  # embedding norm
        other += spec.hidden + norm_parameters(spec) + spec.vocab_size  # transform bias and norm, output bias
        if spec.judges_pairs:
            other += spec.hidden * spec.hidden + spec.hidden + 2 * spec.hidden + 2  # pooler and classifier
    elif spec.architecture == "decoder":
        other += norm_parameters(spec)

    total = embedding + matmul + other + (0 if spec.tied else head)
    return ParameterCount(
        total=total, active=total - idle, matmul=matmul - idle + head, matrices=matrices, fixed=_fixed(spec)
    )


def _fixed(spec: ModelSpec) -> int:
    """Biases that level the load of experts: a rule of their own moves them."""
    moe = spec.moe
    return 0 if moe is None or moe.bias_rate is None else (spec.layers - moe.dense_layers) * moe.experts


def _towers(spec: ModelSpec, retrieval: RetrievalSpec, embedding: int, matmul: int, other: int) -> ParameterCount:
    """A token passes through one of them; only the first of a sequence through the projection."""
    other += norm_parameters(spec)  # embedding norm
    if retrieval.projection is not None:
        other += spec.hidden * retrieval.projection + retrieval.projection
    tower = embedding + matmul + other
    towers = 1 if retrieval.shared else 2
    return ParameterCount(total=tower * towers, active=tower, matmul=matmul, matrices=matmul * towers)


def describe_size(spec: ModelSpec) -> str:
    """The model's name and its parameters, with the active ones where they are fewer."""
    count = count_parameters(spec)
    active = f", {count.active:,} active" if count.active < count.total else ""
    return f"{spec.preset or spec.family}, {count.total:,} parameters{active}"


def training_flops_per_token(spec: ModelSpec, seq_len: int | None = None, target_len: int | None = None) -> float:
    """Training FLOPs for each token of a sample of `seq_len` tokens (default: the model's own length).

    For T5 a sample is `seq_len` encoder tokens and `target_len` decoder tokens, and the figure is for the average one.
    """
    seq = seq_len or spec.max_seq_len
    width = spec.heads * spec.head_dim
    if spec.architecture == "encoder-decoder":
        return _encoder_decoder_flops(spec, seq, target_len or max(1, round(seq * TARGETS_PER_SOURCE)))
    keys = float(seq) if spec.architecture == "encoder" else _causal_keys(seq, spec.window)
    attention = 4 * width * keys * spec.layers  # scores and their product with the values, two FLOPs each
    matmul: float = count_parameters(spec).matmul
    if spec.architecture == "encoder" and spec.retrieval is None:
        matmul -= (1 - PREDICTED_SHARE) * (spec.hidden + spec.vocab_size) * spec.hidden  # head and its transform
    return 3 * (2 * matmul + attention)


def layer_flops(spec: ModelSpec, seq_len: int, target_len: int | None = None) -> tuple[list[float], float]:
    """(forward FLOPs of each layer for one sample, an encoder's layers before its decoder's; those of the output head)"""
    width = spec.heads * spec.head_dim
    attention, dense = attention_parameters(spec)[0], mlp_parameters(spec, spec.ffn)[0]
    head = 2.0 * spec.hidden * spec.vocab_size * seq_len
    if spec.architecture == "encoder-decoder":
        target = target_len or max(1, round(seq_len * TARGETS_PER_SOURCE))
        encoder, decoder = _sides_flops(spec, seq_len, target)
        layers = [encoder] * spec.layers + [decoder] * (spec.decoder_layers or spec.layers)
        return layers, head * target / seq_len
    if spec.architecture == "encoder":
        keys, head = float(seq_len), PREDICTED_SHARE * (head + 2.0 * spec.hidden**2 * seq_len)
    else:
        keys = _causal_keys(seq_len, spec.window)
    moe, sparse = spec.moe, 0
    if moe is not None:
        expert = mlp_parameters(spec, moe.ffn)[0]
        sparse = (moe.top_k + moe.shared_experts) * expert + spec.hidden * (moe.experts + moe.shared_gate)
    first = spec.layers if moe is None else moe.dense_layers
    mlps = [dense] * first + [sparse] * (spec.layers - first)
    return [seq_len * (2 * (attention + mlp) + 4 * width * keys) for mlp in mlps], head


def _causal_keys(seq: int, window: int | None) -> float:
    """Keys a query sees on average: half the sequence, less where a window cuts it."""
    reach = min(seq, window or seq)
    return reach - reach * reach / (2 * seq)


def norm_parameters(spec: ModelSpec, width: int | None = None) -> int:
    return (2 if spec.norm_bias else 1) * (width or spec.hidden)


def attention_parameters(spec: ModelSpec) -> tuple[int, int]:
    """(matmul, other) parameters of one attention block."""
    query, key_value = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    matmul = spec.hidden * (2 * query + 2 * key_value)
    other = (query + 2 * key_value + spec.hidden) if spec.attention_bias else 0
    return matmul, other + (2 * norm_parameters(spec, spec.head_dim) if spec.qk_norm else 0)


def mlp_parameters(spec: ModelSpec, ffn: int) -> tuple[int, int]:
    """(matmul, other) parameters of one MLP of that inner width."""
    inputs = 2 if spec.gated else 1
    return (inputs + 1) * spec.hidden * ffn, (inputs * ffn + spec.hidden) if spec.mlp_bias else 0


def _stack(spec: ModelSpec) -> tuple[int, int, int]:
    """(matmul, other, idle) of all blocks; idle counts the experts a token does not visit."""
    attention_matmul, attention_other = attention_parameters(spec)
    dense_matmul, dense_other = mlp_parameters(spec, spec.ffn)
    moe_layers = 0 if spec.moe is None else spec.layers - spec.moe.dense_layers
    dense_layers = spec.layers - moe_layers
    matmul = spec.layers * attention_matmul + dense_layers * dense_matmul
    other = spec.layers * (attention_other + 2 * norm_parameters(spec)) + dense_layers * dense_other
    idle = 0
    if spec.moe is not None:
        moe = spec.moe
        expert = mlp_parameters(spec, moe.ffn)[0]
        router = spec.hidden * (moe.experts + moe.shared_gate)
        matmul += moe_layers * ((moe.experts + moe.shared_experts) * expert + router)
        other += _fixed(spec)
        idle = moe_layers * (moe.experts - moe.top_k) * expert
    return matmul, other, idle


def _encoder_decoder(spec: ModelSpec) -> tuple[int, int]:
    attention, attention_other = attention_parameters(spec)
    mlp, mlp_other = mlp_parameters(spec, spec.ffn)
    across_other = attention_other - (2 * norm_parameters(spec, spec.head_dim) if spec.qk_norm else 0)
    decoder_layers = spec.decoder_layers or spec.layers
    matmul = spec.layers * (attention + mlp) + decoder_layers * (2 * attention + mlp)
    other = spec.layers * (attention_other + mlp_other) + decoder_layers * (attention_other + across_other + mlp_other)
    norms = (2 * spec.layers + 3 * decoder_layers + 2) * norm_parameters(spec)
    return matmul, other + norms + 2 * RELATIVE_BUCKETS * spec.heads


def _encoder_decoder_flops(spec: ModelSpec, source: int, target: int) -> float:
    encoder, decoder = _sides_flops(spec, source, target)
    decoder_layers = spec.decoder_layers or spec.layers
    head = target * 2 * spec.vocab_size * spec.hidden
    return 3 * (spec.layers * encoder + decoder_layers * decoder + head) / (source + target)


def _sides_flops(spec: ModelSpec, source: int, target: int) -> tuple[float, float]:
    """Forward FLOPs of an encoder's and of a decoder's layer for one sample."""
    attention, mlp = attention_parameters(spec)[0], mlp_parameters(spec, spec.ffn)[0]
    width = spec.heads * spec.head_dim
    query_side = (
        spec.hidden * 2 * width
    )  # cross attention: queries and output from the target, keys and values from the source
    encoder = source * (2 * (attention + mlp) + 4 * width * source)
    decoder = target * (2 * (attention + query_side + mlp) + 4 * width * (target / 2 + source))
    return encoder, decoder + source * 2 * (attention - query_side)
