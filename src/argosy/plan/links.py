"""Time of collectives over the links they really use.

Ranks are laid out tensor-parallel innermost, then context, data, and pipeline outermost. A group within the NVLink domain
uses NVLink; one that crosses domains has, in each node, the network cards' share of all its members there, and no more than
NVLink. A collective costs its bytes over that, and a latency for each doubling of the group.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

from argosy.plan.hardware import Cluster
from argosy.plan.layouts import Layout


@dataclass(frozen=True)
class Links:
    """Bytes a second of one GPU, and seconds of latency, within a domain and across."""

    near: float
    far: float
    near_latency: float
    far_latency: float
    domain: int


@dataclass(frozen=True)
class Group:
    """Ranks of one axis: how many, and how many of them share a domain."""

    size: int
    near: int

    @property
    def crosses(self) -> bool:
        return self.near < self.size


def group(layout: Layout, axis: str, cluster: Cluster) -> Group:
    order = (("tp", layout.tp), ("cp", layout.cp), ("dp", layout.dp), ("pp", layout.pp))
    stride = 1
    for name, size in order:
        if name == axis:
            return Group(size, max(1, min(size, cluster.domain // stride)))
        stride *= size
    if axis == "ep":  # taken from context and data ranks
        return Group(layout.ep, max(1, min(layout.ep, cluster.domain // layout.expert_tp)))
    near = max(1, cluster.domain // layout.tp)
    if axis == "copies":
        return Group(layout.copies, max(1, min(layout.copies, near // layout.shards)))
    return Group(layout.shards, min(layout.shards, near))


def bandwidth(links: Links, ranks: Group) -> float:
    return min(links.near, links.far * ranks.near) if ranks.crosses else links.near


def latency(links: Links, ranks: Group) -> float:
    return (links.far_latency if ranks.crosses else links.near_latency) * log2(ranks.size)


def gather(links: Links, ranks: Group, size: float) -> float:
    """An all-gather to, or reduce-scatter of, `size` bytes in all."""
    if ranks.size == 1:
        return 0.0
    return size * (ranks.size - 1) / ranks.size / bandwidth(links, ranks) + latency(links, ranks)


def reduce(links: Links, ranks: Group, size: float) -> float:
    """An all-reduce of `size` bytes."""
    if ranks.size == 1:
        return 0.0
    return 2 * size * (ranks.size - 1) / ranks.size / bandwidth(links, ranks) + latency(links, ranks)


def exchange(links: Links, ranks: Group, size: float, away: float) -> float:
    """An all-to-all in which each rank sends `size` bytes, evenly; `away` of them leave the domain, where a token goes once
    to each domain that has one of its experts."""
    if ranks.size == 1:
        return 0.0
    return max(away / links.far, size * (ranks.near - 1) / ranks.near / links.near) + latency(links, ranks)


def send(links: Links, ranks: Group, size: float) -> float:
    """To the next rank, as pipeline stages do: the slowest of the hops."""
    if ranks.size == 1:
        return 0.0
    return size / (links.far if ranks.crosses else links.near) + (
        links.far_latency if ranks.crosses else links.near_latency
    )
