"""Small messages between ranks over the host network: bytes and JSON, never pickles, so that no rank can make another run code.

A `HostGroup` has a process group of its own, so that a thread beside training can use it. A group of one rank sends nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson
import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class HostGroup:
    """A group of ranks that exchange bytes and JSON over the host network."""

    rank: int = 0
    size: int = 1
    # None: this process is the only rank.
    group: dist.ProcessGroup | None = None

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def gather(self, message: bytes) -> list[bytes]:
        """Return the messages of all ranks on the first rank, and an empty list on the others."""
        if self.group is None:
            return [message]
        sizes = torch.zeros(self.size, dtype=torch.int64)
        sizes[self.rank] = len(message)
        dist.all_reduce(sizes, group=self.group)
        most = int(sizes.max())
        parts = [torch.empty(most, dtype=torch.uint8) for _ in range(self.size)] if self.is_first else None
        dist.gather(_padded(message, most), parts, group=self.group)
        return [_text(part, int(size)) for part, size in zip(parts or (), sizes, strict=False)]

    def scatter(self, messages: Sequence[bytes]) -> bytes:
        """Return this rank's message of those that the first rank passes, one for each rank."""
        if self.group is None:
            return messages[0]
        sizes = torch.zeros(self.size, dtype=torch.int64)
        if self.is_first:
            sizes += torch.tensor([len(message) for message in messages])
        dist.broadcast(sizes, 0, group=self.group)
        most = int(sizes.max())
        mine = torch.empty(most, dtype=torch.uint8)
        dist.scatter(mine, [_padded(message, most) for message in messages] or None, group=self.group)
        return _text(mine, int(sizes[self.rank]))

    def tell(self, message: bytes) -> bytes:
        """Broadcast: return the first rank's message on all ranks."""
        return self.scatter([message] * self.size if self.is_first else [])


ALONE = HostGroup()


def make_host_group() -> HostGroup:
    """Return a group of all ranks. This is a collective: every rank has to call it."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return ALONE
    return HostGroup(dist.get_rank(), dist.get_world_size(), dist.new_group(backend="gloo"))


def all_gather_json(document: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return every rank's document, in the order of ranks, on all ranks of `group` (None: the default group).

    This replaces `dist.all_gather_object`, which pickles. Both collectives are all-gathers of CPU tensors, so that in a fake
    process group every rank appears to send this rank's document.
    """
    message = orjson.dumps(document)
    ranks = dist.get_world_size(group)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(ranks)]
    dist.all_gather(sizes, torch.tensor([len(message)]), group=group)
    most = max(int(size) for size in sizes)
    parts = [torch.zeros(most, dtype=torch.uint8) for _ in range(ranks)]
    dist.all_gather(parts, _padded(message, most), group=group)
    return [orjson.loads(_text(part, int(size))) for part, size in zip(parts, sizes, strict=True)]


def _padded(message: bytes, size: int) -> Tensor:
    buffer = torch.zeros(size, dtype=torch.uint8)
    buffer[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8) if message else buffer[:0]
    return buffer


def _text(buffer: Tensor, size: int) -> bytes:
    return buffer[:size].numpy().tobytes()
