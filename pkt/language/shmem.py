"""OpenSHMEM names for pkt's functions. A PE is a rank; addresses are into my own heap, as everywhere in pkt.

All threads of a program make each call. Sizes are in bytes, and multiples of the pointers' element size. A `_nbi` call
may return before the transfer is complete. Here both forms may do so for stores: `quiet`, a signal or a barrier
completes them. Puts and signals reach PEs of other nodes, with OpenSHMEM's rules: give `fence` and `quiet` the world.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import address, nodes, sync

SIGNAL_SET = tl.constexpr("set")
SIGNAL_ADD = tl.constexpr("add")
CMP_EQ = tl.constexpr("eq")
CMP_NE = tl.constexpr("ne")
CMP_GT = tl.constexpr("gt")
CMP_GE = tl.constexpr("ge")
CMP_LT = tl.constexpr("lt")
CMP_LE = tl.constexpr("le")

remote_ptr = address.peer
fence = sync.fence
quiet = sync.quiet


@triton.jit
def my_pe(world):
    """This rank, int32."""
    return tl.cast(world.rank, tl.int32)


@triton.jit
def n_pes(world):
    """Number of ranks, a compile-time constant."""
    return world.size


@triton.jit
def int_p(dest, value, pe, world):
    """Store one value into PE `pe`'s `*dest`: `st.global` by one thread."""
    tl.store(address.near(dest, pe, world, "pl.shmem.int_p"), value)


@triton.jit
def putmem_nbi(dest, source, nbytes, pe, world, BLOCK: tl.constexpr = 4096):
    """Copy my `source` into PE `pe`'s `dest`, in blocks of BLOCK elements. Complete after `quiet`."""
    nodes.put(dest, source, nbytes, pe, world, BLOCK)


@triton.jit
def putmem(dest, source, nbytes, pe, world, BLOCK: tl.constexpr = 4096):
    """As `putmem_nbi`, but the caller may reuse `source` on return, as in OpenSHMEM."""
    nodes.put(dest, source, nbytes, pe, world, BLOCK)
    if world.node_size != 0:
        sync.ptx.far_quiet()
    sync.ptx.cta_barrier()


@triton.jit
def getmem_nbi(dest, source, nbytes, pe, world, BLOCK: tl.constexpr = 4096):
    """Copy PE `pe`'s `source` into my `dest`. Complete after `quiet`."""
    sync.ptx.near_only("pl.shmem.getmem_nbi", world)
    nodes.move(dest, source, nbytes, world.rank, pe, world, BLOCK)


@triton.jit
def getmem(dest, source, nbytes, pe, world, BLOCK: tl.constexpr = 4096):
    """As `getmem_nbi`, but all threads of the program may read `dest` on return."""
    sync.ptx.near_only("pl.shmem.getmem", world)
    nodes.move(dest, source, nbytes, world.rank, pe, world, BLOCK)
    sync.ptx.cta_barrier()


@triton.jit
def signal_op(sig_addr, signal, sig_op: tl.constexpr, pe, world):
    """Publish, then set or add `signal` to PE `pe`'s int32 `*sig_addr`. sig_op: SIGNAL_SET, SIGNAL_ADD."""
    sync.signal(sig_addr, pe, world, signal, sig_op)


@triton.jit
def putmem_signal_nbi(
    dest, source, nbytes, sig_addr, signal, sig_op: tl.constexpr, pe, world, BLOCK: tl.constexpr = 4096
):
    """`putmem_nbi`, then the signal, which PE `pe` sees after the data."""
    sync.put_and_post(dest, source, nbytes, sig_addr, signal, sig_op, pe, world, BLOCK)


@triton.jit
def putmem_signal(dest, source, nbytes, sig_addr, signal, sig_op: tl.constexpr, pe, world, BLOCK: tl.constexpr = 4096):
    """`putmem`, then the signal, which PE `pe` sees after the data."""
    sync.put_and_post(dest, source, nbytes, sig_addr, signal, sig_op, pe, world, BLOCK)
    if world.node_size != 0:
        sync.ptx.far_quiet()


@triton.jit
def signal_wait_until(sig_addr, cmp: tl.constexpr, cmp_value, world):
    """Wait until my `*sig_addr cmp cmp_value` (CMP_GE, ...); return the value found. As `pl.wait`."""
    return sync.wait(sig_addr, cmp_value, world, cmp)


@triton.jit
def sync_all(counters, world):
    """Wait for all programs of all PEs. counters: two int32 of `pkt.signals`, which OpenSHMEM's form does not take. All
    earlier stores are visible afterwards, which OpenSHMEM does not promise."""
    sync.world_barrier(counters, world)


@triton.jit
def barrier_all(counters, world):
    """`quiet`, then `sync_all`: wait for all programs of all PEs and for their stores."""
    sync.world_barrier(counters, world)


@triton.jit
def broadcast(dest, source, nbytes, root, counter, world, BLOCK: tl.constexpr = 4096):
    """Copy PE `root`'s `source` into every PE's `dest`. Collective over the programs of this index on all PEs, which
    end in `pl.barrier`. counter: one int32 for each program index."""
    if tl.cast(world.rank, tl.int32) == root:
        for i in tl.static_range(1, world.size + 1):
            nodes.put(dest, source, nbytes, (world.rank + i) % world.size, world, BLOCK)
    sync.barrier(counter, world)
