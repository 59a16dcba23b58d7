"""A Gluon kernel that sends from each rank to all others: one TMA load, then a TMA store to each peer from the same
shared tile, with several tiles in flight and one warp a program. Plain Triton cannot store a shared tile twice.

It is written for the Gluon of Triton 3.6. Later releases have other names.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

import pkt.language as pl

AVAILABLE = hasattr(gl, "thread_barrier") and hasattr(tma, "make_tensor_descriptor")


@gluon.jit
def _target(row, i: gl.constexpr, n, world, ROWS: gl.constexpr, COLS: gl.constexpr, LAYOUT: gl.constexpr):
    there = pl.peer(row, (world.rank + i) % world.size, world)
    return tma.make_tensor_descriptor(there, [n // COLS, COLS], [COLS, 1], [ROWS, COLS], LAYOUT)


@gluon.jit
def push_all_kernel(dst, src, n, world, ROWS: gl.constexpr, COLS: gl.constexpr, STAGES: gl.constexpr):
    """Store my src, n elements, into row `rank` of the dst (size, n) of every other rank.

    It takes 2 to 4 ranks. n is a multiple of a tile.
    """
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, COLS], gl.bfloat16)
    source = tma.make_tensor_descriptor(src, [n // COLS, COLS], [COLS, 1], [ROWS, COLS], LAYOUT)
    row = dst + gl.cast(world.rank, gl.int64) * n
    others: gl.constexpr = world.size - 1
    first = _target(row, 1, n, world, ROWS, COLS, LAYOUT)
    second = _target(row, 2, n, world, ROWS, COLS, LAYOUT)
    third = _target(row, 3, n, world, ROWS, COLS, LAYOUT)
    tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, ROWS, COLS], LAYOUT)
    loaded = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(loaded.index(i), count=1)
    pid = gl.program_id(0)
    step = gl.num_programs(0)
    mine = (n // (ROWS * COLS) - pid + step - 1) // step
    for i in range(STAGES - 1):
        wanted = i < mine
        mbarrier.expect(loaded.index(i), ROWS * COLS * 2, pred=wanted)
        tma.async_copy_global_to_shared(
            source, [(pid + i * step) * ROWS, 0], loaded.index(i), tiles.index(i), pred=wanted
        )
    for i in range(mine):
        stage = i % STAGES
        at = (pid + i * step) * ROWS
        mbarrier.wait(loaded.index(stage), (i // STAGES) & 1)
        tma.async_copy_shared_to_global(first, [at, 0], tiles.index(stage))
        if others > 1:
            tma.async_copy_shared_to_global(second, [at, 0], tiles.index(stage))
        if others > 2:
            tma.async_copy_shared_to_global(third, [at, 0], tiles.index(stage))
        # The next load reuses the stage with the oldest stores: all stores but this round's must have read their tile.
        later = i + STAGES - 1
        tma.store_wait(others)
        gl.thread_barrier()
        wanted = later < mine
        mbarrier.expect(loaded.index(later % STAGES), ROWS * COLS * 2, pred=wanted)
        tma.async_copy_global_to_shared(
            source,
            [(pid + later * step) * ROWS, 0],
            loaded.index(later % STAGES),
            tiles.index(later % STAGES),
            pred=wanted,
        )
    pl.quiet()
