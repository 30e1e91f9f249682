"""Position encodings, and the context that all blocks of a forward pass share.

Rope tables and ALiBi slopes are computed from the positions in each forward pass. The model stores nothing, so nothing has
to be saved, moved or sharded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from argosy.config.model import ModelSpec
from argosy.families.architecture import RELATIVE_BUCKETS, AttentionKind, architecture_of
from argosy.model.attention import Attend, Mask, Prepare, prepare_attention
from argosy.model.ops.heads import Rope
from argosy.model.sharding import WHOLE, Share

# In tokens. T5 does not distinguish greater distances.
RELATIVE_REACH = 128


@dataclass(frozen=True)
class Across:
    """The encoder's output, and the decoder's attention to it."""

    memory: Tensor  # [batch, keys, hidden]
    attend: Attend


@dataclass(frozen=True)
class Context:
    """The inputs of a forward pass that all blocks share."""

    rope: Rope | None
    attend: Attend
    # The weight in the loss of a mean over this pass's tokens, for blocks that add such a term.
    scale: Tensor | None = None
    # Set in the decoder of an encoder-decoder.
    across: Across | None = None


def make_contexts(
    spec: ModelSpec,
    kinds: Mapping[int, AttentionKind],
    x: Tensor,
    *,
    seq: int,
    positions: Tensor | None = None,
    documents: Tensor | None = None,
    reach: Tensor | None = None,
    training: bool = False,
    scale: Tensor | None = None,
    heads: Share = WHOLE,
    prepare: Prepare = prepare_attention,
    frequencies: Callable[[int, AttentionKind, torch.device], Tensor] | None = None,
) -> dict[int, Context]:
    """Make one context for each kind of attention, under the same key. All layers of a kind share it.

    Args:
        x: the embedded tokens [batch, seq, hidden], or a share of them.
        seq: the number of tokens that attention sees, with the `heads` on this rank.
        positions: [1 or batch, seq], restarting where documents do.
        documents, reach: as in `Mask`, for the whole sequence.
        frequencies: `rope_frequencies`, or a function that remembers what it returned.
    """
    device = x.device
    where = None
    if spec.positions == "rope":
        where = torch.arange(seq, device=device)[None] if positions is None else positions
    slopes = heads.take(alibi_slopes(spec.heads, device), 0) if spec.positions == "alibi" else None
    dropout, causal = spec.dropout if training else 0.0, architecture_of(spec).causal
    contexts = {}
    for number, kind in kinds.items():
        rope = (
            None
            if where is None
            else rope_tables(where, (frequencies or rope_frequencies)(spec.head_dim, kind, device))
        )
        mask = Mask(causal=causal, window=kind.window, slopes=slopes, documents=documents, reach=reach)
        attend = prepare(mask, x, seq, spec.head_dim, dropout=dropout, scale=kind.scale, heads=heads)
        contexts[number] = Context(rope, attend, scale)
    return contexts


def rope_frequencies(head_dim: int, kind: AttentionKind, device: torch.device) -> Tensor:
    """Return the rope frequency, in radians per token, of each pair of a head's dimensions. [head_dim / 2]

    The steps are the ones other implementations take, because published weights were trained with them: the last bit of a
    frequency changes the third digit of the angle of token 100,000.
    """
    exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    frequencies: Tensor = 1.0 / kind.rope_theta**exponents
    scaling = kind.rope_scaling
    if scaling is None:
        return frequencies
    stretched = frequencies / scaling.factor
    if scaling.kind == "linear" or scaling.original_seq_len is None:
        return stretched
    # `kept` is 1 where a frequency stays and 0 where it is stretched. In between lie the waves that fit low_freq_factor to
    # high_freq_factor times into the sequences first trained on.
    waves = scaling.original_seq_len / (2 * math.pi / frequencies)
    kept = (waves - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    between = (1 - kept) * frequencies / scaling.factor + kept * frequencies
    return torch.where(kept > 1, frequencies, torch.where(kept < 0, stretched, between))


def rope_tables(positions: Tensor, frequencies: Tensor) -> Rope:
    """Return cos and sin of position x frequency, for positions [1 or batch, seq]."""
    angles = positions[:, :, None].float() * frequencies
    return angles.cos(), angles.sin()


def alibi_slopes(heads: int, device: torch.device) -> Tensor:
    """Return the ALiBi slopes 2^(-8 i / heads) for i = 1, 2, ...

    If the number of heads is not a power of two, use the slopes of the next power of two, every second one first.
    """
    power = 2 ** math.ceil(math.log2(heads))
    slopes = 2.0 ** (-8.0 / power * torch.arange(1, power + 1, device=device, dtype=torch.float32))
    return slopes if power == heads else torch.cat((slopes[1::2], slopes[::2]))[:heads]


def relative_buckets(queries: int, keys: int, device: torch.device, *, causal: bool) -> Tensor:
    """Return the relative position bucket of each distance. [queries, keys]

    Small distances have a bucket each. Larger ones share ever wider buckets, up to RELATIVE_REACH. If attention is
    bidirectional, each direction has half of the RELATIVE_BUCKETS.
    """
    distance = torch.arange(queries, device=device)[:, None] - torch.arange(keys, device=device)[None, :]
    buckets = RELATIVE_BUCKETS if causal else RELATIVE_BUCKETS // 2
    ahead = 0 if causal else (distance < 0) * buckets
    distance = distance.clamp(min=0) if causal else distance.abs()
    exact = buckets // 2
    shares = torch.log(distance.clamp(min=1).float() / exact) / math.log(RELATIVE_REACH / exact)
    far = (exact + (shares * (buckets - exact)).long()).clamp(max=buckets - 1)
    return torch.where(distance < exact, distance, far) + ahead
