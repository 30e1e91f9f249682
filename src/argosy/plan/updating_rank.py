"""What a rule asks about the rank whose update it prices: `PlannedRank` for a planned layout.

A rule that needs whole matrices has their shards gathered first, over the ranks that shard the state and those of tensor parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass

from argosy.plan.hardware import Cluster
from argosy.plan.kernels import Rates, product
from argosy.plan.layouts import Layout, Work
from argosy.plan.links import Links, gather, group


@dataclass(frozen=True)
class UpdatingRank:
    """One rank of a layout, a `PlannedRank`, with so many layers."""

    work: Work
    layout: Layout
    cluster: Cluster
    links: Links
    rates: Rates
    layers: int

    def extra_seconds(self) -> float:
        """Seconds the optimiser takes in a step beyond moving its bytes."""
        rule, keys = self.work.rule, self.work.rule_keys
        return rule.extra_seconds(rule.keys() if keys is None else keys, self)

    @property
    def matrices(self) -> list[tuple[float, float, float]]:
        """(rows, columns, how many) of an average layer's matrices."""
        return layer_matrices(self.work, self.layout)

    def matmul_seconds(self, rows: float, columns: float, inner: float) -> float:
        return product(self.rates, rows, columns, inner)

    def gather_seconds(self, bytes_per_number: float) -> float:
        """Seconds to gather one layer's matrices, but for experts, which are updated where they are."""
        sizes, layout = self.work.sizes, self.layout
        whole = bytes_per_number * (sizes.attention + sizes.mlp)
        seconds = gather(self.links, group(layout, "tp", self.cluster), whole) if layout.tp > 1 else 0.0
        if layout.zero >= 3:
            seconds += gather(self.links, group(layout, "shards", self.cluster), whole / layout.tp)
        return seconds


def layer_matrices(work: Work, layout: Layout) -> list[tuple[float, float, float]]:
    """(rows, columns, how many) of an average layer's matrices on one rank."""
    model, sizes = work.model, work.sizes
    attention = sizes.decoder.mean(1, 2)
    query, key_value, hidden = model.heads * model.head_dim, model.kv_heads * model.head_dim, model.hidden
    found = [
        (query, hidden, 2 * attention),
        (key_value, hidden, 2 * attention),
    ]  # of queries and outputs; keys and values
    inputs = 3 if model.gated else 2
    found.append((model.ffn, hidden, inputs * (1 - sizes.expert_layers)))
    if model.moe is not None:
        moe, share = model.moe, sizes.expert_layers
        found.append((moe.ffn, hidden, share * inputs * max(1.0, moe.experts / layout.ep / _over_experts(layout))))
        found.append((moe.shared_experts * moe.ffn, hidden, share * inputs * (moe.shared_experts > 0)))
    return [(rows, columns, count) for rows, columns, count in found if count]


def _over_experts(layout: Layout) -> int:
    """Ranks that hold the same experts and shard them: each takes some of the matrices."""
    return layout.expert_shards(layout.shards) if layout.zero >= 3 else 1
