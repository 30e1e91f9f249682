"""Rows that travel to experts elsewhere, in cases a router seldom makes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from argosy.config.resolve import resolve_model
from argosy.model.moe import Experts
from argosy.parallel.ep import apply_expert_parallel
from argosy.parallel.mesh import make_mesh
from dist.pool import Pool
from dist.training import spec_of

EXPERTS, HIDDEN = 4, 8


def make_experts() -> Experts:
    keys = ["layers=1", f"hidden={HIDDEN}", "heads=2", "kv_heads=2", "vocab_size=16", "max_seq_len=8"]
    spec = resolve_model("mixtral-8x7b", [*keys, f"moe={{experts: {EXPERTS}, top_k: 1, ffn: 6}}"])
    assert spec.moe is not None
    experts = Experts(spec, spec.moe)
    torch.manual_seed(1)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    return experts


def rows_of(rank: int, loads: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(2 + rank)
    count = sum(loads)
    rows, weights = torch.randn(count, HIDDEN, requires_grad=True), torch.rand(count, requires_grad=True)
    return rows, weights, torch.tensor(loads).cumsum(0).int()


def compute(loads: list[list[int]]) -> list[Tensor]:
    """On one rank of two: what comes back for its rows, and all gradients."""
    mesh = make_mesh(spec_of("moe", "dp_shard=2 ep=2").parallel, torch.device("cpu"))
    experts, along = make_experts(), mesh.along("ep")
    assert along is not None
    apply_expert_parallel(torch.nn.Sequential(experts), along)
    rank = dist.get_rank()
    rows, weights, offsets = rows_of(rank, loads[rank])
    out = experts(rows, weights, offsets)
    (out * (1 + torch.arange(HIDDEN))).sum().backward()
    gradients = [parameter.grad.to_local() for parameter in experts.parameters() if parameter.grad is not None]
    return [t.detach() for t in (out, rows.grad, weights.grad, *gradients) if t is not None]


@pytest.mark.parametrize(
    "loads",
    [
        [[3, 1, 0, 2], [0, 4, 1, 1]],
        [[5, 0, 0, 0], [2, 0, 0, 0]],  # the second rank gets no row at all
        [[0, 0, 0, 0], [1, 0, 2, 3]],  # the first rank has none to send
        [[0, 0, 0, 0], [0, 0, 0, 0]],
    ],
)
def test_every_row_meets_its_expert_however_uneven_the_load(pool: Pool, loads: list[list[int]]) -> None:
    experts = make_experts()
    expected: list[list[Tensor]] = []
    for rank in range(2):
        rows, weights, offsets = rows_of(rank, loads[rank])
        out = experts(rows, weights, offsets)
        (out * (1 + torch.arange(HIDDEN))).sum().backward()
        assert rows.grad is not None
        assert weights.grad is not None
        expected.append([out.detach(), rows.grad, weights.grad])
    for rank, found in enumerate(pool.run(2, compute, loads)):
        here = [p.grad.chunk(2)[rank] for p in experts.parameters() if p.grad is not None]  # sums over both ranks' rows
        for a, b in zip(found, [*expected[rank], *here], strict=True):
            torch.testing.assert_close(a, b)
