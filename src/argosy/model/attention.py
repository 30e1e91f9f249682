"""Attention masks, and the back ends that compute attention under them.

A `Mask` describes the request: causal or not, a sliding window, documents that do not see each other, how far ahead each
query sees, ALiBi slopes, an additive bias. `BACKENDS` lists the implementations, fastest first. Each declares what it can
serve, and the first that can is used. The last one writes the whole mask out as an additive bias. It serves every case on
every device, and the tests compare the others with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from argosy.compat import compiled_flex_attention, flex_block_mask, sdpa_priority
from argosy.model.ops import flash, hopper
from argosy.model.ops.attention_backends import Bounds, Form, attend
from argosy.model.ops.choice import is_gpu
from argosy.model.sharding import WHOLE, Share, drop

# Model inputs that only attention masks are made of.
MASK_INPUTS = ("documents", "reach")  # [batch, seq]


@dataclass(frozen=True)
class Mask:
    """An attention mask: the keys each query may see. A field that is not set restricts nothing."""

    causal: bool
    # A query sees itself and the window - 1 keys before it.
    window: int | None = None
    # ALiBi subtracts slope x distance from the score.
    slopes: Tensor | None = None  # [heads]
    # Only tokens with equal document ids see each other. In a causal mask, a document's tokens are contiguous.
    documents: Tensor | None = None  # [batch, seq]
    # The last key each query sees, if that is not the query's own. A window counts only the keys behind a query.
    reach: Tensor | None = None  # [batch, seq]
    # Added to the scores; may be trained.
    bias: Tensor | None = None  # [1 or batch, heads, queries, keys]

    def within(self, queries: int) -> Mask:
        """Return the same mask, without a window too wide to matter for `queries` queries."""
        if self.window is None or self.window < queries:
            return self
        return replace(self, window=None)

    @property
    def is_plain(self) -> bool:
        restrictions = (self.window, self.slopes, self.documents, self.reach, self.bias)
        return all(restriction is None for restriction in restrictions)


class Case(NamedTuple):
    """The request a back end accepts or refuses."""

    mask: Mask
    device: torch.device
    dtype: torch.dtype
    head_dim: int
    seq: int  # keys
    dropout: float
    # The share of the attention heads on this rank.
    heads: Share = WHOLE
    # The share of the queries on this rank, which has the keys of the whole sequence.
    queries: Share = WHOLE

    @property
    def is_whole(self) -> bool:
        return self.heads.is_whole and self.queries.is_whole


# Maps query, key and value [batch, heads, seq, head_dim] to a result shaped like the query.
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Backend(NamedTuple):
    """An implementation of attention: its name, what it refuses, and how it is prepared for a forward pass."""

    name: str
    # Returns why the back end cannot serve a case, or None.
    refuses: Callable[[Case], str | None]
    # Prepares one forward pass, given the scale of the scores or None for 1 / sqrt(head_dim).
    prepare: Callable[[Case, float | None], Attend]


class Prepare(Protocol):
    """The function with which a model prepares attention. Context parallelism replaces it with its own."""

    def __call__(
        self,
        mask: Mask,
        x: Tensor,
        seq: int,
        head_dim: int,
        *,
        dropout: float = 0.0,
        scale: float | None = None,
        heads: Share = WHOLE,
    ) -> Attend: ...


def prepare_attention(
    mask: Mask,
    x: Tensor,
    seq: int,
    head_dim: int,
    *,
    dropout: float = 0.0,
    scale: float | None = None,
    heads: Share = WHOLE,
    queries: Share = WHOLE,
) -> Attend:
    """Return the attention function that every layer of a forward pass calls.

    Whatever the layers share, such as a block mask, is made here once.

    Args:
        x: a tensor with the device and dtype of the computation.
        seq: the number of keys.
    """
    case = Case(mask.within(seq), x.device, x.dtype, head_dim, seq, dropout, heads, queries)
    return choose_backend(case).prepare(case, scale)


def choose_backend(case: Case) -> Backend:
    return next(backend for backend in BACKENDS if backend.refuses(case) is None)


def _hopper_refuses(case: Case) -> str | None:
    if not is_gpu(case.device):
        return "the kernels need a GPU"
    if case.dropout:
        return "the kernels have no dropout"
    mask = case.mask
    if not mask.causal or not case.queries.is_whole or any(x is not None for x in (mask.slopes, mask.reach, mask.bias)):
        return "the kernels compute only causal attention, of all queries, with documents and windows"
    if case.head_dim > 64 and not torch.are_deterministic_algorithms_enabled() and _flash_refuses(case) is None:
        return "flash-attn-4 is installed, and faster for heads wider than 64 where results need not be deterministic"
    return hopper.refusal(case.device, case.dtype, case.head_dim, case.seq)


def _hopper(case: Case, scale: float | None) -> Attend:
    return partial(attend, "hopper", Form(True, None, scale, bounds_of(case)))


def bounds_of(case: Case) -> Bounds | None:
    """Return the bounds that documents and a window set to a causal mask, or None if it has neither."""
    mask = case.mask
    if mask.documents is None and mask.window is None:
        return None
    places = torch.arange(case.seq, device=case.device, dtype=torch.int32)[None]
    first, last = torch.zeros_like(places), torch.full_like(places, case.seq - 1)
    if mask.documents is not None:
        starts = F.pad(mask.documents[:, 1:] != mask.documents[:, :-1], (1, 0), value=True)
        # The last token of a document is the one before a start, or the last of all.
        ends = starts.roll(-1, 1)
        first = torch.where(starts, places, first).cummax(1).values
        last = torch.where(ends, places, last).flip(1).cummin(1).values.flip(1)
    if mask.window is not None:
        first, last = first.maximum(places - (mask.window - 1)), last.minimum(places + (mask.window - 1))
    return Bounds(first.contiguous(), last.contiguous())


def _flash_refuses(case: Case) -> str | None:
    mask = case.mask
    if not is_gpu(case.device):
        return "flash-attn-4 needs a GPU"
    if case.dropout:
        return "flash-attn-4 has no dropout"
    if any(given is not None for given in (mask.slopes, mask.documents, mask.reach, mask.bias)):
        return "flash-attn-4 computes only causal or bidirectional attention, and windows"
    if mask.window is not None and not mask.causal:
        return "flash-attn-4 has windows only where attention is causal"
    if not case.queries.is_whole and not mask.causal:
        return "flash-attn-4 takes a share of the queries only where attention is causal"
    return flash.refusal(case.device, case.dtype, case.head_dim)


def _flash(case: Case, scale: float | None) -> Attend:
    by_flash = partial(attend, "flash", Form(case.mask.causal, case.mask.window, scale))
    return by_flash if case.queries.is_whole else _by_pieces(case, by_flash)


def _by_pieces(case: Case, attend: Attend) -> Attend:
    """Run `attend` on each piece of the queries, with the keys up to that piece's last.

    `attend` must take its queries to be the last of its keys.
    """
    size = case.seq // case.queries.of

    def attend_each(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        pieces = zip(_ends(case), q.split(size, dim=2), strict=True)
        return torch.cat([attend(queries, k[:, :, :end], v[:, :, :end]) for end, queries in pieces], dim=2)

    return attend_each


def _ends(case: Case) -> list[int]:
    """Return the end of each piece of the queries, among all tokens."""
    return [(piece + 1) * (case.seq // case.queries.of) for piece in case.queries.pieces]


def _sdpa_refuses(case: Case) -> str | None:
    if case.dropout and not case.is_whole and case.device.type == "cpu":
        # On a GPU no two layouts draw the same dropout mask anyway.
        return "torch draws dropout for the heads and queries of this rank, not for those of one process"
    if not case.queries.is_whole and case.mask.causal:
        return "torch's causal mask takes the queries for those of the first keys"
    return None if case.mask.is_plain else "torch's kernels compute only plain causal or bidirectional attention"


def _sdpa(case: Case, scale: float | None) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_priority(case.device):
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=case.mask.causal, dropout_p=case.dropout, scale=scale, enable_gqa=_grouped(q, k)
            )

    return attend


def _pieces_refuse(case: Case) -> str | None:
    if not is_gpu(case.device):
        return "a causal mask aligned with the last keys needs a GPU: elsewhere torch writes it out"
    return (
        None if case.mask.is_plain and case.mask.causal else "pieces of the queries are for plain causal attention only"
    )


def _pieces(case: Case, scale: float | None) -> Attend:
    # Imported here because it loads torch's compiler, which takes more than a second.
    from torch.nn.attention.bias import causal_lower_right

    size = case.seq // case.queries.of
    # Made here: inside a block, selective recompute would intercept what they are made with, and fail.
    masks = {end: causal_lower_right(size, end) for end in _ends(case)}
    return _by_pieces(case, partial(_attend_last, masks, case.dropout, scale))


def _as_last(
    masks: Mapping[int, Tensor], dropout: float, scale: float | None, q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    """Compute causal attention of queries that are the last of the keys, with the mask for that many keys."""
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=masks[k.shape[2]], dropout_p=dropout, scale=scale, enable_gqa=_grouped(q, k)
    )


_attend_last = _as_last


def hide_pieces_from_compiler() -> None:
    """Exclude pieces of the queries from torch.compile: torch 2.11's compiler expects other strides of their 32-bit gradients."""
    global _attend_last
    _attend_last = torch.compiler.disable(_as_last)


