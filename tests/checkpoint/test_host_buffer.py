"""Memory for copies of checkpoint files: prepared beside training, in pieces, and right whenever a save comes."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from argosy.checkpoint import host_buffer, save, tensors
from argosy.checkpoint.host_buffer import HostBuffer
from argosy.checkpoint.save import Content, Snapshot
from argosy.checkpoint.tensors import TensorInfo, parts_of, write_stream
from argosy.parallel.capture_turn import CAPTURE_TURN
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
    gc.collect()  # what is pinned is unpinned by this stand-in


def drawn() -> list[Tensor]:
    """Tensors whose bytes end anywhere in a piece, and one that is not contiguous."""
    torch.manual_seed(0)
    odd = torch.randint(0, 2, (PIECE + 3,)).bool()
    return [torch.randn(3000), torch.randn(50, 70).t(), odd, torch.tensor(7), torch.empty(0), torch.randn(9).bfloat16()]


def as_bytes(given: list[Tensor]) -> bytes:
    return b"".join(t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for t in given)


def prepared(buffer: HostBuffer) -> HostBuffer:
    buffer.prepare(threading.Event())
    return buffer


def test_a_copy_has_the_bytes_whether_memory_is_prepared_or_not(driver: Driver) -> None:
    given, other = drawn(), [t.clone() for t in reversed(drawn())]
    size = len(as_bytes(given))
    for buffer in (prepared(HostBuffer(size, ON_GPU)), HostBuffer(size, ON_GPU)):
        for group in (given, other, given):
            buffer.fill(group)
            assert buffer.bytes.numpy().tobytes() == as_bytes(group)
        # Later than the copy, too, preparing changes no byte of it.
        prepared(buffer)
        assert buffer.bytes.numpy().tobytes() == as_bytes(given)


def test_pieces_are_pinned_once_and_cover_the_memory(driver: Driver) -> None:
    size = 5 * PIECE + 10
    buffer = prepared(prepared(HostBuffer(size, ON_GPU)))
    spans = sorted(driver.pinned.items())
    assert all(start + length == after for (start, length), (after, _) in pairwise(spans))
    assert (spans[0][0], sum(length for _, length in spans)) == (buffer.bytes.data_ptr(), size)
    assert len(spans) == 6
    del buffer
    gc.collect()
    assert not driver.pinned


class Copies(TorchFunctionMode):
    """Notes where in memory is copied to."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[tuple[int, int]] = []

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        if function is Tensor.copy_:
            self.places.append((arguments[0].data_ptr(), arguments[0].nbytes))
        return function(*arguments, **(keywords or {}))


