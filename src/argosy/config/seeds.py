"""Seeds of all random numbers, derived from the run's one seed and the name of their purpose.

A digest is used instead of a running generator. The initial value of a weight, the position of a sample and the dropout of a
micro-batch then do not depend on the layout, on earlier draws or on a resume.
"""

from __future__ import annotations

import hashlib


def derive_seed(seed: int, *names: object) -> int:
    """Return a 64-bit seed that is the same on every machine and in every process."""
    text = "\x1f".join(str(part) for part in (seed, *names))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
