"""Memory for copies of checkpoint files: prepared beside training, in pieces, and right whenever a save comes."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from argosy.checkpoint import host_buffer, save, tensors
from argosy.checkpoint.host_buffer import HostBuffer
from argosy.checkpoint.save import Content, Snapshot
from argosy.checkpoint.tensors import parts_of
from waiting import wait_for

PIECE = 2 * 4096
ON_GPU = torch.device("cuda", 0)


class Driver:
    """Stands in for CUDA: what it was asked to pin. It can refuse, or wait."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}
        self.most = 10**9
        self.asked = threading.Event()
        self.goes_on = threading.Event()
        self.goes_on.set()

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.asked.set()
        self.goes_on.wait()
        if len(self.pinned) >= self.most:
            return 2
        assert address % 4096 == 0
        self.pinned[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.pinned[address]
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    found = Driver()
    monkeypatch.setattr(host_buffer, "_PIECE", PIECE)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: found)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    yield found
    found.goes_on.set()


def drawn() -> list[Tensor]:
    """Tensors whose bytes end anywhere in a piece, and one that is not contiguous."""
    torch.manual_seed(0)
    odd = torch.randint(0, 2, (PIECE + 3,)).bool()
    return [torch.randn(3000), torch.randn(50, 70).t(), odd, torch.tensor(7), torch.empty(0), torch.randn(9).bfloat16()]


def as_bytes(given: list[Tensor]) -> bytes:
    return b"".join(t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for t in given)


def prepared(buffer: HostBuffer) -> None:
    buffer.prepare()
    wait_for(lambda: buffer._prepared == len(buffer._pieces))


def test_a_copy_has_the_bytes_whether_memory_is_prepared_or_not(driver: Driver) -> None:
    given, other = drawn(), [t.clone() for t in reversed(drawn())]
    size = len(as_bytes(given))
    for ready in (True, False):
        buffer = HostBuffer(size, ON_GPU)
        if ready:
            prepared(buffer)
        for group in (given, other, given):
            buffer.fill(group)
            assert buffer.bytes.numpy().tobytes() == as_bytes(group)
        wait_for(lambda buffer=buffer: buffer._prepared == len(buffer._pieces))
        # Later than the copy, too, preparing changes no byte of it.
        assert buffer.bytes.numpy().tobytes() == as_bytes(given)


def test_pieces_are_pinned_once_and_cover_the_memory(driver: Driver) -> None:
    size = 5 * PIECE + 10
    buffer = HostBuffer(size, ON_GPU)
    prepared(buffer)
    buffer.pause()
    buffer.prepare()
    spans = sorted(driver.pinned.items())
    assert all(start + length == after for (start, length), (after, _) in pairwise(spans))
    assert (spans[0][0], sum(length for _, length in spans)) == (buffer.bytes.data_ptr(), size)
    assert len(spans) == 6
    del buffer
    gc.collect()
    assert not driver.pinned


def test_no_copy_reaches_into_two_pieces(driver: Driver) -> None:
    buffer = HostBuffer(len(as_bytes(drawn())), ON_GPU)
    start = buffer.bytes.data_ptr()
    places = [
        ((place.data_ptr() - start) // PIECE, (place.data_ptr() - start + len(place) - 1) // PIECE)
        for place, _ in buffer._matched(drawn())
    ]
    assert all(first == last for first, last in places)
    assert {first for first, _ in places} == set(range(len(buffer._pieces)))


def test_a_save_waits_for_one_piece_only(driver: Driver) -> None:
    given = [torch.arange(20 * PIECE, dtype=torch.uint8)]
    buffer = HostBuffer(20 * PIECE, ON_GPU)
    driver.goes_on.clear()
    buffer.prepare()
    driver.asked.wait()
    threading.Timer(0.05, driver.goes_on.set).start()
    buffer.pause()
    assert len(driver.pinned) == buffer._prepared == 1
    buffer.fill(given)
    wait_for(lambda: len(driver.pinned) == 20)
    assert torch.equal(buffer.bytes, given[0])


def test_where_the_system_pins_no_more_copies_are_right(driver: Driver) -> None:
    driver.most = 2
    given = drawn()
    buffer = HostBuffer(len(as_bytes(given)), ON_GPU)
    prepared(buffer)
    assert len(driver.pinned) == 2
    buffer.fill(given)
    assert buffer.bytes.numpy().tobytes() == as_bytes(given)


def test_without_a_gpu_nothing_is_pinned(driver: Driver) -> None:
    buffer = HostBuffer(3 * PIECE)
    prepared(buffer)
    assert not driver.asked.is_set()
    buffer.fill([torch.ones(3 * PIECE, dtype=torch.uint8)])
    assert bool(buffer.bytes.all())


def test_training_does_not_wait_for_the_memory_of_a_snapshot(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its allocation takes long, as that of pinned memory does."""
    monkeypatch.setattr(save, "HostBuffer", lambda size, device: HostBuffer(size, ON_GPU))
    driver.goes_on.clear()
    snapshot, files = Snapshot(), {"a": Content(b"", [torch.ones(10 * PIECE)]), "b": Content(b"", [torch.ones(3)])}
    snapshot.prepare(files)
    driver.asked.wait()
    assert not driver.pinned  # and here we are
    driver.goes_on.set()
    copies = snapshot.take(files)
    assert {name: as_bytes(copy.tensors) for name, copy in copies.items()} == {
        name: as_bytes(content.tensors) for name, content in files.items()
    }
    snapshot.pause()
    assert not [thread for buffer in snapshot._buffers.values() if (thread := buffer._thread) is not None]


def test_tensors_of_a_gpu_are_written_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    given = drawn()
    whole = b"".join(bytes(part) for part in parts_of(given))
    monkeypatch.setattr(tensors, "_PART", 1000)
    monkeypatch.setattr(tensors, "_is_elsewhere", lambda tensor: True)
    parts = [bytes(part) for part in parts_of(given)]
    assert b"".join(parts) == whole == as_bytes(given)
    assert max(map(len, parts)) == 1000
