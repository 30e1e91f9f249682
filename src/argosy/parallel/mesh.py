"""The device mesh of a run: its ranks as a grid with named axes, and the collectives over it.

The axes are `pp`, `dp_replicate`, `dp_shard`, `cp` and `tp`, in this order: neighbours along the last axis exchange most, and
are closest to each other. Only axes larger than one have process groups. A world size of one has no process group, and the
methods of the mesh then return at once, without a collective.

`Agreement` holds what every rank must know alike to do the same thing at the same step: whether a rank was asked to stop, the
time, and how many saves have been written. Signals reach ranks at different moments, and clocks differ. At the end of each step
a rank starts an asynchronous all-reduce of what it knows, and reads the result of the one it started a step ago. All ranks
therefore learn of a signal at the same step, at most one step late. The device never waits, and the host waits only if ranks are
more than a step apart. The all-reduce uses the host network, not the GPUs. In one process nothing is sent, and a signal is known
at once.
"""

from __future__ import annotations

import math
import os
import signal
import time
from array import array
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
from argosy.parallel.cuda_graphs import release_graphs
from argosy.parallel.host_group import HostGroup
from argosy.supervise.world import World

# Axes whose ranks have different samples.
DATA_AXES = ("dp_replicate", "dp_shard")
# Axes whose ranks have different tokens: losses and gradients are summed over them.
SUM_AXES = (*DATA_AXES, "cp")
# dp_shard x cp, divided again: ranks with the same experts, and ranks with different experts.
EXPERT_AXES = ("edp", "ep")
# The slowest collective waits for a checkpoint that is being read or written.
TIMEOUT = timedelta(minutes=30)

T = TypeVar("T")


@dataclass(frozen=True)
class Mesh:
    """The grid of ranks, this rank's place in it, and its device."""

    device: torch.device
    rank: int = 0
    # The axes larger than one. None: this process is the only rank.
    devices: DeviceMesh | None = None
    # EXPERT_AXES. None: no expert parallelism.
    experts: DeviceMesh | None = None
    # Place among the ranks of this host.
    local_rank: int = 0

    @property
    def is_first(self) -> bool:
        """True if this rank writes the run directory and prints to the console."""
        return self.rank == 0

    @property
    def world_size(self) -> int:
        return 1 if self.devices is None else self.devices.size()

    @property
    def names(self) -> tuple[str, ...]:
        return () if self.devices is None else self.devices.mesh_dim_names or ()

    def size(self, *axes: str) -> int:
        """Return the number of ranks along the axes."""
        sizes = [along.size() for axis in axes if (along := self.along(axis)) is not None]
        return math.prod(sizes)

    @property
    def data_ranks(self) -> int:
        return self.size(*DATA_AXES)

    @property
    def data_rank(self) -> int:
        """The index of the equal share of a global batch that this rank reads."""
        found = 0
        for axis in DATA_AXES:
            if self.devices is not None and axis in self.names:
                found = found * self.devices[axis].size() + self.devices.get_local_rank(axis)
        return found

    @property
    def has_fsdp(self) -> bool:
        """True if FSDP shards the parameters, and all-gathers them when they are needed."""
        return self.size("dp_shard") > 1 or self.experts is not None

    def along(self, *axes: str) -> DeviceMesh | None:
        """Return the ranks along those of the axes that exist, flattened into one axis; None if none exists.

        `ep` and `edp` can only be asked for alone."""
        if self.experts is not None and len(axes) == 1 and axes[0] in EXPERT_AXES:
            return self.experts[axes[0]]
        names = tuple(name for name in self.names if name in axes)
        return flattened(self.devices[names]) if self.devices is not None and names else None

    def ranks_along(self, axis: str) -> list[int]:
        """Return the ranks that differ from this one along that axis only, this rank included."""
        along = self.along(axis)
        return [self.rank] if along is None else dist.get_process_group_ranks(along.get_group())

    def sum_(self, tensor: Tensor, *axes: str) -> None:
        """All-reduce a tensor in place: sum it over the ranks along the axes, by default `SUM_AXES`."""
        along = self.along(*(axes or SUM_AXES))
        if along is not None:
            dist.all_reduce(tensor, group=along.get_group())

    def on_first(self, function: Callable[[], T]) -> T | None:
        """Run `function` on the first rank while the others wait. If it raises ArgosyError there, the others exit silently."""
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
        """Run `function` on the first rank and broadcast the integer (or bool) it returns to all ranks."""
        found = self.on_first(function)
        if self.devices is None:
            return int(found or 0)
        number = torch.tensor(found or 0, dtype=torch.int64)
        dist.broadcast(number, 0)
        return int(number)

    def gathered(self, numbers: list[float]) -> list[list[float]]:
        """Gather numbers over the host network: return those of every rank, by rank, on the first rank, and these on the others."""
        if self.devices is None:
            return [numbers]
        rows = HostGroup(self.rank, self.world_size, dist.group.WORLD).gather(array("d", numbers).tobytes())
        return [array("d", row).tolist() for row in rows] or [numbers]


