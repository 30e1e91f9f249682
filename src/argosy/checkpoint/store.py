"""The checkpoints of a run: find the newest good one, keep the last few, set bad ones aside.

No file records which checkpoint is the latest: it is found by listing, and used only if every hash is right. A directory is
renamed or marked before it is deleted, so that a half-deleted one never looks like a checkpoint.

`load_into` loads a checkpoint into tensors of any layout: each rank reads only the slices that it holds.
"""

from __future__ import annotations

import contextlib
import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import orjson
import torch
from torch import Tensor

from argosy.checkpoint.disk import READERS
from argosy.checkpoint.manifest import (
    INCOMPLETE,
    Checkpoint,
    copies_to_rename,
    is_incomplete,
    mark_incomplete,
    read_checkpoint,
    verify,
)
from argosy.checkpoint.stored import StoredTensors
from argosy.config.start import BEST
from argosy.errors import ArgosyError
from argosy.parallel.host_group import ALONE, HostGroup
from argosy.parallel.shards import Box, held_boxes
from argosy.untrusted import MIB

# About how many bytes of a tensor are read at a time. The allocator uses the memory of such small pieces again. New memory takes longer.
_PIECE = 4 * MIB
_NAME = re.compile(r"step-(\d{8,})")


def latest(
    root: Path, report: Callable[[str], None], *, set_aside: bool = False, hosts: HostGroup = ALONE
) -> Checkpoint | None:
    """Return the newest checkpoint whose hashes are right, or None if there is no checkpoint.

    Args:
        report: called with a message for each bad checkpoint.
        set_aside: rename bad checkpoints once a good one is found, so that they are not considered again.

    Raises:
        ArgosyError: there are checkpoints, and none is good.
    """
    faults = []
    bad: list[Path] = []
    is_pruned = False
    names: list[str] = orjson.loads(hosts.tell(orjson.dumps([path.name for path in listed(root)])))
    for path in (root / name for name in names):
        try:
            found = verify(path, hosts)
        except ArgosyError as error:
            if error.code != "checkpoint.corrupt":
                raise
            if hosts is ALONE and _is_removed(path):
                # A run that trains meanwhile has saved newer ones.
                is_pruned = True
                continue
            faults.append(error.cause)
            bad.append(path)
            report(f"{path.name} is not used: {error.cause}")
            continue
        for damaged in bad if set_aside and hosts.is_first else ():
            damaged.rename(_free_name(damaged))
        return found
    if is_pruned:
        return latest(root, report, set_aside=set_aside)
    if faults:
        raise ArgosyError(
            "checkpoint.corrupt",
            "no checkpoint passes its check:\n" + "\n".join(faults),
            fix=f"restore one from a backup, or move {root} away to start again from step 0",
        )
    return None


def listed(root: Path) -> list[Path]:
    """Return the checkpoint directories, newest first. Those being written or removed have other names, or are marked."""
    found = [path for path in root.glob("step-*") if _NAME.fullmatch(path.name) and not _is_removed(path)]
    return sorted(found, key=step_of, reverse=True)


def _is_removed(path: Path) -> bool:
    return not path.is_dir() or is_incomplete(path)


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def validation_loss_of(path: Path) -> float:
    """Return the validation loss that a checkpoint states; infinite if it states none, or cannot be read."""
    try:
        found = read_checkpoint(path).progress.about.get("validation_loss")
    except ArgosyError:
        return math.inf
    return float(found) if isinstance(found, int | float) and math.isfinite(found) else math.inf


def best_checkpoint(root: Path) -> Path | None:
    """Return the checkpoint with the lowest validation loss, the newest of equals; None if none states a loss."""
    losses = {path: validation_loss_of(path) for path in listed(root)}
    best = min(losses, key=losses.__getitem__, default=None)
    return None if best is None or math.isinf(losses[best]) else best


def named_checkpoint(path: Path) -> Path:
    """Return the checkpoint that `RUN/best` stands for, and any other path as it is.

    Raises:
        ArgosyError: no checkpoint of the run states a validation loss.
    """
    if path.name != BEST or path.exists():
        return path
    found = best_checkpoint(path.parent / "checkpoints")
    if found is None:
        raise ArgosyError(
            "run.not-found",
            f"no checkpoint of {path.parent} was saved after an evaluation, so that none is known to be the best",
            fix=f"checkpoint.best=validation_loss keeps it; {path.parent} is the newest",
        )
    return found


