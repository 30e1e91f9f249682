"""Small files that are replaced whole: readers see the old one or the new one, never a part."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def replace_file(path: Path, content: bytes, *, sync: bool = False) -> None:
    temporary = _beside(path)
    try:
        with temporary.open("wb") as file:
            file.write(content)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        error.filename = str(path)  # a full disk does not say where it is
        with contextlib.suppress(OSError):  # a read-only file system does not even allow this
            temporary.unlink(missing_ok=True)
        raise


def create_file(path: Path, content: bytes) -> bool:
    """Create a file with its whole content. False if it is there already: of several who try at once, one succeeds."""
    temporary = _beside(path)
    replace_file(temporary, content)
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    except OSError:  # a file system without hard links
        if path.exists():
            return False
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return True


def _beside(path: Path) -> Path:
    """A name that nobody else writes to: threads share a process id, and so do containers that share a directory."""
    return path.with_name(f".{path.name}.{os.urandom(6).hex()}")
