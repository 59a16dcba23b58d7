"""Signals, waits, barriers and epochs.

What a program did before `signal` (plain accesses, multimem and TMA stores, by any of its threads) is visible, to TMA
loads too, to the program whose `wait` found the signal. Nothing else needs saying about memory order. Counters are
int32 in symmetric memory, compared so that they may wrap, and are never reset.

No call here belongs inside a K loop or a warp-specialised loop: the first stops being pipelined, the second loses the
call (`pkt.language.inspect` makes that an error).
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import address, ptx

_HEADER_WORDS = tl.constexpr(16)
_ADD = tl.constexpr("add")
_GE = tl.constexpr("ge")


@triton.jit
def _post(ptr, value, op: tl.constexpr, sem: tl.constexpr):
    counter: tl.constexpr = ptr.dtype.element_ty
    tl.static_assert(counter == tl.int32 or counter == tl.uint32, "a counter is int32")
    if op == "add":
        tl.atomic_add(ptr, tl.cast(value, ptr.dtype.element_ty), sem=sem, scope="sys")
    else:
        tl.static_assert(op == "set", 'op is "add" or "set"')
        tl.atomic_xchg(ptr, tl.cast(value, ptr.dtype.element_ty), sem=sem, scope="sys")


@triton.jit
def signal(ptr, peer, world, value=1, op: tl.constexpr = _ADD):
    """Publish what this program has done and add `value` to (op="set": write it into) rank `peer`'s counter.

    ptr: scalar pointer to int32 in my heap; peer: int; value: int32.
    `cp.async.bulk.wait_group 0`, `fence.proxy.async` (TMA stores have landed), `bar.sync`, then in one thread
    `atom.add.release.sys` (or `exch`).
    """
    ptx.drain(world)
    ptx.cta_barrier()
    _post(address.peer(ptr, peer, world), value, op, "release")


@triton.jit
def signal_all(ptr, world, value=1, op: tl.constexpr = _ADD):
    """`signal` to every rank, this one included: one `fence.acq_rel.sys`, then a relaxed atomic for each rank, half the
    time of a release to each. Peers in the order rank + 1, rank + 2, ..., so that ranks do not all send to rank 0."""
    ptx.drain(world)
    ptx.cta_barrier()
    ptx.fence()
    for i in tl.static_range(1, world.size + 1):
        _post(address.peer(ptr, (world.rank + i) % world.size, world), value, op, "relaxed")


@triton.jit
def _uniform(found, want):
    # Each thread polls on its own and may find another value. One value for all, so that it may steer control flow: the
    # one farthest ahead of `want`. Reductions are pure, so this costs nothing where the result is not used.
    threads: tl.constexpr = ptx.threads_to_agree()
    if threads > 1:
        want = tl.cast(want, tl.int32)
        ahead = tl.full((threads,), 0, tl.int32) + (found - want)
        found = want + tl.max(ahead, 0)
    return found


@triton.jit
def wait(ptr, at_least, world, cmp: tl.constexpr = _GE):
    """Until my counter `*ptr` is at least `at_least`; afterwards what its signallers published is visible, to TMA too.

    ptr: scalar pointer to int32 in my heap; at_least: int; cmp: "ge", "gt", "le", "lt", "eq", "ne": the sign of the
    32-bit difference, so counters may wrap. Returns the value found, int32, the same in every thread.
    Spin on `ld.acquire.sys`, `fence.proxy.async.global`, `bar.sync`. When the counter stands still for longer than
    the deadline in the status page, one record is written, every rank's wait leaves and the host raises WaitTimeout:
    the value returned then does not satisfy the comparison, and what the program still computes is thrown away.
    """
    found = ptx.wait(ptr, at_least, cmp, world)
    ptx.cta_barrier()
    return _uniform(found, at_least)


@triton.jit
def test(ptr, at_least, world, cmp: tl.constexpr = _GE):  # noqa: PT028
    """Whether a `wait` with these arguments would return at once; if so what was published is visible, as after `wait`.

    Returns a bool, the same in every thread: one thread reads with `atom.add.acquire.sys` of 0 and tells the others.
    """
    found = tl.atomic_add(ptr, tl.cast(0, ptr.dtype.element_ty), sem="acquire", scope="sys")
    ptx.proxy_fence(world)
    ahead = found - tl.cast(at_least, tl.int32)
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
def fence():
    """`fence.acq_rel.sys` in every thread, for hand-written protocols; `signal` and `wait` need none."""
    ptx.fence()


@triton.jit
def quiet():
    """All stores of this program, TMA ones too, have been performed everywhere: what a plain or relaxed store made
    after it is seen after them. `cp.async.bulk.wait_group 0`, `fence.proxy.async`, `fence.acq_rel.sys`,
    `bar.sync`."""
    ptx.drain(None)
    ptx.fence()
    ptx.cta_barrier()


@triton.jit
def _share(first, n):
    # A round of n arrivals adds 2^31: the first participant adds 2^31 - (n - 1), the others 1 each. So a round flips
    # the counter's top bit exactly when it is complete, and nothing has to be reset or counted. In int32, which wraps.
    return tl.where(first, tl.cast(0x7FFFFFFF, tl.int32) - tl.cast(n, tl.int32) + 2, 1)


@triton.jit
def _arrive_everywhere(ptr, world):
    """One arrival of this rank at every rank's counter. The caller has drained, and has read its own counter: a peer
    that has seen my arrival may already arrive for the next round here."""
    share = _share(tl.cast(world.rank, tl.int32) == 0, world.size)
    ptx.fence()
    for i in tl.static_range(1, world.size + 1):
        tl.atomic_add(address.peer(ptr, (world.rank + i) % world.size, world), share, sem="relaxed", scope="sys")


@triton.jit
def barrier(ptr, world):
    """The program with this index, on all ranks. One counter (int32, zeroed once) for each program index that calls it.

    Everything published as by `signal_all`, visible as after `wait`. One relaxed atomic to each rank behind one fence.
    """
    # Stable: this round cannot complete without me. Every thread reads it, so it must be before the barrier.
    round_bit = ptx.load_relaxed(ptr)
    ptx.drain(world)
    ptx.cta_barrier()
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
    """All programs of this rank's launch, which must all be resident. One counter. System scope: what a program put
    into another rank's memory counts as done too."""
    ptx.drain(world)
    ptx.cta_barrier()
    before = tl.atomic_add(ptr, _share(_is_first_program(), _num_programs()), sem="release", scope="sys")
    ptx.wait(ptr, before, "flip", world)
    ptx.cta_barrier()


