"""The manifest of a checkpoint: written last, with the size and hash of every other file.

    step-00000500/
      weights.safetensors      parameters by name; with several ranks, weights-00000-of-00004.safetensors and so on
      optimizer.safetensors    optimiser state by parameter name, likewise
      tensors.json             with several ranks: type and shape of each tensor, and which file has which slice
      state.json               step and consumed samples: loader, schedule and random seeds follow from them
      manifest.json            format version, and size and BLAKE3 of each of the other files

A checkpoint is loaded only if every hash is right. Each rank checks a share of the files.

A checkpoint is written beside its place and renamed. A file system that is an object store behind FUSE renames a directory by
copying and deleting each of its files; there a checkpoint is written where it stays, and the file `incomplete` marks its directory
until the manifest is there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import orjson
from pydantic import Field, ValidationError

from argosy.checkpoint.disk import READERS, Written, hash_file, write_bytes
from argosy.checkpoint.stored import INDEX, FileName, StoredTensors, Strict
from argosy.errors import ArgosyError
from argosy.files import mounts_of
from argosy.parallel.host_group import ALONE, HostGroup
from argosy.untrusted import MIB, read_regular

MANIFEST, STATE = "manifest.json", "state.json"
# Groups of tensors.
WEIGHTS, OPTIMIZER = "weights", "optimizer"
# Version 3 has an index of grids of ranks, see `stored.py`. Without an index nothing has changed since version 2.
FORMAT, VERSION = "argosy-checkpoint", 3
# Largest manifest.json and state.json. The guard's window in state.json takes a few kB.
_LARGEST = 256 * MIB
# The mark of a directory that is no checkpoint yet.
INCOMPLETE = "incomplete"
_STORES = ("blobfuse", "gcsfuse", "s3fs", "goofys", "mountpoint-s3", "rclone")
_Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_Whole = Annotated[int, Field(ge=0, lt=2**63)]


@dataclass(frozen=True)
class TrainProgress:
    """The progress of a run. The state of the loader, the schedule and all random seeds follows from it.

    optimizer: numbers of the optimiser's state that belong to no parameter.
    about: facts for people: time, layout, loss.
    """

    step: int
    consumed_samples: int
    optimizer: dict[str, float] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)


class _File(Strict):
    bytes: _Whole
    blake3: _Hash


class _Manifest(Strict):
    format: Literal["argosy-checkpoint"]
    version: Literal[2, 3]
    step: _Whole
    files: dict[FileName, _File]


class _OldFile(Strict):
    bytes: _Whole
    sha256: _Hash


class _OldManifest(Strict):
    """A manifest of version 1: one process, SHA-256."""

    format: Literal["argosy-checkpoint"]
    version: Literal[1]
    step: _Whole
    files: dict[FileName, _OldFile]


class _State(Strict):
    step: _Whole
    consumed_samples: _Whole
    optimizer: dict[str, float] = Field(default_factory=dict)
    about: dict[str, Any] = Field(default_factory=dict)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint directory and what its manifest says. `algorithm` is that of the hashes."""

    path: Path
    progress: TrainProgress
    files: dict[str, Written]
    algorithm: str

    def weights(self) -> StoredTensors:
        return StoredTensors(self.path, WEIGHTS)

    def optimizer(self) -> StoredTensors:
        return StoredTensors(self.path, OPTIMIZER)

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())


def finish(directory: Path, progress: TrainProgress, files: dict[str, Written], index: bytes | None = None) -> None:
    """Turn a directory of tensor files into a checkpoint: write the index, the state, and last the manifest."""
    small = {STATE: orjson.dumps(asdict(progress), option=orjson.OPT_INDENT_2)} | ({INDEX: index} if index else {})
    files = files | {name: write_file(directory / name, content) for name, content in small.items()}
    manifest = _Manifest(
        format="argosy-checkpoint",
        version=2 if index is None else 3,
        step=progress.step,
        files={name: _File(bytes=file.bytes, blake3=file.digest) for name, file in sorted(files.items())},
    )
    write_file(directory / MANIFEST, manifest.model_dump_json(indent=2).encode())
    sync_directory(directory)


