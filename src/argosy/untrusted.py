"""Open untrusted files: model directories, checkpoints, corpora, tokenizers and run directories that somebody else may have made.

Two rules apply. Only a regular file is opened: reading a FIFO blocks until a writer appears, and opening a device can have
side effects. A symbolic link is never followed out of the directory it came with: its target may be readable by this user
only, and would be copied to a place that others can read. The exception is the Hugging Face Hub cache, whose snapshots are
links into the `blobs` directory beside them.

Every refusal is an `OSError` with the reason in `strerror`, so callers report it like any unreadable file.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path
from typing import Any, BinaryIO

import orjson

MIB = 1 << 20
_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a directory",
}
_BLOB = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


def open_regular(path: Path, *, within: Path | None = None, buffering: int = -1) -> BinaryIO:
    """Open a regular file for reading.

    Args:
        path: The file. Symbolic links are followed.
        within: The directory that links may not lead out of. None allows any target.
        buffering: The buffer size, as in `open`.

    Raises:
        OSError: The file cannot be opened, is not a regular file, or is a link out of `within`.
    """
    real = path if within is None else resolve_inside(path, within)
    _require_regular(path, os.stat(real).st_mode)
    # O_NOFOLLOW: `resolve_inside` has resolved all links, so a link here was placed after that check.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if within is None else os.O_NOFOLLOW)
    descriptor = os.open(real, flags)
    try:
        _require_regular(path, os.fstat(descriptor).st_mode)
        return os.fdopen(descriptor, "rb", buffering)
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: Path, limit: int, *, within: Path | None = None) -> bytes:
    """Return the content of a regular file of at most `limit` bytes. `within` works as in `open_regular`."""
    with open_regular(path, within=within) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise _refused(path, f"it has {size:,} bytes, and at most {limit:,} are expected here", errno.EFBIG)
        content = bytearray()
        # Read at most limit + 1 bytes even if the file grows meanwhile.
        while piece := file.read(limit + 1 - len(content)):
            content += piece
        if len(content) > limit:
            raise _refused(path, f"it grew beyond {limit:,} bytes while it was read", errno.EFBIG)
        return bytes(content)


def read_object(path: Path, limit: int = 64 * MIB, *, within: Path | None = None) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        OSError: `read_regular` refuses the file.
        ValueError: The content is not JSON, or its top level is not an object.
    """
    document = orjson.loads(read_regular(path, limit, within=within))
    if not isinstance(document, dict):
        raise ValueError(f"it holds a JSON {type(document).__name__}, not an object")
    return document


def resolve_inside(path: Path, directory: Path) -> Path:
    """Resolve the links of `path`. Refuse a target that is neither in `directory` nor a blob of a Hub cache."""
    # `Path.resolve` reports a loop of links as a RuntimeError before Python 3.13.
    real, root = (Path(os.path.realpath(one, strict=True)) for one in (path, directory))
    if real.is_relative_to(root) or _is_blob(real, root):
        return real
    raise _refused(path, f"it is a link to {real}, outside {directory}", errno.EPERM)


def _is_blob(real: Path, root: Path) -> bool:
    """Return True if `real` is a Hub blob: of the repository that `root` is a snapshot of, or in the user's own Hub cache.

    Older versions of `hf download --local-dir` left links into the user's cache.
    """
    if real.parent.name != "blobs" or _BLOB.fullmatch(real.name) is None:
        return False
    repository = real.parent.parent
    if repository / "snapshots" in root.parents:
        return True
    return repository.name.startswith("models--") and repository.parent == Path(os.path.realpath(_hub_cache()))


def _hub_cache() -> Path:
    """Return the cache directory of huggingface_hub, from the same environment variables it reads."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or os.path.join(cache, "huggingface")
    return Path(os.path.expanduser(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")))


def _require_regular(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise _refused(
            path, f"it is {_KINDS.get(stat.S_IFMT(mode), 'something else')}, not a regular file", errno.EINVAL
        )


def _refused(path: Path, why: str, number: int) -> OSError:
    return OSError(number, why, str(path))
