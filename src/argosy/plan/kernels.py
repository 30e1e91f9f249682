"""A time model of the kernels of one rank: matmuls (GEMM) by shape.

A GEMM is split into tiles, and the tiles into waves over the streaming multiprocessors. The model counts the idle share of the
last wave and of tiles at the edges (tile and wave quantisation), and picks the best of the tile shapes a library has. A short
inner dimension pays for the start-up of a tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil

# Tile shapes: rows, columns, and efficiency relative to the best shape.
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.95), (128, 64, 0.8), (64, 64, 0.6))
# Split-K: parts of the inner dimension that are computed separately and summed, if there are too few tiles.
SPLITS = (1, 2, 4)
# The shortest inner dimension of a part with split-K.
LEAST_PART = 2048
# 16-bit elements in a 128-byte cache line. The rows of both matrices should be aligned to it.
LINE = 64
# Relative speed of a GEMM whose rows are not aligned.
OFF_LINE = 0.7
# Elements of the inner dimension that a tile loads before its first multiply.
START_UP = 32


@dataclass(frozen=True)
class Rates:
    """The rates a GPU reaches with a stack.

    `product` is FLOP/s of large 16-bit matmuls, and `narrow` of matmuls with inputs of 8 bits or fewer (`product` if the GPU has
    none). `attention` is FLOP/s of attention, `pieces` of attention of pieces of the queries, and `memory` bytes/s. `passes` is the
    bytes that element-wise kernels move, relative to the minimum with everything fused. `part` is the bytes moved for an element of each
    part of a matmul with split-K.
    """

    sms: int
    product: float
    narrow: float
    attention: float
    pieces: float
    memory: float
    passes: float = 1.0
    part: float = 0.0


@lru_cache(maxsize=100_000)
def efficiency(rows: int, columns: int, inner: int, sms: int, groups: int = 1, parts: int = 1) -> float:
    """Return the share of the multiprocessors' time that a GEMM in so many parts uses for its result, after tile and wave quantisation."""
    best = 0.0
    for tile_rows, tile_columns, quality in TILES:
        tiles = groups * ceil(rows / tile_rows) * ceil(columns / tile_columns)
        wanted = quality * groups * rows * columns / (sms * tile_rows * tile_columns)
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
    """Return the seconds of a matmul [rows, inner] x [inner, columns].

    Args:
        narrow: the inputs are 8-bit.
        groups: number of matmuls in one kernel (grouped GEMM).
        written: bytes moved for an element of the result, including the read if the kernel accumulates.
    """
    r, c, k = max(1, round(rows)), max(1, round(columns)), max(1, round(inner))
    rate = rates.narrow if narrow else rates.product
    moved = groups * (2.0 * (r * k + k * c) + written * r * c) / rates.memory

    def seconds(parts: int) -> float:
        flops = 2.0 * groups * r * c * k / (rate * efficiency(r, c, k, rates.sms, groups, parts))
        # A kernel of its own sums the parts. Matmuls of 8-bit inputs have none.
        after = groups * parts * rates.part * r * c / rates.memory if parts > 1 and not narrow else 0.0
        return max(flops, moved) + after

    return min(map(seconds, SPLITS if k >= SPLITS[-1] * LEAST_PART else (1,)))


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
    """Return the forward and backward seconds of a linear layer.

    The backward pass has two matmuls, for input gradients and for weight gradients. A width that is not a multiple of LINE slows
    all three.
    """
    forward = product(rates, tokens, outputs, inputs, narrow=narrow, groups=groups)
    by_input = product(rates, tokens, inputs, outputs, narrow=narrow, groups=groups)
    by_weight = product(rates, outputs, inputs, tokens, narrow=narrow, groups=groups, written=summed)
    pace = OFF_LINE if round(inputs) % LINE or round(outputs) % LINE else 1.0
    return forward / pace, (by_input + by_weight) / pace