def _flex_refuses(case: Case) -> str | None:
    if not is_gpu(case.device):
        return "FlexAttention needs a GPU"
    if case.dropout:
        return "FlexAttention has no dropout"
    if case.head_dim < 16:
        return "FlexAttention needs heads of 16 or wider"
    return "FlexAttention adds no bias tensor" if case.mask.bias is not None else None


def _flex(case: Case, scale: float | None) -> Attend:
    mask = case.mask
    slopes, documents, window, reach = mask.slopes, mask.documents, mask.window, mask.reach
    places = None if case.queries.is_whole else case.queries.take(torch.arange(case.seq, device=case.device), 0)

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        query = query if places is None else places[query]
        if reach is not None:
            seen = reach[batch, query] >= key
        else:
            seen = query >= key if mask.causal else query >= 0
        if window is not None:
            seen = seen & (query - key < window)
        if documents is not None:
            seen = seen & (documents[batch, query] == documents[batch, key])
        return seen

    unrestricted = not mask.causal and window is None and documents is None and reach is None
    here = case.queries.size_of(case.seq)
    blocks = None if unrestricted else flex_block_mask(
        visible, documents if reach is None else reach, here, case.seq, case.device
    )  # fmt: skip
    score_mod = None if slopes is None else _alibi(slopes, places)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return compiled_flex_attention(
            q, k, v, score_mod=score_mod, block_mask=blocks, scale=scale, enable_gqa=_grouped(q, k)
        )

    return attend