def superfluous(
    root: Path, keep: int, newest: int, keep_every: int | None = None, *, keep_best: bool = False
) -> list[Path]:
    """Return the checkpoints to delete: up to step `newest`, which is good, all but the last `keep`, multiples of
    `keep_every` and, with `keep_best`, the one with the lowest validation loss."""
    older = [path for path in listed(root) if step_of(path) <= newest][keep:]
    best = best_checkpoint(root) if keep_best and older else None
    return [path for path in older if (keep_every is None or step_of(path) % keep_every) and path != best]


def prune(root: Path, keep: int, newest: int, keep_every: int | None = None, *, keep_best: bool = False) -> None:
    for path in superfluous(root, keep, newest, keep_every, keep_best=keep_best):
        remove(path)
    sweep(root)


def sweep(root: Path) -> None:
    """Remove what a killed save or a killed removal left behind."""
    for leftover in [*root.glob(".step-*"), *(mark.parent for mark in root.glob(f"step-*/{INCOMPLETE}"))]:
        shutil.rmtree(leftover, ignore_errors=True)


def remove(path: Path) -> None:
    if path.exists() and copies_to_rename(path):
        mark_incomplete(path)
        # The mark goes last: without it, what is left would look like a checkpoint.
        for file in path.iterdir():
            if file.name != INCOMPLETE:
                file.unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)
    elif path.exists():
        doomed = path.with_name(f".{path.name}.removed")
        shutil.rmtree(doomed, ignore_errors=True)
        # Another process may have removed it first.
        with contextlib.suppress(FileNotFoundError):
            path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def _free_name(path: Path) -> Path:
    number = 1
    while (target := path.with_name(f"bad-{path.name}.{number}")).exists():
        number += 1
    return target


def require_names(have: Set[str], need: Set[str], path: Path) -> None:
    """Refuse a checkpoint of another model, and name a missing and an extra tensor."""
    if have != need:
        missing, extra = sorted(need - have), sorted(have - need)
        parts = [
            f"{label} {names[0]}" + (f" and {len(names) - 1} more" if names[1:] else "")
            for label, names in (("lacks", missing), ("has also", extra))
            if names
        ]
        raise ArgosyError(
            "checkpoint.mismatch",
            f"{path} is of another model: it {'; it '.join(parts)}",
            fix="check model and run name",
        )


def _all_names(messages: list[bytes]) -> bytes:
    return orjson.dumps(sorted({name for message in messages for name in orjson.loads(message)}))


@torch.no_grad()
def load_into(stored: StoredTensors, tensors: Mapping[str, Tensor], where: Path, hosts: HostGroup = ALONE) -> None:
    """Fill this rank's slices of the tensors. All ranks together must have exactly the stored names."""
    names: list[str] = orjson.loads(hosts.tell(hosts.merge(orjson.dumps(list(tensors)), _all_names)))
    require_names(stored.keys(), set(names), where)
    for name, tensor in tensors.items():
        found, wanted = stored.infos[name].shape, tuple(tensor.shape)
        if found != wanted:
            raise ArgosyError(
                "checkpoint.mismatch",
                f"{where}: {name} has shape {list(found)}, the model wants {list(wanted)}",
                fix="check model and run name",
            )
    pieces = [(name, *piece) for name, tensor in tensors.items() for piece in _pieces(tensor)]
    with ThreadPoolExecutor(READERS) as readers:
        # The list raises what a reader has raised.
        list(readers.map(partial(_load, stored), pieces))


def _pieces(tensor: Tensor) -> Iterator[tuple[Box, Tensor]]:
    """Yield the boxes that this rank holds of a tensor, in pieces of whole rows, and their values."""
    for held in held_boxes(tensor):
        values, (offset, shape) = held.of(tensor), held.box
        if not shape:
            yield held.box, values
            continue
        rows = max(1, _PIECE * shape[0] // max(1, values.nbytes))
        for first in range(0, shape[0], rows):
            part = values[first : first + rows]
            yield Box((offset[0] + first, *offset[1:]), tuple(part.shape)), part


# A new thread has gradients on.
@torch.no_grad()
def _load(stored: StoredTensors, piece: tuple[str, Box, Tensor]) -> None:
    name, box, values = piece
    values.copy_(stored.read_box(name, box))
