"""File systems that are an object store behind FUSE: a directory is renamed there by copying and deleting each of its files.

A checkpoint on such a store is written where it stays. The file `incomplete` marks its directory until the manifest, which is written last, is
there; a directory with the mark is no checkpoint. Elsewhere a checkpoint is renamed into place.
"""

from __future__ import annotations

import os
from pathlib import Path

from argosy.checkpoint.manifest import sync_directory

INCOMPLETE = "incomplete"
_MOUNTS = Path("/proc/self/mountinfo")
_STORES = ("blobfuse", "gcsfuse", "s3fs", "goofys", "mountpoint-s3", "rclone")


def copies_to_rename(directory: Path) -> bool:
    """Return whether the file system of a directory renames by copying, by the type of its mount."""
    nearest = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    device = os.stat(nearest).st_dev
    try:
        mounts = [line.split() for line in _MOUNTS.read_text().splitlines()]
    except OSError:
        # Not Linux.
        return False
    # Fields: id, parent, major:minor, root, mount point, options, any number of others, "-", type, source.
    types = [
        f"{fields[fields.index('-') + 1]} {fields[fields.index('-') + 2]}".lower()
        for fields in mounts
        if fields[2] == f"{os.major(device)}:{os.minor(device)}"
    ]
    return any(name.startswith("fuse") and store in name for name in types for store in _STORES)


def mark_incomplete(directory: Path) -> None:
    (directory / INCOMPLETE).touch()


def is_incomplete(directory: Path) -> bool:
    return (directory / INCOMPLETE).exists()


def mark_complete(directory: Path) -> None:
    (directory / INCOMPLETE).unlink()
    sync_directory(directory)