def _alibi(slopes: Tensor, places: Tensor | None) -> Callable[..., Tensor]:
    def alibi(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score - slopes[head] * ((query if places is None else places[query]) - key)

    return alibi


def _explicit(case: Case, scale: float | None) -> Attend:
    bias: Tensor | None = explicit_bias(case)
    if case.dropout and not case.is_whole:
        return partial(_attend_dropping, case, bias, scale)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=bias, dropout_p=case.dropout, scale=scale, enable_gqa=_grouped(q, k)
        )

    return attend


def _attend_dropping(case: Case, bias: Tensor | None, scale: float | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute attention in plain torch, with the dropout a single process would apply to these heads and queries."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q @ k.transpose(2, 3) * (case.head_dim**-0.5 if scale is None else scale)
    shares = (scores if bias is None else scores + bias).float().softmax(-1).to(v.dtype)
    return drop(shares, case.dropout, {1: case.heads, 2: case.queries}) @ v


def explicit_bias(case: Case) -> Tensor | None:
    """Return the mask as an additive bias [1 or batch, 1 or heads, queries, seq], or None if it restricts nothing."""
    mask, queries = case.mask, case.queries
    if mask.is_plain and not mask.causal:
        return None
    keys = torch.arange(case.seq, device=case.device)
    distance = queries.take(keys, 0)[:, None] - keys[None, :]  # query - key
    bias = torch.zeros(1, 1, *distance.shape, device=case.device) if mask.bias is None else mask.bias.float()
    if mask.slopes is not None:
        bias = bias - mask.slopes[None, :, None, None] * distance
    hidden = (distance < 0 if mask.causal else torch.zeros_like(distance, dtype=torch.bool))[None, None]
    if mask.reach is not None:
        hidden = keys > queries.take(mask.reach, 1)[:, None, :, None]
    if mask.window is not None:
        hidden = hidden | (distance >= mask.window)
    if mask.documents is not None:
        documents = mask.documents[:, None, None, :]
        hidden = hidden | (queries.take(documents, 3).transpose(2, 3) != documents)
    return bias.masked_fill(hidden, -math.inf).to(case.dtype)


def _grouped(q: Tensor, k: Tensor) -> bool:
    return q.shape[1] != k.shape[1]


BACKENDS = (
    Backend("hopper", _hopper_refuses, _hopper),
    Backend("flash", _flash_refuses, _flash),
    Backend("sdpa", _sdpa_refuses, _sdpa),
    Backend("pieces", _pieces_refuse, _pieces),
    Backend("flex", _flex_refuses, _flex),
    Backend("explicit", lambda case: None, _explicit),
)
