"""The hash of a file, computed while it is written and again before it is loaded. BLAKE3 is as strong as SHA-256 and, on one
core, several times as fast as disks; older checkpoints have SHA-256."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Protocol

from argosy.untrusted import open_regular

_PIECE = 4 * 2**20  # bytes


class Digest(Protocol):
    def update(self, data: memoryview | bytes, /) -> object: ...

    def hexdigest(self) -> str: ...


def new_digest(algorithm: str = "blake3") -> Digest:
    if algorithm == "sha256":
        return hashlib.sha256()
    from blake3 import blake3

    digest: Digest = blake3()
    return digest


def hash_file(path: Path, algorithm: str) -> str:
    digest, buffer = new_digest(algorithm), memoryview(bytearray(_PIECE))
    with open_regular(path, buffering=0) as file:
        while count := file.readinto(buffer):  # type: ignore[attr-defined]
            digest.update(buffer[:count])
    return digest.hexdigest()
