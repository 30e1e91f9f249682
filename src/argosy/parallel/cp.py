"""Context parallelism: each rank holds a part of every sequence, and keeps the activations of its own tokens only.

A model works token by token except in four places: attention, positions, dropout and router losses. Dropout masks are drawn
for the whole sequence, so that they equal those of one process. Router losses are means over a micro-batch. A sequence is cut
into twice as many pieces as there are ranks, and rank r gets piece r and the r-th from the end. With a causal mask later queries
see more keys, so this gives every rank the same amount of work.

Attention has two forms. `allgather` all-gathers the keys and values of the whole sequence, and each rank computes its own
queries on them. The heads are in two parts, of which the second is gathered while the first is computed. `ulysses` exchanges
tokens for heads in an all-to-all: each rank computes some of the heads for all tokens, with the attention back end that one
process would use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from argosy.data.samples.masks import IGNORED
from argosy.errors import ArgosyError
from argosy.model.attention import MASK_INPUTS, Attend, Mask, Prepare, prepare_attention
from argosy.model.decoder import Decoder
from argosy.model.moe import MoE
from argosy.model.objective import Objective
from argosy.model.sharding import WHOLE, Dropout, Share
from argosy.parallel.exchange import gather, gather_ahead, swap
from argosy.parallel.mesh import Mesh

# The parts of the heads whose keys and values are gathered one after the other.
_PARTS = 2


@dataclass(frozen=True)
class Cut:
    """The division of a sequence over the ranks of a process group."""

    group: dist.ProcessGroup

    @staticmethod
    def of(mesh: Mesh) -> Cut | None:
        along = mesh.along("cp")
        return None if along is None else Cut(along.get_group())

    @property
    def ranks(self) -> int:
        return self.group.size()

    @property
    def share(self) -> Share:
        """This rank's share of a sequence."""
        return self._shares[self.group.rank()]

    @property
    def heads(self) -> Share:
        """This rank's share of the heads, for `ulysses`."""
        return Share((self.group.rank(),), self.ranks)

    def parts(self, whole: Tensor) -> Tensor:
        """Split [.., seq, width] into the parts of all ranks: [ranks, .., seq / ranks, width]."""
        return torch.stack([share.take(whole, whole.ndim - 2) for share in self._shares])

    def joined(self, parts: Tensor) -> Tensor:
        """Join the parts of all ranks into whole sequences: the inverse of `parts`."""
        pieces = [part.chunk(2, dim=-2) for part in parts.unbind()]
        return torch.cat([*(first for first, _ in pieces), *(second for _, second in reversed(pieces))], dim=-2)

    @property
    def _shares(self) -> list[Share]:
        return [Share((rank, 2 * self.ranks - 1 - rank), 2 * self.ranks) for rank in range(self.ranks)]


def apply_context_parallel(model: nn.Module, mesh: Mesh, kind: str) -> None:
    """Make the model take parts of sequences, as `cut_inputs` makes them."""
    cut = Cut.of(mesh)
    if cut is None:
        return
    if not isinstance(model, Decoder):
        raise ArgosyError(
            "config.arithmetic",
            f"context parallelism cuts the sequences of decoders only, and this model is a {type(model).__name__}",
            key="parallel.cp",
            value=cut.ranks,
            fix="parallel.cp=1, and more dp_shard",
        )
    prepare: Prepare = partial(_gathering if kind == "allgather" else _swapping, cut)
    model.prepare_attention = prepare
    model.predict.join = lambda x: cut.joined(gather(x, cut.group))
    for module in model.modules():
        if isinstance(module, Dropout):
            module.share = module.share.inside(cut.share)
        elif isinstance(module, MoE):
            module.share, module.sum_shares = 1 / cut.ranks, partial(_summed, cut)


