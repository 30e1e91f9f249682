"""The directories of compiled kernels, which are used only if no stranger can have made what is in them.

Triton and torch's compiler keep compiled kernels in the directories that these variables name, and load shared libraries from there. In a
directory where everybody can write, such as /tmp, another user could have made one of that name first, and put a library of his own into it.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import stat
import tempfile
from pathlib import Path

VARIABLES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")

_log = logging.getLogger("argosy")


def own_kernel_caches() -> None:
    """Make the directories that the environment names. One that a stranger can have filled is replaced, until the process ends."""
    for name in VARIABLES:
        if (given := os.environ.get(name)) and (why := _refusal(Path(given))) is not None:
            os.environ[name] = tempfile.mkdtemp(prefix="argosy-kernels-")
            atexit.register(shutil.rmtree, os.environ[name], ignore_errors=True)
            _log.warning("%s is not used: %s; kernels are compiled anew, into %s", name, why, os.environ[name])


def _refusal(directory: Path) -> str | None:
    """Make a directory that does not exist, for this user alone, and return why it cannot be used, or None."""
    try:
        # Not by `parents=True`, which would make those as the umask says.
        for missing in reversed([part for part in (directory, *directory.parents) if not part.exists()]):
            missing.mkdir(mode=0o700, exist_ok=True)
        whole = directory.resolve(strict=True)
        for part in (whole, *whole.parents[:-1]):
            if _is_open(part.parent) and _owner(part) not in (os.geteuid(), _owner(Path("/"))):
                return f"{part} belongs to another user ({_owner(part)})"
    except OSError as error:
        return f"{error.filename or directory}: {error.strerror}"
    if _is_open(whole):
        return f"everybody can write to {directory}"
    return None if os.access(whole, os.W_OK | os.X_OK) else f"{directory} is read-only"


def _is_open(directory: Path) -> bool:
    """Return whether everybody can write to a directory."""
    return bool(directory.stat().st_mode & stat.S_IWOTH)


def _owner(path: Path) -> int:
    """Return the user that a directory belongs to. In a container, root may have another number there than 0."""
    return path.stat().st_uid
