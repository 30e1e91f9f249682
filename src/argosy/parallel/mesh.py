"""The ranks of a run as a grid with named axes, and what is asked of them together.

The axes are `pp`, `dp_replicate`, `dp_shard`, `cp` and `tp`, in this order: neighbours in the last exchange most, and sit
closest. Only axes larger than one exist as process groups. One process has no group at all, and everything asked of the mesh
is then answered on the spot: the layout of size one runs no hook and makes no call.

`Agreement` is what every rank must know alike to do the same thing at the same step: whether one of them was asked to stop, the
time, and how many saves have been written. Signals reach ranks at different moments, and clocks differ. At the end of each step a rank sends what it knows, without
waiting, and reads what all of them sent a step ago, which has arrived by then. So all ranks learn of a signal at the same
step, at most one later, and neither the device nor, as long as ranks are within a step of each other, the host waits. It
travels between hosts, not between GPUs. In one process nothing is sent, and a signal is known at once.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from argosy.compat import divided, flattened
from argosy.compat.messages import refuse_pickled_messages
from argosy.config.layout import AXES
from argosy.config.schema import ParallelSpec
from argosy.errors import EXIT_REFUSED, ArgosyError
from argosy.supervise.world import World

DATA_AXES = ("dp_replicate", "dp_shard")  # whose ranks have other samples
SUM_AXES = (*DATA_AXES, "cp")  # whose ranks have other tokens: losses and gradients are summed over them
EXPERT_AXES = ("edp", "ep")  # dp_shard x cp once more: ranks with the same experts, and with others
TIMEOUT = timedelta(
    minutes=30
)  # for the slowest thing ranks wait for each other in: a checkpoint being read or written

T = TypeVar("T")


@dataclass(frozen=True)
class Mesh:
    device: torch.device
    rank: int = 0
    devices: DeviceMesh | None = None  # of the axes larger than one; None: this process is alone
    experts: DeviceMesh | None = None  # of EXPERT_AXES, where experts are spread

    @property
    def is_first(self) -> bool:
        """Whether this rank writes the run directory and speaks to the user."""
        return self.rank == 0

    @property
    def world_size(self) -> int:
        return 1 if self.devices is None else self.devices.size()

    @property
    def names(self) -> tuple[str, ...]:
        return () if self.devices is None else self.devices.mesh_dim_names or ()

    def size(self, *axes: str) -> int:
        """Ranks along axes."""
        sizes = [along.size() for axis in axes if (along := self.along(axis)) is not None]
        return math.prod(sizes)

    @property
    def data_ranks(self) -> int:
        return self.size(*DATA_AXES)

    @property
    def data_rank(self) -> int:
        """Which of the equal shares of a global batch this rank reads."""
        found = 0
        for axis in DATA_AXES:
            if self.devices is not None and axis in self.names:
                found = found * self.devices[axis].size() + self.devices.get_local_rank(axis)
        return found

    @property
    def is_sharded(self) -> bool:
        """Whether each rank holds only a part of the model's state."""
        return self.has_fsdp or self.size("tp") > 1

    @property
    def has_fsdp(self) -> bool:
        """Whether parameters are gathered from ranks with other samples when they are needed."""
        return self.size("dp_shard") > 1 or self.experts is not None

    def along(self, *axes: str) -> DeviceMesh | None:
        """The ranks along those of the axes that exist, as one axis; `ep` and `edp` each alone."""
        if self.experts is not None and len(axes) == 1 and axes[0] in EXPERT_AXES:
            return self.experts[axes[0]]
        names = tuple(name for name in self.names if name in axes)
        return flattened(self.devices[names]) if self.devices is not None and names else None

    def ranks_along(self, axis: str) -> list[int]:
        """The ranks that differ from this one in that axis alone, itself among them."""
        along = self.along(axis)
        return [self.rank] if along is None else dist.get_process_group_ranks(along.get_group())

    def sum_(self, tensor: Tensor, *axes: str) -> None:
        """Replace a tensor by its sum over the ranks along the axes, by default all that have other tokens."""
        along = self.along(*(axes or SUM_AXES))
        if along is not None:
            dist.all_reduce(tensor, group=along.get_group())

    def on_first(self, function: Callable[[], T]) -> T | None:
        """Run it on the first rank, while the others wait. Where it is refused there, the others leave too, silently."""
        if self.devices is None:
            return function()
        done = torch.zeros((), dtype=torch.int64)
        result, refusal = None, None
        if self.is_first:
            try:
                result = function()
                done.fill_(1)
            except ArgosyError as error:
                refusal = error
        dist.broadcast(done, 0)
        if refusal is not None:
            raise refusal
        if not done:
            raise SystemExit(EXIT_REFUSED)
        return result

    def from_first(self, function: Callable[[], int]) -> int:
        """A whole number (or a truth) that the first rank finds, for all of them."""
        found = self.on_first(function)
        if self.devices is None:
            return int(found or 0)
        number = torch.tensor(found or 0, dtype=torch.int64)
        dist.broadcast(number, 0)
        return int(number)

    def gathered(self, numbers: list[float]) -> list[list[float]]:
        """The numbers of every rank, by rank; they travel between hosts."""
        if self.devices is None:
            return [numbers]
        mine = torch.tensor(numbers, dtype=torch.float64)
        everyone = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(everyone, mine)
        return [row.tolist() for row in everyone]

    def wait_for_all(self) -> None:
        if self.devices is not None:
            dist.all_reduce(torch.zeros(()))  # on the host, whatever the device


