"""Time that Muon adds to a step: Newton-Schulz iterations for every matrix inside the layers, and gathering the matrices for them.

A rank orthogonalises whole matrices: its ranks' parts are gathered first, over the ranks that shard the state and those of tensor
parallelism, and each of these computes the same. Of stacked experts a rank does those it holds.
"""

from __future__ import annotations

from argosy.plan.hardware import Cluster
from argosy.plan.kernels import Rates, product
from argosy.plan.layouts import Layout, Work
from argosy.plan.links import Links, gather, group

_GATHERED = 4  # bytes of a number of the direction


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


def newton_schulz(rates: Rates, rows: float, columns: float, steps: int) -> float:
    """Seconds to orthogonalise one matrix: each iteration has three products, of X X^T, its square, and that times X."""
    short, long = sorted((rows, columns))
    return steps * (
        product(rates, short, short, long) + product(rates, short, short, short) + product(rates, short, long, short)
    )


def muon_seconds(work: Work, layout: Layout, cluster: Cluster, links: Links, rates: Rates, layers: int) -> float:
    """Seconds of a step of a rank with so many layers, beyond what any optimiser takes to read and write its state."""
    matrices = layer_matrices(work, layout)
    compute = sum(count * newton_schulz(rates, rows, columns, work.muon_steps) for rows, columns, count in matrices)
    sizes = work.sizes
    whole = _GATHERED * (sizes.attention + sizes.mlp)
    moved = gather(links, group(layout, "tp", cluster), whole) if layout.tp > 1 else 0.0
    if layout.zero >= 3:
        moved += gather(links, group(layout, "shards", cluster), whole / layout.tp)
    return layers * (compute + moved)
