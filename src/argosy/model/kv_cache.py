"""A key/value cache, with which a decoder reads each token of a text once.

Texts of a batch end together: shorter ones begin with padding, which counts as a document of its own, so no token sees it.
All texts thus write the keys of a step to the same place, and a step without padding needs no mask at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial

import torch
from torch import Tensor
from torch.nn import functional as F

from argosy.model.attention import BACKENDS, Attend, Case, Mask, explicit_bias, prepare_attention
from argosy.model.positions import Context, rope_frequencies
from argosy.model.sharding import WHOLE, Share

# Longest prompt, in tokens, whose attention mask is written out.
_LONGEST_EXPLICIT = 4096
_NO_INPUTS: Mapping[str, list[int]] = {}


class KeyValueCache:
    """The keys and values of the tokens a decoder has read, by layer.

    The first pass may have any number of tokens, a later one has a single token for each text. Call `advance` after each.
    """

    def __init__(self, capacity: int) -> None:
        """Args:
        capacity: the most tokens of a text.
        """
        self.capacity = capacity
        # Tokens of each text in the cache, with its padding.
        self.length = 0
        self._layers: dict[str, tuple[Tensor, Tensor]] = {}  # [batch, kv_heads, capacity, head_dim] each
        # Rope frequencies, computed once for all tokens.
        self.frequencies = cache(rope_frequencies)

    def advance(self, tokens: int) -> None:
        self.length += tokens

    def clear(self) -> None:
        """Forget all tokens. The memory is kept for the next pass."""
        self.length = 0

    def context(self, layer: str, context: Context) -> Context:
        """Return the context of one layer, whose attention reads and extends the cache."""
        return Context(context.rope, partial(self._attend, layer, context.attend), context.scale, context.across)

    def prepare(
        self,
        mask: Mask,
        x: Tensor,
        seq: int,
        head_dim: int,
        *,
        dropout: float = 0.0,
        scale: float | None = None,
        heads: Share = WHOLE,
    ) -> Attend:
        """Prepare attention to `seq` keys, those in the cache included."""
        if not self.length:
            mask = mask.within(seq)
            if mask.is_plain or seq > _LONGEST_EXPLICIT:
                return prepare_attention(mask, x, seq, head_dim, dropout=dropout, scale=scale, heads=heads)
            # FlexAttention, the choice on many GPUs, would be compiled for every length of a prompt.
            return BACKENDS[-1].prepare(Case(mask, x.device, x.dtype, head_dim, seq, dropout, heads), scale)
        # The one query is the last token. It sees every key that is in its window and document.
        first = 0 if mask.window is None else max(0, seq - mask.window)
        seen = replace(mask, causal=False, window=None)
        bias = None
        if not seen.is_plain:
            case = Case(seen, x.device, x.dtype, head_dim, seq, dropout, heads, queries=Share((seq - 1,), seq))
            bias = explicit_bias(case)
        return partial(_attend_from_last, first, seq, None if bias is None else bias[..., first:], scale)

    def _attend(self, layer: str, attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layer not in self._layers:
            shape = (*k.shape[:2], self.capacity, k.shape[3])
            self._layers[layer] = k.new_empty(shape), v.new_empty(shape)
        keys, values = self._layers[layer]
        added = k.shape[2]
        keys.narrow(2, self.length, added).copy_(k)
        values.narrow(2, self.length, added).copy_(v)
        return attend(q, k, v) if not self.length else attend(q, keys, values)


def _attend_from_last(
    first: int, end: int, bias: Tensor | None, scale: float | None, q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    """Return the attention of one query for each text to the keys from `first` up to `end`.

    The query heads that share a KV head are passed as queries of that head. torch would repeat the keys for each of them.
    """
    k, v = k.narrow(2, first, end - first), v.narrow(2, first, end - first)
    if q.shape[1] == k.shape[1]:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)
    grouped = q.reshape(q.shape[0], k.shape[1], -1, q.shape[3])
    if bias is not None and bias.shape[1] > 1:
        bias = bias.reshape(bias.shape[0], k.shape[1], -1, bias.shape[3])
    return F.scaled_dot_product_attention(grouped, k, v, attn_mask=bias, scale=scale).reshape(q.shape)


class CachedTexts:
    """The next-token logits of a batch of growing texts, for `argosy.model.decoding.generate`.

    Each call passes every text with one more token than in the last call. The model sees the last `limit` tokens of a text. A
    text that outgrows the limit is read anew in each call, because the positions of all its tokens change. So are all texts where
    the model takes no cache.
    """

    def __init__(
        self,
        model: Callable[..., Tensor],
        *,
        limit: int,
        most: int,
        device: torch.device,
        beside: Callable[[int, range], Mapping[str, list[int]]] = lambda row, shown: _NO_INPUTS,
        takes_cache: bool = True,
    ) -> None:
        """Args:
        model: a decoder, or a function that takes and returns the same.
        limit: the most tokens that the model sees.
        most: the length to which the longest text may grow.
        beside: returns the model's other inputs for the positions `shown` of a text. Positions before 0 are padding.
        """
        self._model, self._limit, self._device, self._beside = model, limit, device, beside
        self._cache, self._takes_cache = KeyValueCache(min(limit, most)), takes_cache
        # The padding of each text.
        self._pads: list[int] = []

    def __call__(self, texts: Sequence[Sequence[int]]) -> Tensor:
        longest = max(map(len, texts))
        if self._takes_cache and 0 < self._cache.length == longest - 1 < self._limit:
            return self._read_one(texts)
        return self._read_all(texts, min(longest, self._limit))

    def _read_all(self, texts: Sequence[Sequence[int]], width: int) -> Tensor:
        self._cache.clear()
        self._pads = [max(0, width - len(text)) for text in texts]
        rows = [[0] * pad + list(text[-width:]) for pad, text in zip(self._pads, texts, strict=True)]
        others = [self._beside(row, range(len(text) - width, len(text))) for row, text in enumerate(texts)]
        inputs = {name: self._tensor([other[name] for other in others]) for name in others[0]}
        positions = self._tensor([[max(0, at - pad) for at in range(width)] for pad in self._distinct_pads])
        last = torch.arange(1, len(texts) + 1, device=self._device) * width - 1
        return self._pass(self._tensor(rows), positions=positions, logits_at=last, **inputs)

    def _read_one(self, texts: Sequence[Sequence[int]]) -> Tensor:
        positions = self._tensor([[self._cache.length - pad] for pad in self._distinct_pads])
        return self._pass(self._tensor([[text[-1]] for text in texts]), positions=positions)[:, -1]

    @property
    def _distinct_pads(self) -> list[int]:
        """The padding of each text, or of one for all if there is none."""
        return self._pads if any(self._pads) else [0]

    def _pass(self, tokens: Tensor, **inputs: Tensor) -> Tensor:
        end = self._cache.length + tokens.shape[1]
        if any(self._pads):
            inputs["documents"] = self._tensor([[int(at >= pad) for at in range(end)] for pad in self._pads])
        logits = self._model(tokens, cache=self._cache if self._takes_cache else None, **inputs)
        self._cache.advance(tokens.shape[1])
        return logits

    def _tensor(self, rows: list[list[int]]) -> Tensor:
        return torch.tensor(rows, device=self._device)