@contextmanager
def joined(parallel: ParallelSpec, world: World, device: torch.device) -> Iterator[Mesh]:
    """Initialise the process group, yield the mesh of a layout, and destroy the group at the end.

    The layout has to match the world size (`check_world`)."""
    if world.size == 1:
        yield Mesh(device)
        return
    os.environ.setdefault("MASTER_ADDR", world.address)
    os.environ.setdefault("MASTER_PORT", str(world.port))
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    # Each rank of gloo would connect to all others at once: 4,096 ranks open 8 million connections, and any rank 4,095 files.
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    # NCCL would register the buffers of captured collectives, which fails with the allocator's expandable segments.
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    refuse_pickled_messages()
    dist.init_process_group(backend, rank=world.rank, world_size=world.size, timeout=TIMEOUT)
    failed = True
    try:
        yield replace(make_mesh(parallel, device), local_rank=world.local_rank)
        failed = False
    finally:
        try:
            release_graphs(failed=failed)
        finally:
            dist.destroy_process_group()


def make_mesh(parallel: ParallelSpec, device: torch.device) -> Mesh:
    """Return the mesh of a layout. The process group has to exist."""
    sizes = {axis: getattr(parallel, axis) for axis in AXES if getattr(parallel, axis) > 1}
    # The ranks of a rehearsal have no device.
    kind = "cpu" if device.type == "meta" else device.type
    devices = init_device_mesh(kind, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    mesh = Mesh(device, dist.get_rank(), devices)
    over = mesh.along("dp_shard", "cp")
    if parallel.ep == 1 or over is None:
        return mesh
    counts = (over.size() // parallel.ep, parallel.ep)
    return replace(mesh, experts=divided(over, dict(zip(EXPERT_AXES, counts, strict=True))))


class Asked(Protocol):
    """The signal listener of this process."""

    asked: str | None


class Agreement:
    """The facts on which all ranks agree, at most one step late: a request to stop, the time, the number of finished saves."""

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
        """Register `count`, which returns how many saves this rank has seen end, successful or failed."""
        self._count = count

    @property
    def saves(self) -> int:
        """The number of saves that the first rank has seen end, once all ranks know of them."""
        return self._count() if self._mesh.devices is None else self._saves

    @property
    def asked(self) -> str | None:
        """The signal that asks for a stop, once all ranks know of it."""
        if self._mesh.devices is None:
            return None if self._listener is None else self._listener.asked
        return signal.Signals(self._signal).name if self._signal else None

    def now(self) -> float:
        """Return the first rank's monotonic clock in seconds, the same on all ranks."""
        return time.monotonic() if self._mesh.devices is None else self._time

    def after_step(self) -> None:
        """Receive the all-reduce that was started a step ago, and start the next."""
        if self._mesh.devices is not None:
            self._receive()
            self._send()

    def close(self) -> None:
        """Finish the all-reduce that is still pending, so that no rank exits while another waits for it."""
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
