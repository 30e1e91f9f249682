"""Torch 2.11's compiler loses the gradient of an autograd function whose output was written in place, but not that of a view of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from argosy.parallel import exchange
from argosy.parallel.tensor.region import Region


@pytest.fixture
def alone() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


COLLECTIVES: dict[str, Callable[[Tensor, dist.ProcessGroup], Tensor]] = {
    "gather": exchange.gather,
    "swap": exchange.swap,
    "send": lambda x, group: exchange.send(x, [1], [1], group),
    "all-reduce of a region": lambda x, group: Region(group, False).leave(x),
    "reduce-scatter of a region": lambda x, group: Region(group, True).leave(x),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_what_a_collective_wrote_is_a_view_to_the_compiler(
    alone: dist.ProcessGroup, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.ones(1, 2, 3, requires_grad=True)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert COLLECTIVES[name](x, alone)._is_view()
