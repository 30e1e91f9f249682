"""A time model of collectives over NVLink and the network.

Ranks are laid out tensor-parallel innermost, then context-, data- and pipeline-parallel outermost. A process group within an
NVLink domain uses NVLink. A group that crosses domains uses the network cards of all its members in a node, limited by NVLink. A
collective takes bytes / bandwidth, and a latency for each doubling of the group.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf, log2

from argosy.plan.hardware import Cluster
from argosy.plan.layouts import Layout


@dataclass(frozen=True)
class Links:
    """Bandwidth of one GPU in bytes/s and latency in seconds, within an NVLink domain (near) and across domains (far)."""

    near: float
    far: float
    near_latency: float
    far_latency: float
    domain: int

    def unlimited(self) -> Links:
        """Return links with the same latency that move any number of bytes in no time."""
        return replace(self, near=inf, far=inf)


@dataclass(frozen=True)
class Group:
    """A process group: its size, and how many of its ranks share an NVLink domain (near)."""

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
    # Expert-parallel ranks are taken from the context- and data-parallel ranks.
    if axis == "ep":
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
    """Return the seconds of an all-gather to, or a reduce-scatter of, `size` bytes in all."""
    if ranks.size == 1:
        return 0.0
    return size * (ranks.size - 1) / ranks.size / bandwidth(links, ranks) + latency(links, ranks)


def reduce(links: Links, ranks: Group, size: float) -> float:
    """Return the seconds of an all-reduce of `size` bytes."""
    if ranks.size == 1:
        return 0.0
    return 2 * size * (ranks.size - 1) / ranks.size / bandwidth(links, ranks) + latency(links, ranks)


def exchange(links: Links, ranks: Group, size: float, away: float) -> float:
    """Return the seconds of an all-to-all in which each rank sends `size` bytes, evenly.

    `away` bytes leave the NVLink domain: a token is sent once to each other domain that has one of its experts.
    """
    if ranks.size == 1:
        return 0.0
    return max(away / links.far, size * (ranks.near - 1) / ranks.near / links.near) + latency(links, ranks)


def send(links: Links, ranks: Group, size: float) -> float:
    """Return the seconds of a point-to-point send to the next pipeline stage, over the slowest hop of the pipeline."""
    if ranks.size == 1:
        return 0.0
    return size / (links.far if ranks.crosses else links.near) + (
        links.far_latency if ranks.crosses else links.near_latency
    )
