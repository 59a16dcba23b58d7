"""Signals, waits, barriers and epochs.

A `signal` publishes everything that its program did before: plain accesses, multimem and TMA stores, by any of its
threads. The program whose `wait` finds the signal sees all of it, by TMA loads too. There are no other rules of memory
order. Counters are int32 or int64 in symmetric memory; those of barriers are int32. Comparisons allow for a wrap, and
counters are never reset.

Call none of these functions inside a K loop, which would no longer be pipelined, or in a warp-specialised loop, which
loses the call (`pkt.language.inspect` makes that an error).
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import address, nodes, ptx

_HEADER_WORDS = tl.constexpr(8)  # int64
_ADD = tl.constexpr("add")
_GE = tl.constexpr("ge")


@triton.jit
def _check_counter(ptr):
    is_counter: tl.constexpr = ptr.dtype.element_ty.is_int() and ptr.dtype.element_ty.primitive_bitwidth >= 32
    tl.static_assert(is_counter, "a counter is int32 or int64")


@triton.jit
def _post(ptr, value, op: tl.constexpr, sem: tl.constexpr):
    _check_counter(ptr)
    if op == "add":
        tl.atomic_add(ptr, tl.cast(value, ptr.dtype.element_ty), sem=sem, scope="sys")
    else:
        tl.static_assert(op == "set", 'op is "add" or "set"')
        tl.atomic_xchg(ptr, tl.cast(value, ptr.dtype.element_ty), sem=sem, scope="sys")


@triton.jit
def _send(ptr, peer, value, op: tl.constexpr, sem: tl.constexpr, world):
    """`_post` to rank `peer`, on whatever node."""
    if world.node_size == 0:
        _post(address.of_rank(ptr, peer, world), value, op, sem)
    else:
        if nodes.is_far(peer, world):
            _check_counter(ptr)
            if sem == "release":  # otherwise the caller has a fence
                ptx.fence()
            ptx.far_signal(ptr, tl.cast(value, ptr.dtype.element_ty), address.number(peer, world), op, world)
        else:
            _post(address.of_rank(ptr, peer, world), value, op, sem)


@triton.jit
def signal(ptr, peer, world, value=1, op: tl.constexpr = _ADD):
    """Publish everything this program has done, then add `value` to rank `peer`'s counter (op="set": store it).

    ptr: scalar pointer to int32 or int64 in my heap; peer: int; value: of that type.
    `cp.async.bulk.wait_group 0`, `fence.proxy.async` (TMA stores have landed), `bar.sync`, then in one thread
    `atom.add.release.sys` (or `exch`).
    It does not publish puts to ranks of other nodes, which it may overtake: `put_signal`, or `fence` or `quiet` before
    it. A rank of another node takes op="add" only.
    """
    ptx.drain(world)
    ptx.cta_barrier()
    _send(ptr, peer, value, op, "release", world)


@triton.jit
def put_signal(ptr, peer, world, value=1, dst=None, src=None, nbytes=None, BLOCK: tl.constexpr = 1024):
    """`put` a run of `nbytes` to rank `peer`, on any node, then `signal` it: `value` is added to its counter `ptr`
    after the data has arrived.

    To a rank of another node the signal publishes this put and what `signal` does, but no other far put. `src` may be
    written again only after `quiet(world)`, or after an answer of the rank that saw the signal. Name all three:
    `pl.put_signal(ready, peer, world, dst=y, src=x, nbytes=n)`.
    """
    named: tl.constexpr = dst is not None and src is not None and nbytes is not None
    tl.static_assert(named, "name them: pl.put_signal(ptr, peer, world, dst=, src=, nbytes=)")
    put_and_post(dst, src, nbytes, ptr, value, "add", peer, world, BLOCK)


@triton.jit
def _move_and_post(dst, src, nbytes, ptr, value, op: tl.constexpr, peer, world, BLOCK: tl.constexpr):
    nodes.move(dst, src, nbytes, peer, world.rank, world, BLOCK)
    ptx.drain(world)
    ptx.cta_barrier()
    _post(address.of_rank(ptr, peer, world), value, op, "release")


@triton.jit
def put_and_post(dst, src, nbytes, ptr, value, op: tl.constexpr, peer, world, BLOCK: tl.constexpr):
    """`put_signal` with the operation on the counter, "add" or "set"."""
    if world.node_size == 0:
        _move_and_post(dst, src, nbytes, ptr, value, op, peer, world, BLOCK)
    else:
        if nodes.is_far(peer, world):
            _check_counter(ptr)
            ptx.drain(world)
            ptx.cta_barrier()
            to = address.number(peer, world)
            ptx.far_put_signal(dst, src, nbytes, ptr, tl.cast(value, ptr.dtype.element_ty), to, op, world)
        else:
            _move_and_post(dst, src, nbytes, ptr, value, op, peer, world, BLOCK)


@triton.jit
def signal_all(ptr, world, value=1, op: tl.constexpr = _ADD):
    """`signal` to every rank, this one included: one `fence.acq_rel.sys`, then a relaxed atomic to each rank. This
    takes half the time of a release to each. The order rank + 1, rank + 2, ... keeps ranks from all sending to rank
    0."""
    ptx.drain(world)
    ptx.cta_barrier()
    ptx.fence()
    for i in tl.static_range(1, world.size + 1):
        _send(ptr, (world.rank + i) % world.size, value, op, "relaxed", world)


@triton.jit
def _uniform(found, want):
    # Threads poll independently and may find different values. All get the one farthest ahead of `want`, so that it may
    # steer control flow. Reductions are pure: where the result is not used, the compiler removes this one.
    threads: tl.constexpr = ptx.threads_to_agree()
    if threads > 1:
        want = tl.cast(want, found.dtype)
        ahead = tl.full((threads,), 0, found.dtype) + (found - want)
        found = want + tl.max(ahead, 0)
    return found


@triton.jit
def wait(ptr, at_least, world, cmp: tl.constexpr = _GE):
    """Wait until my counter `*ptr` is at least `at_least`; then everything its signallers published is visible.

    ptr: scalar pointer to int32 or int64 in my heap; at_least: int; cmp: "ge", "gt", "le", "lt", "eq", "ne", on the
    sign of the difference in the counter's bits, so that counters may wrap. Returns the value found, of the counter's
    type, the same in every thread.
    Spin on `ld.acquire.sys`, with naps between that grow to a microsecond; `fence.proxy.async.global` (so TMA sees the
    data, too), `bar.sync`.
    If the counter stands still for longer than the deadline in the status page, the wait writes one record, every
    rank's waits leave, and the host raises WaitTimeout. The value returned then does not satisfy the comparison, and
    the program's further results are discarded.
    """
    found = ptx.wait(ptr, at_least, cmp, world)
    ptx.cta_barrier()
    return _uniform(found, at_least)


@triton.jit
def test(ptr, at_least, world, cmp: tl.constexpr = _GE):  # noqa: PT028
    """Whether a `wait` with these arguments would return at once; if so, published data is visible as after `wait`.

    Returns a bool, the same in every thread: one thread reads by `atom.add.acquire.sys` of 0 and tells the others.
    """
    found = tl.atomic_add(ptr, tl.cast(0, ptr.dtype.element_ty), sem="acquire", scope="sys")
    found = nodes.counted(ptr, found, world, "acquire")
    ptx.proxy_fence(world)
    counter: tl.constexpr = tl.int32 if found.dtype.primitive_bitwidth == 32 else tl.int64
    ahead = tl.cast(found, counter) - tl.cast(at_least, counter)
    if cmp == "ge":
        return ahead >= 0
    elif cmp == "gt":
        return ahead > 0
    elif cmp == "le":
        return ahead <= 0
    elif cmp == "lt":
        return ahead < 0
    elif cmp == "eq":
        return ahead == 0
    else:
        tl.static_assert(cmp == "ne", "cmp is ge, gt, le, lt, eq or ne")
        return ahead != 0


@triton.jit
def fence(sc: tl.constexpr = False, world=None):
    """`fence.acq_rel.sys` in every thread, for hand-written protocols; `signal` and `wait` need none.

    sc: `fence.sc.sys`, which also orders earlier writes before later reads. If two programs each write a flag, fence
    and read the other's flag, at least one of them then sees the other's. Each needs a fence with sc=True.
    world: with it the program's puts and signals to each rank of another node arrive before its later ones to the same
    rank. Puts to different ranks stay unordered: `quiet`.
    """
    ptx.fence(sc)
    if world is not None:
        if world.node_size != 0:
            ptx.far_fence()


@triton.jit
def quiet(world=None):
    """Wait until all stores of this program, TMA stores too, have been performed everywhere. Other ranks see its later
    plain and relaxed stores after them. `cp.async.bulk.wait_group 0`, `fence.proxy.async`, `fence.acq_rel.sys`,
    `bar.sync`.

    world: with it also wait until the program's puts and signals to ranks of other nodes are complete. Their sources
    may then be written again. Every program completes its own."""
    ptx.drain(None)
    ptx.fence()
    if world is not None:
        if world.node_size != 0:
            ptx.far_quiet()
    ptx.cta_barrier()


@triton.jit
def _share(first, n):
    # The n arrivals of a round add 2^31 in all: the first participant adds 2^31 - (n - 1), the others 1 each. So the
    # counter's top bit flips exactly when a round is complete, with nothing to reset or count. int32 wraps.
    return tl.where(first, tl.cast(0x7FFFFFFF, tl.int32) - tl.cast(n, tl.int32) + 2, 1)


@triton.jit
def _arrive_everywhere(ptr, world):
    """Add this rank's arrival to every rank's counter. The caller must have drained, and must have read its own counter
    before: a peer that has seen my arrival may already arrive here for the next round."""
    share = _share(tl.cast(world.rank, tl.int32) == 0, world.size)
    ptx.fence()
    for i in tl.static_range(1, world.size + 1):
        _send(ptr, (world.rank + i) % world.size, share, "add", "relaxed", world)


@triton.jit
def barrier(ptr, world):
    """Wait for the program with this index on all ranks; uses one counter (int32, zeroed once) a program index.

    Publishes as `signal_all` and acquires as `wait`. One fence, then one relaxed atomic to each rank.
    """
    # The value is stable, because this round cannot complete without me. Every thread reads it, so before the barrier.
    round_bit = nodes.counted(ptr, ptx.load_relaxed(ptr), world, "relaxed")
    nodes.complete(world)
    _arrive_everywhere(ptr, world)
    ptx.wait(ptr, round_bit, "flip", world)
    ptx.cta_barrier()


@triton.jit
def _num_programs():
    return tl.num_programs(0) * tl.num_programs(1) * tl.num_programs(2)


@triton.jit
def _is_first_program():
    return (tl.program_id(0) + tl.program_id(1) + tl.program_id(2)) == 0


@triton.jit
def grid_barrier(ptr, world):
    """Wait for all programs of this rank's launch, which must all be resident. Uses one counter. The scope is the
    system: stores into other ranks' memory are visible afterwards, too."""
    nodes.complete(world)
    before = tl.atomic_add(ptr, _share(_is_first_program(), _num_programs()), sem="release", scope="sys")
    before = nodes.counted(ptr, before, world, "relaxed")  # no rank of another node adds to it now
    ptx.wait(ptr, before, "flip", world)
    ptx.cta_barrier()


