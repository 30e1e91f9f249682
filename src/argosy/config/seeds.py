"""All randomness is drawn from the run's one seed and the name of what it is for.

A digest instead of a running generator: the initial value of a weight, the place of a sample and the dropout of a
micro-batch then depend on nothing else, neither on the layout, nor on what was drawn before, nor on a resume.
"""

from __future__ import annotations

import hashlib


def derive_seed(seed: int, *names: object) -> int:
    """64 bits, the same on every machine and in every process."""
    text = "\x1f".join(str(part) for part in (seed, *names))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
