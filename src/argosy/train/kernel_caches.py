"""The directories of compiled kernels, which are used only if they belong to this user.

Triton and torch's compiler keep compiled kernels in the directories that these variables name, and load shared libraries from there.
Where many users share a disk, such as /tmp, another user could have made a directory of that name first, and put a library of his own
into it.
"""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path

VARIABLES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")

_log = logging.getLogger("argosy")


def own_kernel_caches() -> None:
    """Make the directories that the environment names. One that is another user's is replaced by a new one."""
    for name in VARIABLES:
        if (given := os.environ.get(name)) and (why := _refusal(Path(given))) is not None:
            os.environ[name] = tempfile.mkdtemp(prefix="argosy-kernels-")
            _log.warning("%s is not used: %s; kernels are compiled anew, into %s", name, why, os.environ[name])


def _refusal(directory: Path) -> str | None:
    """Make a directory that does not exist, and return why it cannot be used, or None."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        whole = directory.resolve()
        # Whoever owns a directory can rename what is in it.
        strangers = [part for part in (whole, *whole.parents) if _owner(part) not in (0, os.geteuid())]
    except OSError as error:
        return f"{error.filename or directory}: {error.strerror}"
    if not os.access(whole, os.W_OK | os.X_OK):
        return f"{directory} is read-only"
    return f"{strangers[0]} belongs to another user ({_owner(strangers[0])})" if strangers else None


def _owner(path: Path) -> int:
    return path.stat().st_uid
