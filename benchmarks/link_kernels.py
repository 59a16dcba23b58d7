"""The kernels of benchmarks.link: one mechanism or one latency each, and nothing else in the program."""

from __future__ import annotations

import triton
import triton.language as tl

import pkt.language as pl


@triton.jit
def register_kernel(dst, src, n, world, distance, PUSH: tl.constexpr, BLOCK: tl.constexpr):
    """My src into the dst of the rank `distance` ahead, or its src into my dst; n elements, a multiple of BLOCK."""
    other = (world.rank + distance) % world.size
    for block in range(tl.program_id(0), n // BLOCK, tl.num_programs(0)):
        offs = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        if PUSH:
            pl.put(dst + offs, src + offs, other, world)
        else:
            pl.get(dst + offs, src + offs, other, world)


@triton.jit
def register_all_kernel(dst, src, n, world, BLOCK: tl.constexpr):
    """My src into row `rank` of the dst (size, n) of every other rank: loaded once, stored size - 1 times."""
    row = dst + tl.cast(world.rank, tl.int64) * n
    for block in range(tl.program_id(0), n // BLOCK, tl.num_programs(0)):
        offs = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(src + offs)
        for i in tl.static_range(1, world.size):
            pl.store(row + offs, x, (world.rank + i) % world.size, world)


@triton.jit
def _tiles(ptr, n, ROWS: tl.constexpr, COLS: tl.constexpr):
    """n elements as a matrix of COLS columns, taken ROWS at a time: a tile is contiguous."""
    return tl.make_tensor_descriptor(ptr, [n // COLS, COLS], [COLS, 1], [ROWS, COLS])


@triton.jit
def tma_kernel(
    dst, src, n, world, distance, MODE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr
):
    """As register_kernel, by TMA. MODE: "store" and "add" push, "load" pulls. n is a multiple of a tile."""
    other = (world.rank + distance) % world.size
    if MODE == "load":
        source, target = _tiles(pl.peer(src, other, world), n, ROWS, COLS), _tiles(dst, n, ROWS, COLS)
    else:
        source, target = _tiles(src, n, ROWS, COLS), _tiles(pl.peer(dst, other, world), n, ROWS, COLS)
    for tile in tl.range(tl.program_id(0), n // (ROWS * COLS), tl.num_programs(0), num_stages=STAGES):
        x = source.load([tile * ROWS, 0])
        if MODE == "add":
            target.atomic_add([tile * ROWS, 0], x)
        else:
            target.store([tile * ROWS, 0], x)
    pl.quiet()


@triton.jit
def tma_all_kernel(dst, src, n, world, ROWS: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr):
    """As register_all_kernel, by TMA: one load, size - 1 stores."""
    row = dst + tl.cast(world.rank, tl.int64) * n
    source = _tiles(src, n, ROWS, COLS)
    for tile in tl.range(tl.program_id(0), n // (ROWS * COLS), tl.num_programs(0), num_stages=STAGES):
        x = source.load([tile * ROWS, 0])
        for i in tl.static_range(1, world.size):
            target = _tiles(pl.peer(row, (world.rank + i) % world.size, world), n, ROWS, COLS)
            target.store([tile * ROWS, 0], x)
    pl.quiet()


# -- latencies: each kernel does `rounds` of one thing, so that a launch costs nothing ---------------------------------
@triton.jit(do_not_specialize=["first", "rounds", "one", "two"])
def pingpong_kernel(flags, box, src, first, rounds, one, two, world, BLOCK: tl.constexpr):
    """Rank `one` and rank `two` signal each other in turn, `one` first; other ranks do nothing. If they are the same,
    its programs 0 and 1. With each signal goes a message of BLOCK elements; none if BLOCK is 0.

    flags: int32 (2,), [0] for who begins, [1] for who answers; box: (2, BLOCK) alike.
    """
    pid = tl.program_id(0)
    rank = tl.cast(world.rank, tl.int32)
    begins = (rank == one) & (pid == 0)
    answers = (rank == two) & ((pid == 1) == (one == two))
    if begins | answers:
        other = tl.where(begins, two, one)
        mine, theirs = tl.where(begins, 0, 1), tl.where(begins, 1, 0)
        for i in range(first, first + rounds):
            if answers:
                pl.wait(flags + mine, i + 1, world)
            if BLOCK > 0:
                offs = tl.arange(0, BLOCK)
                pl.put(box + theirs * BLOCK + offs, src + offs, other, world)
            pl.signal(flags + theirs, other, world)
            if begins:
                pl.wait(flags + mine, i + 1, world)


@triton.jit(do_not_specialize=["rounds"])
def barriers_kernel(bar, rounds, world, KIND: tl.constexpr):
    """`rounds` barriers of one kind."""
    for _ in range(rounds):
        if KIND == "barrier":
            pl.barrier(bar + 2 + tl.program_id(0), world)
        elif KIND == "grid_barrier":
            pl.grid_barrier(bar, world)
        else:
            pl.world_barrier(bar, world)


@triton.jit(do_not_specialize=["steps", "other"])
def chase_kernel(table, out, steps, other, world, ATOMIC: tl.constexpr):
    """A chain of dependent accesses in rank `other`'s table: each entry is the index of the next."""
    at = 0
    for _ in range(steps):
        if ATOMIC:
            at = pl.atomic_max(table + at, -1, other, world, sem="relaxed")  # entries are not negative: they stay
        else:
            at = pl.load(table + at, other, world)
    tl.store(out, at)


# -- launches ----------------------------------------------------------------------------------------------------------
@triton.jit
def bare_kernel(x, y, n, BLOCK: tl.constexpr):
    """A launch as Triton makes it: two tensors and a number."""
    offs = tl.arange(0, BLOCK)
    tl.store(y + offs, tl.load(x + offs, mask=offs < n), mask=offs < n)


@triton.jit
def pkt_kernel(x, y, n, world, BLOCK: tl.constexpr):
    """The same with symmetric tensors and a world."""
    offs = tl.arange(0, BLOCK)
    pl.store(y + offs, tl.load(x + offs, mask=offs < n), world.rank, world, mask=offs < n)