def test_no_copy_reaches_into_two_pieces(driver: Driver) -> None:
    buffer = HostBuffer(len(as_bytes(drawn())), ON_GPU)
    start = buffer.bytes.data_ptr()
    with Copies() as copies:
        buffer.fill(drawn())
    pieces = [((at - start) // PIECE, (at + size - 1 - start) // PIECE) for at, size in copies.places]
    assert all(first == last for first, last in pieces)
    assert {first for first, _ in pieces} == set(range(len(buffer._pieces)))


def test_where_the_system_pins_no_more_copies_are_right(driver: Driver) -> None:
    driver.most = 2
    given = drawn()
    buffer = prepared(HostBuffer(len(as_bytes(given)), ON_GPU))
    assert len(driver.pinned) == 2
    buffer.fill(given)
    assert buffer.bytes.numpy().tobytes() == as_bytes(given)


def test_without_a_gpu_nothing_is_pinned(driver: Driver) -> None:
    buffer = prepared(HostBuffer(3 * PIECE))
    assert not driver.asked.is_set()
    buffer.fill([torch.ones(3 * PIECE, dtype=torch.uint8)])
    assert bool(buffer.bytes.all())


@pytest.fixture
def snapshot(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Iterator[Snapshot]:
    """One whose tensors seem to be on a GPU."""
    monkeypatch.setattr(save, "HostBuffer", lambda size, device: HostBuffer(size, ON_GPU))
    found = Snapshot()
    yield found
    driver.goes_on.set()
    found.pause()
    found._buffers.clear()


FILES = {"a": Content(b"", [torch.ones(10 * PIECE)]), "b": Content(b"", [torch.arange(20 * PIECE)])}
PIECES = sum(tensor.nbytes for content in FILES.values() for tensor in content.tensors) // PIECE


def require_copies(snapshot: Snapshot) -> None:
    for name, copy in snapshot.take(FILES).items():
        assert as_bytes(copy.tensors) == as_bytes(FILES[name].tensors)


def test_training_does_not_wait_for_memory_and_a_save_for_one_piece_only(driver: Driver, snapshot: Snapshot) -> None:
    """Also where pinning takes long."""
    driver.goes_on.clear()
    snapshot.prepare(FILES)
    driver.asked.wait()
    assert not driver.pinned  # and here we are
    threading.Timer(0.05, driver.goes_on.set).start()
    snapshot.pause()
    assert len(driver.pinned) == 1
    require_copies(snapshot)
    wait_for(lambda: len(driver.pinned) == PIECES)
    require_copies(snapshot)


def test_nothing_is_pinned_while_a_copy_is_taken(
    driver: Driver, snapshot: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    fill = HostBuffer.fill

    def slow(buffer: HostBuffer, tensors: list[Tensor]) -> None:
        counts.append(len(driver.pinned))
        fill(buffer, tensors)
        time.sleep(0.02)
        counts.append(len(driver.pinned))

    monkeypatch.setattr(HostBuffer, "fill", slow)
    snapshot.prepare(FILES)
    require_copies(snapshot)
    assert len(set(counts)) == 1
    wait_for(lambda: len(driver.pinned) == PIECES)


def test_memory_of_another_size_is_no_longer_prepared(driver: Driver, snapshot: Snapshot) -> None:
    snapshot.prepare({"a": FILES["b"]})
    snapshot.prepare({"a": FILES["a"]})
    size = FILES["a"].tensors[0].nbytes
    wait_for(lambda: gc.collect() is not None and sum(driver.pinned.values()) == size)


def test_the_end_of_a_run_does_not_wait_for_a_driver_that_hangs(driver: Driver, snapshot: Snapshot) -> None:
    driver.goes_on.clear()
    snapshot.prepare(FILES)
    driver.asked.wait()
    preparing = snapshot._thread
    assert preparing is not None
    snapshot.pause(0.01)
    assert preparing.is_alive()
    driver.goes_on.set()
    preparing.join()
    assert len(driver.pinned) == 1


def test_nothing_is_pinned_while_a_pass_is_captured(driver: Driver, snapshot: Snapshot) -> None:
    with CAPTURE_TURN:
        snapshot.prepare(FILES)
        wait_for(lambda: any(buffer._prepared for buffer in snapshot._buffers.values()))
        assert not driver.asked.is_set()
    wait_for(lambda: len(driver.pinned) == PIECES)


def test_tensors_of_a_gpu_are_written_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    given = drawn()
    whole = b"".join(bytes(part) for part in parts_of(given))
    monkeypatch.setattr(tensors, "_PART", 1000)
    monkeypatch.setattr(tensors, "_is_elsewhere", lambda tensor: True)
    parts = [bytes(part) for part in parts_of(given)]
    assert b"".join(parts) == whole == as_bytes(given)
    assert max(map(len, parts)) == 1000


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_tensor_is_let_go_before_the_next_is_made(
    elsewhere: bool, transposed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it was made, and as a contiguous copy; a block that is being filled may still refer to that copy, where nothing else copies."""
    monkeypatch.setattr(tensors, "_is_elsewhere", lambda tensor: elsewhere)
    made: list[weakref.ref[Tensor]] = []

    def make(name: str) -> Tensor:
        assert not any(ref() is not None for ref in made)
        tensor = torch.ones(30, 40)
        made.append(weakref.ref(tensor))
        return tensor.t() if transposed else tensor

    infos = {str(n): TensorInfo(torch.float32, (40, 30) if transposed else (30, 40)) for n in range(4)}
    write_stream(tmp_path / "x", infos, make)
    assert len(made) == 4
