"""Transfers and signals that reach ranks of other nodes ("far" ranks).

The network carries them, and its rules are weaker than those of the node. A far put arrives late, and it may overtake
or be overtaken by any other call. The network may read its source just as late. Only three things order it:

- its own signal (`put_signal`) arrives after its data, and says nothing about other puts;
- `fence(world=world)` orders the program's earlier far calls to each rank before its later ones to the same rank;
- `quiet(world)` waits until all far calls of the program are complete. `barrier` and its like do so, too.

In a world of one node `world.node_size` is the constant 0, and nothing here is compiled. In a world of several nodes a
counter has two lanes, one for the ranks of its node and one for the network (`ptx.lane`). Its value is their sum.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import address, ptx


@triton.jit
def is_far(peer, world):
    """Whether rank `peer` is on another node; for worlds of several nodes."""
    # Where each rank is a node the compiler would drop the calls for near ranks, and pkt takes dropped signals for a
    # fault of the compiler's.
    mine = ptx.unknown(address.number(world.rank, world))
    return address.number(peer, world) // world.node_size != mine // world.node_size


@triton.jit
def move(dst, src, nbytes, to_rank, from_rank, world, BLOCK: tl.constexpr):
    """Copy a run of bytes from `from_rank`'s `src` into `to_rank`'s `dst` by loads and stores, BLOCK elements at a
    time."""
    bits: tl.constexpr = src.dtype.element_ty.primitive_bitwidth
    itemsize: tl.constexpr = bits // 8 if bits >= 8 else 1
    n = tl.cast(nbytes, tl.int64) // itemsize
    target = address.of_rank(dst, to_rank, world)
    origin = address.of_rank(src, from_rank, world)
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(target + at, tl.load(origin + at, mask=at < n), mask=at < n)


@triton.jit
def put(dst, src, nbytes, peer, world, BLOCK: tl.constexpr):
    """`move` my `src` to rank `peer`, through the network if it is far."""
    if world.node_size == 0:
        move(dst, src, nbytes, peer, world.rank, world, BLOCK)
    else:
        if is_far(peer, world):
            ptx.drain(world)
            ptx.cta_barrier()
            ptx.far_put(dst, src, nbytes, address.number(peer, world), world)
        else:
            move(dst, src, nbytes, peer, world.rank, world, BLOCK)


@triton.jit
def counted(ptr, found, world, sem: tl.constexpr):
    """The value of my counter `*ptr`, in which `found` was read: with what the network has added to it. sem: "acquire"
    in one thread that tells the others, or "relaxed" in every thread."""
    if world.network == 0:
        return found
    elif sem == "relaxed":
        return found + tl.cast(ptx.load_relaxed(ptx.lane(ptr, world)), found.dtype)
    else:
        added = tl.atomic_add(ptx.lane(ptr, world), tl.cast(0, tl.int64), sem=sem, scope="sys")
        return found + tl.cast(added, found.dtype)


@triton.jit
def complete(world):
    """Wait until the program's TMA stores have been performed, and its far calls are complete; join its threads."""
    ptx.drain(world)
    if world.node_size != 0:
        ptx.far_quiet()
    ptx.cta_barrier()
