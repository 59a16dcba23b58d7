"""Addresses of other ranks' copies of my memory, by arithmetic alone: no table and no load."""

from __future__ import annotations

import triton
import triton.language as tl

from . import ptx


@triton.jit
def of_rank(ptr, rank, world):
    """As `peer`, and compiles in a world of several nodes, too. There `rank` is of this node: the address of any other
    rank is where no memory is."""
    bits: tl.constexpr = ptr.dtype.scalar.element_ty.primitive_bitwidth
    itemsize: tl.constexpr = bits // 8 if bits >= 8 else 1  # a bool is one bit, in a byte
    # world.rank is the constant 1 on rank 1: tl.cast takes constants and tensors alike
    if world.network != 0:
        distance = _around(number(rank, world), number(world.rank, world), world)
    elif world.table == 0:
        distance = tl.cast(rank, tl.int64) - tl.cast(world.rank, tl.int64)
    else:  # a team whose ranks have unequal steps
        distance = ptx.member(rank, world) - ptx.member(world.rank, world)
    return ptr + distance * (world.stride // itemsize)


@triton.jit
def near(ptr, rank, world, CALL: tl.constexpr):
    """`of_rank` for a CALL, as "pl.load", that no network carries. In a world of several nodes it does not compile."""
    ptx.near_only(CALL, world)
    return of_rank(ptr, rank, world)


@triton.jit
def peer(ptr, rank, world):
    """The address of rank `rank`'s copy of `ptr`.

    ptr: scalar or block of pointers into my own heap, any element type; rank: int, 0 <= rank < world.size.
    Returns pointers of the same shape and type, `ptr + (rank - world.rank) * stride` in 64-bit integer arithmetic. The
    compiler still sees the alignment, so 16-byte accesses stay 16 bytes wide. No ordering. In a team, `rank` is one of
    the team's, and its stride or a constant table leads to the copy. Does not compile in a world of several nodes, in
    which only the network reaches some copies: call it in the team `world.on_node`.
    """
    return near(ptr, rank, world, "pl.peer")


@triton.jit
def number(rank, world):
    """The number of a rank of `world` in the world of all ranks, int64."""
    if world.team == 0:
        return tl.cast(rank, tl.int64)
    else:
        return ptx.member(rank, world)


@triton.jit
def _around(rank, mine, world):
    """Strides from my window to that of `rank`, over several nodes. rank, mine: in the world of all ranks."""
    distance = rank - mine + tl.where(rank < mine, ptx.ring(world), 0)
    if world.node_size == 0:
        return distance
    else:  # addresses of memory have 47 bits
        near = rank // world.node_size == mine // world.node_size
        return tl.where(near, distance, (1 << 48) // world.stride + 1)


@triton.jit
def multicast(ptr, world):
    """The address of `ptr` in the multicast window, for multimem instructions only, and only where `world.multicast`.
    The window lies behind the last rank's, at `peer(ptr, world.size, world)`."""
    return of_rank(ptr, world.size, world)
