"""Time of the kernels of one rank: matrix products by shape, attention, and element-wise work by bytes.

A product is cut into tiles, the tiles into waves over the multiprocessors; what the last wave and the tiles' edges leave
idle is lost. Of the shapes of tile a library has, the best is taken. A short inner dimension costs its start-up.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil

TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.95), (128, 64, 0.8), (64, 64, 0.6))  # rows, columns, quality
SPLITS = (1, 2, 4)  # parts of the inner dimension that are summed up apart, where there are too few tiles
LEAST_PART = 2048
LINE = 64  # 16-bit elements in a line of the memory, on which the rows of both matrices should begin
OFF_LINE = 0.7  # of the pace where they do not
START_UP = 32  # of the inner dimension, in elements: the slice a tile waits for before its first products


@dataclass(frozen=True)
class Rates:
    """What a GPU reaches with a stack: FLOP/s of large products and of attention, bytes/s, and the host's seconds to launch
    a layer's forward kernels."""

    sms: int
    product: float
    narrow: float  # of products whose inputs are 8-bit or narrower; `product` where there are none
    attention: float
    memory: float
    passes: float = 1.0  # bytes element-wise kernels move, against the least that fusing them all would


@lru_cache(maxsize=100_000)
def efficiency(rows: int, columns: int, inner: int, sms: int, groups: int = 1) -> float:
    """Share of the multiprocessors' time that goes into wanted products."""
    best = 0.0
    for tile_rows, tile_columns, quality in TILES:
        tiles = groups * ceil(rows / tile_rows) * ceil(columns / tile_columns)
        wanted = quality * groups * rows * columns / (sms * tile_rows * tile_columns)
        for parts in SPLITS if inner >= SPLITS[-1] * LEAST_PART else (1,):
            filled = wanted * parts / ceil(parts * tiles / sms)
            best = max(best, filled * inner / (inner + parts * START_UP))
    return best


def product(
    rates: Rates,
    rows: float,
    columns: float,
    inner: float,
    *,
    narrow: bool = False,
    groups: int = 1,
    written: float = 2.0,
) -> float:
    """Seconds of [rows, inner] x [inner, columns], `groups` times in one kernel; `written`: bytes of an element of the
    result, those read included where it is added to what is there."""
    r, c, k = max(1, round(rows)), max(1, round(columns)), max(1, round(inner))
    rate = rates.narrow if narrow else rates.product
    flops = 2.0 * groups * r * c * k / (rate * efficiency(r, c, k, rates.sms, groups))
    moved = groups * (2.0 * (r * k + k * c) + written * r * c) / rates.memory
    return max(flops, moved)


def linear(
    rates: Rates,
    tokens: float,
    inputs: float,
    outputs: float,
    *,
    narrow: bool = False,
    groups: int = 1,
    summed: float = 2.0,
) -> tuple[float, float]:
    """Forward and backward seconds of a linear layer: the backward pass has two products, for inputs and for weights. Widths
    that are no whole lines of the memory slow all three."""
    forward = product(rates, tokens, outputs, inputs, narrow=narrow, groups=groups)
    by_input = product(rates, tokens, inputs, outputs, narrow=narrow, groups=groups)
    by_weight = product(rates, outputs, inputs, tokens, narrow=narrow, groups=groups, written=summed)
    pace = OFF_LINE if round(inputs) % LINE or round(outputs) % LINE else 1.0
    return forward / pace, (by_input + by_weight) / pace
