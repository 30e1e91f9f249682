"""The checkpoints of a run: writing one so that it is whole or absent, finding the newest good one, keeping the last few.

    checkpoints/step-00000500/
      weights.safetensors      parameters by name
      optimizer.safetensors    the optimiser's moments by parameter name
      state.json               step and consumed samples: the loader, the schedule and all randomness follow
      manifest.json            written last: size and SHA-256 of each of the others

A checkpoint is made under a hidden name, synced, and renamed. `latest` is never recorded anywhere: it is found by
looking, and believed only when every hash is right.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Mapping, Set
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from argosy.checkpoint.tensors import gather_tensors, read_tensors, write_tensors
from argosy.errors import ArgosyError

MANIFEST = "manifest.json"
WEIGHTS, OPTIMIZER = "weights.safetensors", "optimizer.safetensors"
_NAME = re.compile(r"step-(\d{8,})")
_FileName = Annotated[str, Field(pattern=r"^[a-z]+\.(safetensors|json)$")]  # plain names: nothing can lead outside


@dataclass(frozen=True)
class Progress:
    """Where a run stands. Everything else about the loader, the schedule and the randomness follows from it."""

    step: int
    consumed_samples: int
    optimizer: dict[str, float] = field(default_factory=dict)  # the numbers of its state that belong to no parameter


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _File(_Strict):
    bytes: int
    sha256: str


class _Manifest(_Strict):
    format: Literal["argosy-checkpoint"]
    version: Literal[1]
    step: int
    files: dict[_FileName, _File]


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    progress: Progress

    def weights(self) -> dict[str, Tensor]:
        return read_tensors(self.path / WEIGHTS)

    def optimizer(self) -> dict[str, Tensor]:
        return read_tensors(self.path / OPTIMIZER)


def save(
    root: Path, progress: Progress, weights: Mapping[str, Tensor], optimizer: Mapping[str, Tensor], keep: int
) -> Path:
    final = root / f"step-{progress.step:08d}"
    partial = root / f".{final.name}.partial"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        hashes = {
            WEIGHTS: write_tensors(partial / WEIGHTS, weights),
            OPTIMIZER: write_tensors(partial / OPTIMIZER, optimizer),
        }
        finish(partial, progress, hashes)
        _remove(final)  # only ever a copy of the same step that failed its check
        partial.rename(final)
        sync_directory(root)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise ArgosyError(
            "checkpoint.save-failed",
            f"step {progress.step} could not be saved in {root}: {error.strerror or error}",
            fix="free some space or repair the file system, then run the same command again",
        ) from None
    prune(root, keep, newest=progress.step)
    return final


def help_save(weights: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]) -> None:
    """What the ranks do that do not write, while the first saves."""
    gather_tensors(weights)
    gather_tensors(optimizer)


def finish(directory: Path, progress: Progress, hashes: dict[str, str]) -> None:
    """Make a checkpoint of tensor files already written, given by name and SHA-256: state, then manifest, then sync."""
    state = _write(directory / "state.json", orjson.dumps(asdict(progress), option=orjson.OPT_INDENT_2))
    files = {
        name: _File(bytes=(directory / name).stat().st_size, sha256=sha256)
        for name, sha256 in (hashes | {"state.json": state}).items()
    }
    manifest = _Manifest(format="argosy-checkpoint", version=1, step=progress.step, files=files)
    _write(directory / MANIFEST, manifest.model_dump_json(indent=2).encode())
    sync_directory(directory)


def latest(root: Path, report: Callable[[str], None], *, set_aside: bool = False) -> Checkpoint | None:
    """The newest checkpoint that passes its check, or None where there is none at all. Bad ones are reported and, once
    a good one is found, renamed (`set_aside`), so that they never count as checkpoints again. If only bad ones are
    left, that is a refusal."""
    faults = []
    bad: list[Path] = []
    for path in listed(root):
        try:
            found = verify(path)
        except ArgosyError as error:
            faults.append(error.cause)
            bad.append(path)
            report(f"{path.name} is not used: {error.cause}")
            continue
        for damaged in bad if set_aside else ():
            damaged.rename(_free_name(damaged))
        return found
    if faults:
        raise ArgosyError(
            "checkpoint.corrupt",
            "no checkpoint passes its check:\n" + "\n".join(faults),
            fix=f"restore one from a backup, or move {root} away to start again from step 0",
        )
    return None


def opened(root: Path, step: int) -> Checkpoint:
    """The checkpoint of a step, which another rank has found to be good."""
    path = root / f"step-{step:08d}"
    return Checkpoint(path, Progress(**orjson.loads((path / "state.json").read_bytes())))


def listed(root: Path) -> list[Path]:
    """Checkpoint directories, newest first; what is still being written or removed has another name."""
    found = [path for path in root.glob("step-*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=_step, reverse=True)


def verify(path: Path) -> Checkpoint:
    """Check every file against the manifest; refuse with the file and both hashes."""
    try:
        manifest = _Manifest.model_validate_json((path / MANIFEST).read_bytes())
        for name, promised in manifest.files.items():
            file = path / name
            if file.is_symlink() or not file.is_file():
                raise _corrupt(f"{file} is missing or not a plain file")
            size = file.stat().st_size
            if size != promised.bytes:
                raise _corrupt(f"{file} has {size:,} bytes, its manifest says {promised.bytes:,}")
            found = _hash(file)
            if found != promised.sha256:
                raise _corrupt(f"{file} has SHA-256 {found[:16]}…, its manifest says {promised.sha256[:16]}…")
        progress = Progress(**orjson.loads((path / "state.json").read_bytes()))
    except ValidationError as error:
        raise _corrupt(f"{path / MANIFEST}: {error.errors()[0]['msg']}") from None
    except (OSError, ValueError, TypeError) as error:
        raise _corrupt(f"{path}: {error}") from None
    # Imported weights begin at step 0, and have no optimiser yet.
    if {WEIGHTS, "state.json", *([OPTIMIZER] if manifest.step else [])} - manifest.files.keys():
        raise _corrupt(f"{path / MANIFEST} does not list every file")
    if not _step(path) == manifest.step == progress.step:
        raise _corrupt(f"{path} says step {manifest.step} in its manifest and {progress.step} in its state")
    return Checkpoint(path, progress)


def prune(root: Path, keep: int, newest: int) -> None:
    """Remove all but the last `keep` up to the one of step `newest`, which was just written and is known to be good."""
    older = [path for path in listed(root) if _step(path) <= newest]
    for path in older[keep:]:
        _remove(path)
    sweep(root)


def sweep(root: Path) -> None:
    """Remove what a killed save or a killed removal left behind."""
    for leftover in root.glob(".step-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _free_name(path: Path) -> Path:
    number = 1
    while (target := path.with_name(f"bad-{path.name}.{number}")).exists():
        number += 1
    return target


def _remove(path: Path) -> None:
    """Rename first: a half-deleted directory must never look like a checkpoint."""
    if path.exists():
        doomed = path.with_name(f".{path.name}.removed")
        shutil.rmtree(doomed, ignore_errors=True)
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def _write(path: Path, content: bytes) -> str:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return hashlib.sha256(content).hexdigest()


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _corrupt(what: str) -> ArgosyError:
    return ArgosyError("checkpoint.corrupt", what, fix="use another checkpoint, or restore this one from a backup")


def require_names(have: Set[str], need: Set[str], path: Path) -> None:
    """Refuse a checkpoint that is not of this model, naming what is missing and what is left over."""
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
