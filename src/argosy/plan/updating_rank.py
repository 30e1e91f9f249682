"""The `PlannedRank` of a planned layout, from which a rule computes the cost of its update.

If a rule needs whole matrices, their shards are all-gathered first, over the ranks that shard the state and the tensor-parallel ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from argosy.plan.hardware import Cluster
from argosy.plan.kernels import Rates, product
from argosy.plan.layouts import Layout, Work
from argosy.plan.links import Links, gather, group


@dataclass(frozen=True)
class UpdatingRank:
    """One rank of a layout with `layers` layers. It implements `PlannedRank`."""

    work: Work
    layout: Layout
    cluster: Cluster
    links: Links
    rates: Rates
    layers: int

    def extra_seconds(self) -> float:
        """Return the seconds of an optimiser step beyond moving its bytes."""
        rule, keys = self.work.rule, self.work.rule_keys
        return rule.extra_seconds(rule.keys() if keys is None else keys, self)

    @property
    def matrices(self) -> list[tuple[float, float, float]]:
        """The matrices of an average layer, as (rows, columns, how many)."""
        return layer_matrices(self.work, self.layout)

    def matmul_seconds(self, rows: float, columns: float, inner: float) -> float:
        return product(self.rates, rows, columns, inner)

    def gather_seconds(self, bytes_per_number: float) -> float:
        """Return the seconds to all-gather one layer's matrices. Experts are updated in place, without a gather."""
        sizes, layout = self.work.sizes, self.layout
        whole = bytes_per_number * (sizes.attention + sizes.mlp)
        seconds = gather(self.links, group(layout, "tp", self.cluster), whole) if layout.tp > 1 else 0.0
        if layout.zero >= 3:
            seconds += gather(self.links, group(layout, "shards", self.cluster), whole / layout.tp)
        return seconds


def layer_matrices(work: Work, layout: Layout) -> list[tuple[float, float, float]]:
    """Return the matrices of an average layer on one rank, as (rows, columns, how many)."""
    model, sizes = work.model, work.sizes
    attention = sizes.decoder.mean(1, 2)
    query, key_value, hidden = model.heads * model.head_dim, model.kv_heads * model.head_dim, model.hidden
    # Projections of queries and outputs, then of keys and values.
    found = [
        (query, hidden, 2 * attention),
        (key_value, hidden, 2 * attention),
    ]
    inputs = 3 if model.gated else 2
    found.append((model.ffn, hidden, inputs * (1 - sizes.expert_layers)))
    if model.moe is not None:
        moe, share = model.moe, sizes.expert_layers
        found.append((moe.ffn, hidden, share * inputs * max(1.0, moe.experts / layout.ep / _over_experts(layout))))
        found.append((moe.shared_experts * moe.ffn, hidden, share * inputs * (moe.shared_experts > 0)))
    return [(rows, columns, count) for rows, columns, count in found if count]


def _over_experts(layout: Layout) -> int:
    """Return the number of ranks that shard the same experts. Each updates some of the matrices."""
    return layout.expert_shards(layout.shards) if layout.zero >= 3 else 1
