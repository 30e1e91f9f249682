"""Saving a checkpoint: every rank writes its own files, then the first rank writes the manifest and commits the directory.

The directory is complete or absent: it is written under a hidden name, synced, and renamed. Where a rename copies (`manifest.copies_to_rename`) it is
written under its own name and marked as incomplete until its manifest is there.

Why not DCP: its planners would decide who writes what, as `make_plan` does, but they exchange pickled objects and describe
the result in a pickle. Without that, little more than a loop over slices is left, which is here.

`Snapshot` is a host copy of a rank's checkpoint files, so that training goes on while they are written. A file's tensors lie in its buffer as they will in the file. Buffers are reused from save to save, and pinned if the tensors
are on a GPU, for the full speed of the bus (`host_buffer.py`).
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from argosy.checkpoint.disk import Written, write_bytes
from argosy.checkpoint.host_buffer import HostBuffer
from argosy.checkpoint.manifest import (
    OPTIMIZER,
    WEIGHTS,
    TrainProgress,
    copies_to_rename,
    finish,
    mark_complete,
    mark_incomplete,
    sync_directory,
)
from argosy.checkpoint.save_plan import Groups, Plan, make_plan
from argosy.checkpoint.store import remove
from argosy.checkpoint.stored import file_of, key_of
from argosy.checkpoint.tensors import TensorInfo, header_of, parts_of
from argosy.errors import ArgosyError
from argosy.parallel.host_group import ALONE, HostGroup


@dataclass(frozen=True)
class Content:
    """A file to write: its header, and the tensors whose bytes follow it."""

    header: bytes
    tensors: list[Tensor]


def save(
    root: Path,
    progress: TrainProgress,
    weights: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor],
    hosts: HostGroup = ALONE,
) -> Path:
    """Save synchronously, directly from the tensors. A collective: every rank must call it."""
    groups = {WEIGHTS: weights, OPTIMIZER: optimizer}
    plan = make_plan(groups, hosts)
    return write(root, progress, contents(plan, groups, hosts), plan, hosts)


def contents(plan: Plan, groups: Groups, hosts: HostGroup) -> dict[str, Content]:
    """Return this rank's files by name. They share the tensors' memory."""
    found: dict[str, Content] = {}
    for group in groups:
        # Widest types first, so that each tensor starts at a multiple of its element size.
        chunks = sorted(
            (chunk for chunk in plan.mine if chunk.group == group), key=lambda c: -groups[group][c.name].element_size()
        )
        if chunks or hosts.size == 1:
            infos, tensors = {}, []
            for chunk in chunks:
                whole = groups[group][chunk.name]
                key = key_of(chunk.name, chunk.box, TensorInfo.of(whole))
                infos[key] = TensorInfo(whole.dtype, chunk.box.shape)
                tensors.append(chunk.of(whole))
            found[file_of(group, hosts.rank, hosts.size)] = Content(header_of(infos), tensors)
    return found


def write(root: Path, progress: TrainProgress, files: Mapping[str, Content], plan: Plan, hosts: HostGroup) -> Path:
    """Write this rank's files, and commit the checkpoint once all ranks have. A failure on one rank raises on all of them."""
    final = root / f"step-{progress.step:08d}"
    partial = final if copies_to_rename(root) else root / f".{final.name}.partial"
    fault = hosts.tell(_attempt(lambda: _make_empty(partial, final)) if hosts.is_first else b"")
    messages: list[bytes] = []
    if not fault:
        written: dict[str, Written] = {}
        fault = _attempt(lambda: written.update(_write_files(partial, files)))
        messages = hosts.gather(json.dumps([fault.decode(), written]).encode())
    if hosts.is_first and messages:
        answers = [json.loads(message) for message in messages]
        fault = next((text.encode() for text, _ in answers if text), b"")
        every = {name: Written(*one) for _, found in answers for name, one in found.items()}
        fault = fault or _attempt(lambda: _commit(partial, final, progress, every, plan, hosts))
    fault = hosts.tell(fault)
    if fault:
        if hosts.is_first:
            shutil.rmtree(partial, ignore_errors=True)
        raise ArgosyError(
            "checkpoint.save-failed",
            f"step {progress.step} could not be saved in {root}: {fault.decode()}",
            fix="free some space or repair the file system, then run the same command again",
        )
    return final


def _write_files(partial: Path, files: Mapping[str, Content]) -> dict[str, Written]:
    written = {
        name: write_bytes(partial / name, content.header, parts_of(content.tensors)) for name, content in files.items()
    }
    sync_directory(partial)
    return written


def _commit(
    partial: Path, final: Path, progress: TrainProgress, files: dict[str, Written], plan: Plan, hosts: HostGroup
) -> None:
    finish(partial, progress, files, plan.index if hosts.size > 1 else None)
    if partial == final:
        mark_complete(final)
        return
    # An existing directory is a copy of this step that failed its check, or one from before a rewind.
    remove(final)
    partial.rename(final)
    sync_directory(final.parent)


def _make_empty(directory: Path, final: Path) -> None:
    if directory == final:
        remove(final)
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    if directory == final:
        mark_incomplete(directory)


def _attempt(work: Callable[[], object]) -> bytes:
    """Run `work` and return the OSError's text, or nothing on success."""
    try:
        work()
    except OSError as error:
        return (error.strerror or str(error)).encode() or b"unknown fault"
    return b""


class Snapshot:
    """Copies of a rank's files in host memory, which is kept between saves and prepared by a background thread."""

    def __init__(self) -> None:
        self._buffers: dict[str, HostBuffer] = {}
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    def prepare(self, files: Mapping[str, Content]) -> None:
        """Prepare memory for these files in the background."""
        self.pause()
        for name, content in files.items():
            self._buffer(name, content)
        self._resume()

    def take(self, files: Mapping[str, Content]) -> dict[str, Content]:
        """Copy the files. When this returns, the originals may change. The previous copies are overwritten."""
        self.pause()
        copies = {}
        for name, content in files.items():
            buffer = self._buffer(name, content)
            buffer.fill(content.tensors)
            copies[name] = Content(content.header, [buffer.bytes])
        if any(tensor.is_cuda for content in files.values() for tensor in content.tensors):
            torch.cuda.current_stream().synchronize()
        self._resume()
        return copies

    def pause(self, seconds: float | None = None) -> None:
        """Stop preparing memory. Wait for the piece that is being prepared, at most so many seconds."""
        if self._thread is not None:
            self._stop.set()
            self._thread.join(seconds)
            self._thread = None

    def _resume(self) -> None:
        buffers, self._stop = list(self._buffers.values()), threading.Event()
        self._thread = threading.Thread(target=_prepare, args=(buffers, self._stop), daemon=True)
        self._thread.start()

    def _buffer(self, name: str, content: Content) -> HostBuffer:
        size = sum(tensor.nbytes for tensor in content.tensors)
        if name not in self._buffers or self._buffers[name].size != size:
            gpus = (tensor.device for tensor in content.tensors if tensor.is_cuda)
            self._buffers[name] = HostBuffer(size, next(gpus, None))
        return self._buffers[name]


def _prepare(buffers: list[HostBuffer], stop: threading.Event) -> None:
    for buffer in buffers:
        buffer.prepare(stop)