@triton.jit
def world_barrier(ptr, world):
    """Wait for all programs of all ranks. Uses two counters, `ptr` and `ptr + 1`: the last program to arrive on a rank
    arrives for the rank. Grids may differ between ranks."""
    round_bit = nodes.counted(ptr + 1, ptx.load_relaxed(ptr + 1), world, "relaxed")  # as in `barrier`
    nodes.complete(world)
    if _num_programs() == 1:  # no other program on this rank
        _arrive_everywhere(ptr + 1, world)
    else:
        share = _share(_is_first_program(), _num_programs())
        # The scope of this GPU is enough. The last program's fence passes on everything that the others here have done:
        # to the peers, and to the rank's other programs, which wait for its arrival on this rank.
        before = tl.atomic_add(ptr, share, sem="acq_rel", scope="gpu")
        before = nodes.counted(ptr, before, world, "relaxed")  # no rank of another node adds to it now
        if ((before + share) ^ before) < 0:
            _arrive_everywhere(ptr + 1, world)
    ptx.wait(ptr + 1, round_bit, "flip", world)
    ptx.cta_barrier()


@triton.jit
def peek_epoch(flags):
    """The value that `epoch` will return in this program, by a plain load. The program must call `epoch` later, behind
    `ptx.cta_barrier`: the distribution of the atomic's result among the threads then overlaps with another wait."""
    return (ptx.load_relaxed(flags.to(tl.pointer_type(tl.int64)) - _HEADER_WORDS) >> 32).to(tl.int32) + 1


@triton.jit
def epoch(flags, world):
    """The number of this launch on these counters: 1, 2, ..., int32, counted on the device, so graph replays count too.

    flags: pointer to the first of `pkt.signals`' counters. Call it exactly once in each program. Then `wait(flags + i,
    epoch * arrivals_per_launch, world)` is right in every launch with nothing reset.
    `atom.add.relaxed` on the 64-bit word that lies 64 bytes before `flags`. Its high half is the epoch, its low half
    the arrivals; the last program to arrive begins the next epoch.
    """
    word = flags.to(tl.pointer_type(tl.int64)) - _HEADER_WORDS
    n = tl.cast(_num_programs(), tl.int64)
    before = tl.atomic_add(word, tl.cast(1, tl.int64), sem="relaxed", scope="gpu")
    last = (before & 0xFFFFFFFF) == n - 1
    tl.atomic_add(word, (tl.cast(1, tl.int64) << 32) - n, mask=last, sem="relaxed", scope="gpu")
    return (before >> 32).to(tl.int32) + 1
