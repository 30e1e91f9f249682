"""The dynamic tile scheduler of persistent programs on Hopper.

One warp takes numbers of tiles from an atomic counter and publishes them in shared memory. The groups of warps that compute wait for them.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

# Places for the numbers of tiles: that of the current tile, and of the next.
_TILE_SLOTS = gl.constexpr(2)


@gluon.jit
def _make_scheduler(READERS: gl.constexpr):
    """Return the numbers of tiles and their barriers. READERS groups of warps read each number."""
    tile_here = gl.allocate_shared_memory(gl.int32, [_TILE_SLOTS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    tile_full = gl.allocate_shared_memory(gl.int64, [_TILE_SLOTS, 1], mbarrier.MBarrierLayout())
    tile_free = gl.allocate_shared_memory(gl.int64, [_TILE_SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(_TILE_SLOTS):
        mbarrier.init(tile_full.index(slot), count=1)
        mbarrier.init(tile_free.index(slot), count=READERS)
    return tile_here, tile_full, tile_free


@gluon.jit
def _publish_tile(number, turn, scheduler):
    """Pass the number of the tile of a turn to the workers."""
    tile_here, tile_full, tile_free = scheduler
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    slot = turn % _TILE_SLOTS
    mbarrier.wait(tile_free.index(slot), ((turn // _TILE_SLOTS) & 1) ^ 1)
    tile_here.index(slot).store(gl.full([1], number, gl.int32, LANES))
    mbarrier.arrive(tile_full.index(slot), count=1)


@gluon.jit
def _published_tile(turn, scheduler):
    """Wait for the number of the tile of a turn, and return it."""
    tile_here, tile_full, tile_free = scheduler
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    slot = turn % _TILE_SLOTS
    mbarrier.wait(tile_full.index(slot), (turn // _TILE_SLOTS) & 1)
    number = gl.max(tile_here.index(slot).load(LANES), 0)
    mbarrier.arrive(tile_free.index(slot), count=1)
    return number
