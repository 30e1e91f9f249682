"""Atomic writes of small files: a reader sees the old file or the new file, never a partial one. Also paths given as URLs, and mounts."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from pathlib import Path
from typing import NamedTuple

from argosy.errors import ArgosyError

_MOUNTS = Path("/proc/self/mountinfo")

# What to do in a pod whose user may not write the shared volume.
RIGHTS_FIX = (
    "a new file system (FSx for Lustre) belongs to root: cluster.storage.take_ownership=true makes it cluster.user's, by one short pod; "
    "or chown its root once yourself"
)


# Errors of a network file system that the next try may not meet. On a local disk, EIO is a fault that comes again.
_PASSING = frozenset({errno.EIO, errno.ENOLCK, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.ESHUTDOWN})


def may_pass(error: Exception) -> bool:
    """Return whether a failure is one of the file system that the next try may not meet."""
    return isinstance(error, OSError) and error.errno in _PASSING


def write_fix(error: OSError, otherwise: str) -> str:
    """Return the fix for a failed write: `RIGHTS_FIX` in a pod that lacks the right, else `otherwise`."""
    in_pod = "KUBERNETES_SERVICE_HOST" in os.environ
    return RIGHTS_FIX if in_pod and error.errno in (errno.EACCES, errno.EPERM) else otherwise


def replace_file(path: Path, content: bytes, *, sync: bool = False) -> None:
    """Write `content` to a temporary file and rename it to `path`. `sync` calls fsync before the rename."""
    temporary = _temporary_path(path)
    try:
        with temporary.open("wb") as file:
            file.write(content)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        # ENOSPC comes without a file name.
        error.filename = str(path)
        # On a read-only file system even unlink fails.
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def create_file(path: Path, content: bytes) -> bool:
    """Create a file atomically. Return False if it already exists. If several processes try at once, exactly one succeeds."""
    temporary = _temporary_path(path)
    replace_file(temporary, content)
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    except OSError:
        # The file system has no hard links.
        if path.exists():
            return False
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return True


def _temporary_path(path: Path) -> Path:
    """Return a random name in the same directory. A process id is not unique: threads share one, and so can containers."""
    return path.with_name(f".{path.name}.{os.urandom(6).hex()}")


def clear_temporaries(directory: Path) -> None:
    """Remove what killed processes left of files they were writing. Call it where no other process writes to the directory."""
    for path in directory.glob(".*." + "[0-9a-f]" * 12):
        path.unlink(missing_ok=True)


class MountInfo(NamedTuple):
    # The file system's type.
    kind: str
    source: str
    options: list[str]


def mounts_of(device: int) -> list[MountInfo]:
    """Return the mounts of a device (`st_dev`). Empty where Linux does not say."""
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = _MOUNTS.read_text(errors="replace").splitlines()
    except OSError:
        return []
    mounts = [line.partition(" - ") for line in lines if line.split()[2] == number]
    # After the dash: type, source, options of the file system. Before it, the sixth field has those of the mount.
    return [
        MountInfo(after.split()[0], after.split()[1], [*before.split()[5].split(","), *after.split()[-1].split(",")])
        for before, dash, after in mounts
        if dash
    ]


def local_path(name: str | Path) -> Path:
    """Return `name` as a local path. `file://` URLs are accepted, other URLs are refused.

    `Path` collapses the two slashes of a URL, which would then be taken for a relative directory.
    """
    address = re.fullmatch(r"([A-Za-z][A-Za-z0-9+.-]+):/+(.*)", str(name))
    if address is None:
        return Path(name)
    if address[1] == "file":
        return Path("/", address[2])
    raise ArgosyError(
        "data.bad-input",
        f"{address[1]}://{address[2]} is remote; a local path is required here",
        fix="copy it to a local disk, or mount it; inputs of `prepare` and corpora of `train` (with a cache) may be remote",
    )
