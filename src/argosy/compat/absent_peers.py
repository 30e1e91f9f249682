"""Collectives of a process whose peers do not exist: every peer is taken to send what this rank sends.

torch's fake process group leaves the output of some collectives unset before torch 2.13. Where it sets the output, it launches a
copy for each rank: with 1,024 ranks these launches take longer than the layer between two of them. The stand-ins here are few copies.
The values stay ordinary, which matters to a measurement: a GPU multiplies zeros and NaNs faster than weights. Row counts of
experts come out balanced, because a rank that receives the counts it sends receives as many rows as it sends.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@contextmanager
def fake_ranks(rank: int, size: int) -> Iterator[None]:
    """Make this process one of `size` ranks of which the others do not exist: process groups can be made, and collectives return
    at once."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    # Names differ between versions of torch: 2.13 renamed two of them, and keeps the old ones.
    names = [name for name in _STAND_INS if hasattr(dist, name)]
    real, hook = {name: getattr(dist, name) for name in names}, sys.excepthook
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        for name in names:
            setattr(dist, name, _STAND_INS[name])
        yield
    finally:
        for name, function in real.items():
            setattr(dist, name, function)
        dist.destroy_process_group()
        # torch writes the rank before every line of an uncaught error, once more for each process group.
        sys.excepthook = hook
        forget_meshes()


def forget_meshes() -> None:
    """Clear what DTensor remembers of layouts, by the shape of their mesh: the next ranks would find these process groups in it.

    Each thread remembers its own. Backward passes on a GPU run in a thread of autograd's."""
    if "torch.distributed.tensor" not in sys.modules:
        return
    _clear_layouts()
    if torch.cuda.is_initialized():
        # After an error of the device nothing runs there any more, and that error is the one to tell.
        with suppress(RuntimeError), torch.enable_grad():
            there = torch.zeros((), device="cuda", requires_grad=True) * 1
            there.register_hook(lambda _: _clear_layouts())
            there.backward()


def _clear_layouts() -> None:
    from torch.distributed.tensor import debug

    for name in ("_clear_fast_path_sharding_prop_cache", "_clear_python_sharding_prop_cache"):
        getattr(debug, name, lambda: None)()


def has_peers() -> bool:
    """True if the other ranks of this job exist. Without them, a message that is received holds what its buffer held."""
    return dist.get_backend() != "fake"


class _Done(dist.distributed_c10d.Work):
    """The handle of a collective that is complete when it returns."""

    def wait(self, timeout: Any = None) -> bool:
        return True


@torch.no_grad()
def _all_gather(
    output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup | None = None, async_op: bool = False
) -> _Done | None:
    ranks = dist.get_world_size(group)
    parts = output_tensor.view(ranks, -1)
    # FSDP gathers in place: the input may be a part of the output.
    parts[0].copy_(input_tensor.reshape(-1))
    # Twice as many with each copy: one that repeats its source runs at a quarter of the memory's rate.
    done = 1
    while done < ranks:
        more = min(done, ranks - done)
        parts[done : done + more].copy_(parts[:more])
        done += more
    return _Done() if async_op else None


@torch.no_grad()
def _reduce_scatter(
    output: Tensor, input: Tensor, op: Any = None, group: dist.ProcessGroup | None = None, async_op: bool = False
) -> _Done | None:
    output.view(-1).copy_(input.view(dist.get_world_size(group), -1)[dist.get_rank(group)])
    return _Done() if async_op else None


@torch.no_grad()
def _all_to_all(
    output: Tensor,
    input: Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> _Done | None:
    output.copy_(input)
    return _Done() if async_op else None


_STAND_INS: dict[str, Callable[..., _Done | None]] = {
    "all_gather_into_tensor": _all_gather,
    "all_gather_single": _all_gather,
    "reduce_scatter_tensor": _reduce_scatter,
    "reduce_scatter_single": _reduce_scatter,
    "all_to_all_single": _all_to_all,
}
