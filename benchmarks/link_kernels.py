"""The kernels of benchmarks.link. Each has one mechanism or one latency, and nothing else."""

from __future__ import annotations

import triton
import triton.language as tl

import pkt.language as pl


@triton.jit
def register_kernel(dst, src, n, world, distance, PUSH: tl.constexpr, BLOCK: tl.constexpr):
    """PUSH: store my src into the dst of the rank `distance` ahead. Else load its src into my dst. n elements, a
    multiple of BLOCK."""
    other = (world.rank + distance) % world.size
    for block in range(tl.program_id(0), n // BLOCK, tl.num_programs(0)):
        offs = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        if PUSH:
            pl.put(dst=dst + offs, src=src + offs, peer=other, world=world)
        else:
            pl.get(dst=dst + offs, src=src + offs, peer=other, world=world)


@triton.jit
def register_all_kernel(dst, src, n, world, BLOCK: tl.constexpr):
    """Load my src once and store it size - 1 times, into row `rank` of the dst (size, n) of every other rank."""
    row = dst + tl.cast(world.rank, tl.int64) * n
    for block in range(tl.program_id(0), n // BLOCK, tl.num_programs(0)):
        offs = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(src + offs)
        for i in tl.static_range(1, world.size):
            pl.store(row + offs, x, (world.rank + i) % world.size, world)


@triton.jit
def _tiles(ptr, n, ROWS: tl.constexpr, COLS: tl.constexpr):
    """n elements as a matrix of COLS columns, in contiguous tiles of ROWS rows."""
    return tl.make_tensor_descriptor(ptr, [n // COLS, COLS], [COLS, 1], [ROWS, COLS])


@triton.jit
def tma_kernel(
    dst, src, n, world, distance, MODE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr
):
    """As register_kernel, with TMA. MODE: "store" and "add" push, "load" pulls. n is a multiple of a tile."""
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
    """As register_all_kernel, with TMA: one load, size - 1 stores."""
    row = dst + tl.cast(world.rank, tl.int64) * n
    source = _tiles(src, n, ROWS, COLS)
    for tile in tl.range(tl.program_id(0), n // (ROWS * COLS), tl.num_programs(0), num_stages=STAGES):
        x = source.load([tile * ROWS, 0])
        for i in tl.static_range(1, world.size):
            target = _tiles(pl.peer(row, (world.rank + i) % world.size, world), n, ROWS, COLS)
            target.store([tile * ROWS, 0], x)
    pl.quiet()


# -- latencies: each kernel repeats one thing `rounds` times, so that the launch does not count ------------------------
@triton.jit(do_not_specialize=["first", "rounds", "one", "two"])
def pingpong_kernel(flags, box, src, first, rounds, one, two, world, BLOCK: tl.constexpr):
    """Ranks `one` and `two` signal each other in turn, `one` first; other ranks do nothing. If `one` equals `two`,
    programs 0 and 1 of that rank signal each other. A message of BLOCK elements goes with each signal; none if BLOCK
    is 0.

    flags: int32 (2,): [0] belongs to the side that begins, [1] to the side that answers; box: (2, BLOCK) in that order.
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
                pl.put(dst=box + theirs * BLOCK + offs, src=src + offs, peer=other, world=world)
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
    """Follow a chain of dependent accesses in rank `other`'s table, where each entry is the index of the next."""
    at = 0
    for _ in range(steps):
        if ATOMIC:
            at = pl.atomic_max(table + at, -1, other, world, sem="relaxed")  # keeps the entry: none is negative
        else:
            at = pl.load(table + at, other, world)
    tl.store(out, at)


# -- launches ----------------------------------------------------------------------------------------------------------
@triton.jit
def bare_kernel(x, y, n, BLOCK: tl.constexpr):
    """For a plain Triton launch: two tensors and a number."""
    offs = tl.arange(0, BLOCK)
    tl.store(y + offs, tl.load(x + offs, mask=offs < n), mask=offs < n)


@triton.jit
def pkt_kernel(x, y, n, world, BLOCK: tl.constexpr):
    """The same kernel with symmetric tensors and a world."""
    offs = tl.arange(0, BLOCK)
    pl.store(y + offs, tl.load(x + offs, mask=offs < n), world.rank, world, mask=offs < n)