@triton.jit
def world_barrier(ptr, world):
    """All programs of all ranks. Two counters, `ptr` and `ptr + 1`: the last program to arrive on a rank arrives for
    the rank. Grids may differ between ranks."""
    round_bit = ptx.load_relaxed(ptr + 1)  # as in `barrier`
    ptx.drain(world)
    ptx.cta_barrier()
    if _num_programs() == 1:  # nobody to wait for at home
        _arrive_everywhere(ptr + 1, world)
    else:
        share = _share(_is_first_program(), _num_programs())
        # Of this GPU only: what the others here have done goes on to the peers with the last one's fence, and to my
        # rank's other programs, who wait for its arrival at home.
        before = tl.atomic_add(ptr, share, sem="acq_rel", scope="gpu")
        if ((before + share) ^ before) < 0:
            _arrive_everywhere(ptr + 1, world)
    ptx.wait(ptr + 1, round_bit, "flip", world)
    ptx.cta_barrier()


@triton.jit
def peek_epoch(flags):
    """What `epoch` will return in this program, which calls it later, behind `ptx.cta_barrier`: a load instead of an
    atomic whose result goes round the threads, which has its time while something else is waited for."""
    return (ptx.load_relaxed((flags - _HEADER_WORDS).to(tl.pointer_type(tl.int64))) >> 32).to(tl.int32) + 1


@triton.jit
def epoch(flags, world):
    """Which launch this is on these counters: 1, 2, ..., int32; counted in device memory, so graph replays count too.

    flags: pointer to the first of `pkt.signals`' counters. Call it exactly once in each program. `wait(flags + i,
    epoch * arrivals_per_launch, world)` is then right on every launch with nothing reset.
    `atom.add.relaxed` on the 64-bit word 64 bytes before `flags`: epoch above, arrivals below; the last to arrive
    begins the next epoch.
    """
    word = (flags - _HEADER_WORDS).to(tl.pointer_type(tl.int64))
    n = tl.cast(_num_programs(), tl.int64)
    before = tl.atomic_add(word, tl.cast(1, tl.int64), sem="relaxed", scope="gpu")
    last = (before & 0xFFFFFFFF) == n - 1
    tl.atomic_add(word, (tl.cast(1, tl.int64) << 32) - n, mask=last, sem="relaxed", scope="gpu")
    return (before >> 32).to(tl.int32) + 1
