"""The divisors of a whole number."""

from __future__ import annotations

from functools import lru_cache
from math import isqrt


@lru_cache
def divisors(number: int, most: int | None = None) -> tuple[int, ...]:
    """Return the divisors of a whole number above 0, smallest first; with `most`, those up to it.

    The time grows with the square root of the number, and at most with `most`.
    """
    root = isqrt(number)
    small = [n for n in range(1, min(root, most or root) + 1) if number % n == 0]
    large = [number // n for n in reversed(small) if n * n != number]
    return tuple(n for n in (*small, *large) if most is None or n <= most)
