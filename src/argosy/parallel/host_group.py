"""Small messages between ranks over the host network: bytes and JSON, never pickles, so that no rank can make another run code.

A `HostGroup` has a process group of its own, so that a thread beside training can use it. A group of one rank sends nothing.

Messages travel along a binomial tree: the parent of a rank is the rank without its lowest bit. The first rank talks to 12 of 4,096
ranks, and a message arrives after at most 12 hops. gloo's own gather takes one receive for each rank, and its all-gather as many hops
as there are ranks, each of them on all ranks."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson
import torch
import torch.distributed as dist
from torch import Tensor

_TAG = 0xA460
_LENGTH = struct.Struct("<Q")


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

    def merge(self, message: bytes, merge: Callable[[list[bytes]], bytes]) -> bytes:
        """Return the merged messages of all ranks on the first rank, and nothing on the others.

        Args:
            merge: joins the messages of consecutive ranks, given in the order of ranks, on every rank that passes them on. Its result
                should stay small.
        """
        if self.group is None:
            return merge([message])
        messages = [message, *(self._receive(child) for child in children(self.rank, self.size))]
        merged = merge(messages)
        if self.is_first:
            return merged
        self._send(merged, parent(self.rank))
        return b""

    def gather(self, message: bytes) -> list[bytes]:
        """Return the messages of all ranks on the first rank, and an empty list on the others."""
        return _unpacked(self.merge(_LENGTH.pack(len(message)) + message, b"".join))

    def tell(self, message: bytes) -> bytes:
        """Broadcast: return the first rank's message on all ranks."""
        if self.group is None:
            return message
        size = torch.tensor([len(message)])
        dist.broadcast(size, 0, group=self.group)
        buffer = _tensor(message) if self.is_first else torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(buffer, 0, group=self.group)
        return _text(buffer, int(size))

    def _send(self, message: bytes, to: int) -> None:
        dist.send(torch.tensor([len(message)]), to, group=self.group, tag=_TAG)
        dist.send(_tensor(message), to, group=self.group, tag=_TAG)

    def _receive(self, source: int) -> bytes:
        size = torch.zeros(1, dtype=torch.int64)
        dist.recv(size, source, group=self.group, tag=_TAG)
        buffer = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(buffer, source, group=self.group, tag=_TAG)
        return _text(buffer, len(buffer))


def parent(rank: int) -> int:
    """Return the rank without its lowest bit."""
    return rank & (rank - 1)


def children(rank: int, size: int) -> list[int]:
    """Return the ranks whose parent is `rank`, in ascending order. Each stands for the ranks up to the next one."""
    lowest = rank & -rank if rank else size
    return [rank + (1 << bit) for bit in range(lowest.bit_length()) if 1 << bit < lowest and rank + (1 << bit) < size]


def _unpacked(packed: bytes) -> list[bytes]:
    found, at = [], 0
    while at < len(packed):
        first = at + _LENGTH.size
        at = first + _LENGTH.unpack_from(packed, at)[0]
        found.append(packed[first:at])
    return found


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
    buffer[: len(message)] = _tensor(message)
    return buffer


def _tensor(message: bytes) -> Tensor:
    return torch.frombuffer(bytearray(message), dtype=torch.uint8) if message else torch.empty(0, dtype=torch.uint8)


def _text(buffer: Tensor, size: int) -> bytes:
    return buffer[:size].numpy().tobytes()