def input_cut(mesh: Mesh) -> Callable[[dict[str, Tensor], Objective], tuple[dict[str, Tensor], Objective]] | None:
    """Return the function that cuts the inputs of a micro-batch for this rank; None where no ranks share a sequence."""
    cut = Cut.of(mesh)
    return None if cut is None else partial(cut_inputs, cut)


def cut_inputs(cut: Cut, inputs: dict[str, Tensor], objective: Objective) -> tuple[dict[str, Tensor], Objective]:
    """Return this rank's part of a micro-batch, and its objective."""
    return cut_parts(cut, inputs), replace(objective, counted=(inputs["labels"] != IGNORED).sum())


def cut_parts(cut: Cut, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return this rank's part of each input. Inputs of the attention mask stay whole, because the keys are."""
    seq, device = inputs["tokens"].shape[1], inputs["tokens"].device
    whole = {"positions": torch.arange(seq, device=device)[None]} | inputs
    return {name: value if name in MASK_INPUTS else cut.share.take(value, 1) for name, value in whole.items()}


def _gathering(
    cut: Cut,
    mask: Mask,
    x: Tensor,
    seq: int,
    head_dim: int,
    *,
    dropout: float = 0.0,
    scale: float | None = None,
    heads: Share = WHOLE,
) -> Attend:
    attend = prepare_attention(
        mask, x, seq * cut.ranks, head_dim, dropout=dropout, scale=scale, heads=heads, queries=cut.share
    )

    # Slopes and dropout are drawn for all heads together.
    by_head = mask.slopes is None and not dropout

    def attend_all(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # The compiler does not trace what runs beside something.
        if torch.compiler.is_compiling():
            every_k, every_v = cut.joined(gather(torch.stack((k, v)), cut.group)).unbind()
            return attend(q, every_k, every_v)
        parts = _PARTS if by_head and k.shape[1] % _PARTS == 0 else 1
        q_parts, k_parts, v_parts = (t.chunk(parts, dim=1) for t in (q, k, v))
        ahead = [gather_ahead(torch.stack(pair), cut.group) for pair in zip(k_parts, v_parts, strict=True)]
        y = []
        for some, flight in zip(q_parts, ahead, strict=True):
            every_k, every_v = cut.joined(flight.land()).unbind()
            y.append(attend(some, every_k, every_v))
        return torch.cat(y, dim=1)

    return attend_all


def _swapping(
    cut: Cut,
    mask: Mask,
    x: Tensor,
    seq: int,
    head_dim: int,
    *,
    dropout: float = 0.0,
    scale: float | None = None,
    heads: Share = WHOLE,
) -> Attend:
    if mask.slopes is not None:
        mask = replace(mask, slopes=cut.heads.take(mask.slopes, 0))
    attend = prepare_attention(
        mask, x, seq * cut.ranks, head_dim, dropout=dropout, scale=scale, heads=cut.heads.inside(heads)
    )

    def attend_some(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (_shareable(t, q.shape[1], cut.ranks) for t in (k, v))
        # [ranks, batch, heads, ..]
        by_rank = [t.unflatten(1, (cut.ranks, -1)).transpose(0, 1) for t in (q, k, v)]
        counts = [t.shape[2] for t in by_rank]
        every_q, every_k, every_v = cut.joined(swap(torch.cat(by_rank, dim=2), cut.group)).split(counts, dim=1)
        y = swap(cut.parts(attend(every_q, every_k, every_v)), cut.group)
        return y.transpose(0, 1).flatten(1, 2)

    return attend_some


def _shareable(x: Tensor, heads: int, ranks: int) -> Tensor:
    """Repeat the KV heads until every rank can be given those that its query heads attend to."""
    kv_heads = x.shape[1]
    if kv_heads % ranks == 0:
        return x
    return x.repeat_interleave((ranks if ranks % kv_heads == 0 else heads) // kv_heads, dim=1)


def _summed(cut: Cut, load: Tensor) -> Tensor:
    load = load.clone()
    dist.all_reduce(load, group=cut.group)
    return load
