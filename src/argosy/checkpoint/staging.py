"""Writing a directory that is complete or absent: under a hidden name, synced, renamed; removed after an error."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from argosy.checkpoint.manifest import sync_directory
from argosy.errors import ArgosyError


@contextmanager
def staged(to: Path) -> Iterator[Path]:
    """Yield a hidden directory that is renamed to `to` at the end of the block, or removed if the block raises."""
    require_absent(to)
    stage = to.with_name(f".{to.name}.partial")
    try:
        shutil.rmtree(stage, ignore_errors=True)
        stage.mkdir(parents=True)
        yield stage
        sync_directory(stage)
        if to.exists():
            # Fails if the directory is not empty: somebody wrote there in the meantime.
            to.rmdir()
        stage.rename(to)
        sync_directory(to.parent)
    except OSError as error:
        raise ArgosyError(
            "hf.write-failed",
            f"{to} could not be written: {error.strerror or error}; nothing was left behind",
            fix="free some space, or choose another directory",
        ) from None
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def require_absent(to: Path) -> None:
    if to.is_symlink() or to.is_file() or (to.is_dir() and any(to.iterdir())):
        raise ArgosyError(
            "hf.exists", f"{to} already holds something", key="--to", value=str(to), fix="choose another directory"
        )


def require_space(to: Path, size: int) -> None:
    """Refuse, before the work starts, if the disk cannot hold `size` bytes or `to` exists."""
    require_absent(to)
    nearest = next(parent for parent in (to, *to.absolute().parents) if parent.exists())
    free = shutil.disk_usage(nearest).free
    if free < size:
        raise ArgosyError(
            "hf.write-failed",
            f"{to} needs {size:,} bytes, and {nearest} has {free:,} free",
            key="--to",
            value=str(to),
            fix="free some space, or choose another directory",
        )
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ArgosyError(
            "hf.write-failed", f"{nearest} is not writable", key="--to", value=str(to), fix="choose another directory"
        )