def read_checkpoint(path: Path, hosts: HostGroup = ALONE) -> Checkpoint:
    """Read the manifest and the state, and check that every file of this rank's share exists and has its size. Hashes are not
    checked."""
    try:
        step, files, algorithm = _read_manifest(path / MANIFEST)
        for name in _share(files, hosts):
            file, promised = path / name, files[name]
            if file.is_symlink() or not file.is_file():
                raise corrupt(f"{file} is missing or not a plain file")
            if (size := file.stat().st_size) != promised.bytes:
                raise corrupt(f"{file} has {size:,} bytes, its manifest says {promised.bytes:,}")
        if not {STATE} <= files.keys() or not any(name.startswith(WEIGHTS) for name in files):
            raise corrupt(f"{path / MANIFEST} does not list every file")
        state = _State.model_validate_json(read_regular(path / STATE, _LARGEST, within=path))
    except ValidationError as error:
        where = path / (STATE if error.title == "_State" else MANIFEST)
        raise corrupt(f"{where}: {error.errors()[0]['msg']}") from None
    except (OSError, ValueError) as error:
        raise corrupt(f"{path}: {error}") from None
    # Imported weights are at step 0, and have no optimiser state.
    if step and not any(name.startswith(OPTIMIZER) for name in files):
        raise corrupt(f"{path / MANIFEST} does not list every file")
    if not path.name == f"step-{step:08d}" or state.step != step:
        raise corrupt(f"{path} says step {step} in its manifest and {state.step} in its state")
    return Checkpoint(path, TrainProgress(**state.model_dump()), files, algorithm)


def verify(path: Path, hosts: HostGroup = ALONE) -> Checkpoint:
    """Check the hashes of all files, a share by each rank. Every rank raises the same refusal, with the file and both hashes."""
    found, refusal = None, None
    try:
        found = read_checkpoint(path, hosts)
        _check_hashes(found, _share(found.files, hosts))
    except ArgosyError as error:
        refusal = error
    faults = hosts.gather(b"" if refusal is None else orjson.dumps([refusal.code, refusal.cause, refusal.fix]))
    first_fault = hosts.tell(next((fault for fault in faults if fault), b""))
    if first_fault:
        code, cause, fix = orjson.loads(first_fault)
        raise ArgosyError(code, cause, fix=fix)
    if found is None:
        raise AssertionError("a rank without a checkpoint has reported a fault")
    return found


def _share(files: Mapping[str, Written], hosts: HostGroup) -> list[str]:
    """Return the files that this rank checks: thousands of ranks that look at every file would be millions of requests."""
    return sorted(files)[hosts.rank :: hosts.size]


def _check_hashes(checkpoint: Checkpoint, names: list[str]) -> None:
    with ThreadPoolExecutor(READERS) as threads:
        hashes = threads.map(lambda name: _hash(checkpoint.path / name, checkpoint.algorithm), names)
        for name, found in zip(names, hashes, strict=True):
            if found != (promised := checkpoint.files[name].digest):
                raise corrupt(
                    f"{checkpoint.path / name} has {checkpoint.algorithm.upper()} {found[:16]}…, its manifest says {promised[:16]}…"
                )


def _hash(path: Path, algorithm: str) -> str:
    try:
        return hash_file(path, algorithm)
    except OSError as error:
        raise corrupt(f"{path}: {error.strerror or error}") from None


def _read_manifest(path: Path) -> tuple[int, dict[str, Written], str]:
    """Return the step, the size and digest of each file, and the hash algorithm."""
    content = read_regular(path, _LARGEST, within=path.parent)
    document = orjson.loads(content)
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ValueError(f"{MANIFEST} is not a checkpoint's")
    version = document.get("version")
    if isinstance(version, int) and version > VERSION:
        raise ArgosyError(
            "checkpoint.version",
            f"{path.parent} is in version {version} of the format, and this Argosy reads up to {VERSION}",
            fix="update Argosy (in a clone: git pull), or use the version that wrote it",
        )
    if version == 1:
        old = _OldManifest.model_validate_json(content)
        return old.step, {name: Written(file.bytes, file.sha256) for name, file in old.files.items()}, "sha256"
    new = _Manifest.model_validate_json(content)
    return new.step, {name: Written(file.bytes, file.blake3) for name, file in new.files.items()}, "blake3"


def write_file(path: Path, content: bytes) -> Written:
    return write_bytes(path, content, ())


def sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def corrupt(what: str) -> ArgosyError:
    return ArgosyError("checkpoint.corrupt", what, fix="use another checkpoint, or restore this one from a backup")


def copies_to_rename(directory: Path) -> bool:
    """Return whether the file system of a directory renames by copying, by the type of its mount."""
    nearest = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    # Some are mounted as plain `fuse`, and their source has the name.
    return any(
        mount.kind.startswith("fuse") and store in f"{mount.kind} {mount.source}".lower()
        for mount in mounts_of(os.stat(nearest).st_dev)
        for store in _STORES
    )


def mark_incomplete(directory: Path) -> None:
    (directory / INCOMPLETE).touch()


def is_incomplete(directory: Path) -> bool:
    return (directory / INCOMPLETE).exists()


def mark_complete(directory: Path) -> None:
    (directory / INCOMPLETE).unlink()
    sync_directory(directory)