@contextmanager
def joined(parallel: ParallelSpec, world: World, device: torch.device) -> Iterator[Mesh]:
    """The mesh of a layout that is for as many ranks as there are (`check_world`), with this process in its place in it; the
    groups are gone at the end."""
    if world.size == 1:
        yield Mesh(device)
        return
    os.environ.setdefault("MASTER_ADDR", world.address)
    os.environ.setdefault("MASTER_PORT", str(world.port))
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    refuse_pickled_messages()
    dist.init_process_group(backend, rank=world.rank, world_size=world.size, timeout=TIMEOUT)
    try:
        yield make_mesh(parallel, device)
    finally:
        dist.destroy_process_group()


def make_mesh(parallel: ParallelSpec, device: torch.device) -> Mesh:
    """Once the process group exists."""
    sizes = {axis: getattr(parallel, axis) for axis in AXES if getattr(parallel, axis) > 1}
    kind = "cpu" if device.type == "meta" else device.type  # a rehearsal's ranks have no device
    devices = init_device_mesh(kind, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    mesh = Mesh(device, dist.get_rank(), devices)
    over = mesh.along("dp_shard", "cp")
    if parallel.ep == 1 or over is None:
        return mesh
    counts = (over.size() // parallel.ep, parallel.ep)
    return replace(mesh, experts=divided(over, dict(zip(EXPERT_AXES, counts, strict=True))))


class Asked(Protocol):
    """Who hears of signals in this process."""

    asked: str | None


class Agreement:
    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._listener: Asked | None = None
        self._count: Callable[[], int] = lambda: 0
        self._signal, self._time, self._saves = 0, time.monotonic(), 0
        self._sent: tuple[torch.Tensor, Any] | None = None
        if mesh.devices is not None:
            self._send()
            self._receive()

    def listen(self, listener: Asked) -> None:
        self._listener = listener

    def follow(self, count: Callable[[], int]) -> None:
        """`count` says how many saves this rank has seen to their end, well or not."""
        self._count = count

    @property
    def saves(self) -> int:
        """How many the first rank has seen to their end, once all ranks know of it."""
        return self._count() if self._mesh.devices is None else self._saves

    @property
    def asked(self) -> str | None:
        """The signal that asks for a stop, once all ranks know of it."""
        if self._mesh.devices is None:
            return None if self._listener is None else self._listener.asked
        return signal.Signals(self._signal).name if self._signal else None

    def now(self) -> float:
        """Seconds; on all ranks those of the first one's clock."""
        return time.monotonic() if self._mesh.devices is None else self._time

    def after_step(self) -> None:
        """Learn what was sent a step ago, and send again."""
        if self._mesh.devices is not None:
            self._receive()
            self._send()

    def close(self) -> None:
        """Take what is still on its way, so that no rank leaves while another waits for it."""
        self._receive()

    def _send(self) -> None:
        asked = None if self._listener is None else self._listener.asked
        number = 0 if asked is None else signal.Signals[asked].value
        clock, saves = (time.monotonic(), self._count()) if self._mesh.is_first else (0.0, 0)
        known = torch.tensor([number, clock, saves], dtype=torch.float64)
        self._sent = known, dist.all_reduce(known, dist.ReduceOp.MAX, async_op=True)

    def _receive(self) -> None:
        if self._sent is not None:
            known, work = self._sent
            work.wait()
            self._signal, self._time, self._saves = int(known[0]), float(known[1]), int(known[2])
            self._sent = None
