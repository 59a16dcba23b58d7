"""Litmus tests: small patterns of messages, some of which a wrong memory order would deliver stale.

A message is a block of values that differ from those of every other round. One rank writes it and publishes it by
the method in the test's name. The receiving kernel compares it element by element. A launch runs many rounds in many
programs, so ten million messages take a second or so on GPUs. In the simulator a few rounds under many schedules are
enough, because the race detector finds a missing order whatever the values are.

Boxes are reused every other round, so that the receiver's earlier reads are still in its caches. Nothing is reset
between launches; the count of rounds continues.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

import pkt
import pkt.language as pl
from pkt.language import ptx

STEP = tl.constexpr(1000003)  # difference between the values of two rounds


class Counts(NamedTuple):
    """Counts of one rank: messages received, and stale ones among them."""

    messages: int
    stale: int


@triton.jit
def _value(i, rank, pid, offs):
    return i * STEP + rank * 8191 + pid * 131 + offs


@triton.jit
def _partner(pid, rank, world):
    """(rank, program) of a program's partner on another rank; the partner's partner is this program."""
    others: tl.constexpr = world.size - 1
    distance = pid % others + 1
    return (rank + distance) % world.size, pid // others * others + world.size - distance - 1


@triton.jit
def _rows(ptr, n, ROWS: tl.constexpr, COLS: tl.constexpr):
    return tl.make_tensor_descriptor(ptr, [n * ROWS, COLS], [COLS, 1], [ROWS, COLS])


# -- message passing between two ---------------------------------------------------------------------------------------
@triton.jit(do_not_specialize=["first", "rounds"])
def pairs_kernel(
    box,  # int32 (programs, 2, ROWS, COLS) on every rank; program p of this rank receives in box p
    flags,  # int32 (programs,) on every rank
    stale_ptr,  # int32 (programs,) of this rank
    first,
    rounds,
    world,
    SEND: tl.constexpr,  # "store", "release" (plain stores, published by store_release), "tma", "tma add", "atomic add"
    RECEIVE: tl.constexpr,  # "load", "acquire" (loads after a load_acquire), "tma"
    WITHOUT: tl.constexpr,  # a planted mistake, to test the counting. "order": the signal is sent before the data.
    # "fence": a relaxed signal is sent after stores that have completed
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Program p has one partner, on another rank, and exchanges a message with it each round. A partner that has sent
    round i + 1 has read round i, so two boxes are enough."""
    pid = tl.program_id(0)
    rank = tl.cast(world.rank, tl.int32)
    to, partner = _partner(pid, rank, world)
    n = tl.num_programs(0) * 2
    offs = tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :]
    theirs = _rows(pl.peer(box, to, world), n, ROWS, COLS)
    mine = _rows(box, n, ROWS, COLS)
    stale = 0
    for i in range(first, first + rounds):
        there, here = 2 * partner + (i & 1), 2 * pid + (i & 1)
        value = _value(i, rank, pid, offs)
        # a box holds the message of two rounds ago: adding the difference gives the new message
        difference = tl.where(i < 2, value, 2 * STEP)
        if WITHOUT == "order":
            pl.signal(flags + partner, to, world)
        if SEND == "store" or SEND == "release":
            pl.store(box + there * ROWS * COLS + offs, value, to, world)
        elif SEND == "tma":
            theirs.store([there * ROWS, 0], value)
        elif SEND == "tma add":
            theirs.atomic_add([there * ROWS, 0], difference)
        else:
            pl.atomic_add(box + there * ROWS * COLS + offs, difference, to, world, sem="relaxed")
        if WITHOUT == "fence":
            ptx.drain(world)
            ptx.cta_barrier()
            tl.atomic_add(pl.peer(flags + partner, to, world), 1, sem="relaxed", scope="sys")
        elif SEND == "release":
            pl.store_release(flags + partner, i + 1, to, world)
        elif WITHOUT != "order":
            pl.signal(flags + partner, to, world)
        if RECEIVE == "acquire":
            while pl.load_acquire(flags + pid, rank, world) < i + 1:
                pass
        else:
            pl.wait(flags + pid, i + 1, world)
        if RECEIVE == "tma":
            found = mine.load([here * ROWS, 0])
        else:
            found = tl.load(box + here * ROWS * COLS + offs)
        wrong = tl.sum(tl.sum((found != _value(i, to, partner, offs)).to(tl.int32), 1), 0)
        stale += (wrong > 0).to(tl.int32)
    tl.store(stale_ptr + pid, stale)


def pairs(
    world: Any,
    programs: int,
    rounds: int,
    launches: int = 2,
    *,
    send: str,
    receive: str,
    without: str = "",
    rows: int = 8,
    cols: int = 32,
) -> Counts:
    """Message passing: one side stores data and signals, the other waits and loads data."""
    programs -= programs % (world.size - 1)
    box, flags = pkt.zeros(programs, 2, rows, cols, dtype=torch.int32), pkt.signals(programs)

    def launch(first: int, stale: torch.Tensor) -> None:
        pairs_kernel[(programs,)](
            box, flags, stale, first, rounds, world.device, send, receive, without, rows, cols,
            launch_cooperative_grid=True,
        )  # fmt: skip

    return _count(world, launch, programs, rounds, launches, each=1)


def _count(world: Any, launch: Callable, programs: int, rounds: int, launches: int, each: int) -> Counts:
    """Run the launches and count; a program receives `each` messages a round."""
    stale = torch.full((launches, programs), -1, dtype=torch.int32, device=world.torch_device)
    for i in range(launches):
        launch(i * rounds, stale[i])
    world.synchronize()
    world.barrier()
    assert (stale >= 0).all(), "a program did not finish"
    return Counts(programs * rounds * launches * each, int(stale.sum()))


# -- data with their flags ---------------------------------------------------------------------------------------------
@triton.jit(do_not_specialize=["first", "rounds"])
def flagged_kernel(
    box,  # int32 (programs, 2, BLOCK, 4) on every rank; program p receives in box p
    stale_ptr,  # int32 (programs,) of this rank
    first,
    rounds,
    world,
    EARLY: tl.constexpr,  # planted mistake: the flag before its data
    BLOCK: tl.constexpr,
):
    """Like `pairs_kernel`, with one flagged word per thread: a torn word would hold data of two rounds ago. A partner
    that has put round i + 1 has taken round i."""
    pid = tl.program_id(0)
    rank = tl.cast(world.rank, tl.int32)
    to, partner = _partner(pid, rank, world)
    offs = tl.arange(0, BLOCK)
    stale = 0
    for i in range(first, first + rounds):
        there, here = 2 * partner + (i & 1), 2 * pid + (i & 1)
        value, wanted = _value(i, rank, pid, offs), _value(i, to, partner, offs)
        words = box + (there * BLOCK + offs) * 4
        if EARLY:
            pl.store(words + 3, tl.zeros_like(value) + i + 1, to, world)
            tl.debug_barrier()
            pl.store(words, value, to, world)
            pl.store(words + 1, ~value, to, world)
            pl.store(words + 2, -value, to, world)
        else:
            pl.put_flagged(words, (value, ~value, -value), i + 1, to, world)
        a, b, c = pl.take_flagged(box + (here * BLOCK + offs) * 4, i + 1, world)
        wrong = tl.sum(((a != wanted) | (b != ~wanted) | (c != -wanted)).to(tl.int32), 0)
        stale += (wrong > 0).to(tl.int32)
    tl.store(stale_ptr + pid, stale)


def flagged(world: Any, programs: int, rounds: int, launches: int = 2, *, early: bool = False) -> Counts:
    """Flagged words: 16 bytes are stored and loaded as a whole."""
    block = 128
    programs -= programs % (world.size - 1)
    box = pkt.zeros(programs, 2, block, 4, dtype=torch.int32)

    def launch(first: int, stale: torch.Tensor) -> None:
        flagged_kernel[(programs,)](box, stale, first, rounds, world.device, early, block, launch_cooperative_grid=True)

    return _count(world, launch, programs, rounds, launches, each=1)


# -- from all ranks to all ranks ---------------------------------------------------------------------------------------
@triton.jit(do_not_specialize=["first", "rounds"])
def all_to_all_kernel(
    box,  # int32 (2, size, programs, BLOCK) on every rank
    flags,  # int32 (programs,) or (2,) on every rank
    stale_ptr,  # int32 (programs,) of this rank
    first,
    rounds,
    world,
    SYNC: tl.constexpr,  # "signal_all", "barrier", "world_barrier"
    BLOCK: tl.constexpr,
):
    """Store to all, synchronise, read all ranks' stores. With two ranks this is store buffering, where each must see
    the other's store. After a world barrier a program reads the stores of another program index."""
    pid = tl.program_id(0)
    n = tl.num_programs(0)
    rank = tl.cast(world.rank, tl.int32)
    offs = tl.arange(0, BLOCK)
    stale = 0
    for i in range(first, first + rounds):
        half = box + (i & 1) * world.size * n * BLOCK
        for d in tl.static_range(1, world.size + 1):
            at = half + (rank * n + pid) * BLOCK + offs
            pl.store(at, _value(i, rank, pid, offs), (rank + d) % world.size, world)
        source = pid
        if SYNC == "signal_all":
            pl.signal_all(flags + pid, world)
            pl.wait(flags + pid, (i + 1) * world.size, world)
        elif SYNC == "barrier":
            pl.barrier(flags + pid, world)
        else:
            pl.world_barrier(flags, world)
            source = (pid + i % n) % n
        for r in tl.static_range(world.size):
            found = tl.load(half + (r * n + source) * BLOCK + offs)
            wrong = tl.sum((found != _value(i, r, source, offs)).to(tl.int32), 0)
            stale += (wrong > 0).to(tl.int32)
    tl.store(stale_ptr + pid, stale)


def all_to_all(world: Any, programs: int, rounds: int, launches: int = 2, *, sync: str) -> Counts:
    """Store buffering and broadcast."""
    block = 128
    box = pkt.zeros(2, world.size, programs, block, dtype=torch.int32)
    flags = pkt.signals(2 if sync == "world_barrier" else programs)

    def launch(first: int, stale: torch.Tensor) -> None:
        all_to_all_kernel[(programs,)](
            box, flags, stale, first, rounds, world.device, sync, block, launch_cooperative_grid=True
        )

    return _count(world, launch, programs, rounds, launches, each=world.size)


# -- store buffering decided by one atomic -----------------------------------------------------------------------------
@triton.jit(do_not_specialize=["first", "rounds"])
def tickets_kernel(
    box,  # int32 (programs, SLOTS, BLOCK) on every rank; program p receives in box p
    tickets,  # int32 (programs, SLOTS) on every rank; two partners use those of the lower rank
    bar,  # int32 (2,) on every rank
    stale_ptr,  # int32 (programs,) of this rank
    seen_ptr,  # int32 (programs,) of this rank: number of rounds in which it was last
    first,
    rounds,  # a multiple of SLOTS
    world,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Two partners each write to the other and then take a ticket, with acquire and release. The last one must see
    the other's message, and one of them is last."""
    pid = tl.program_id(0)
    rank = tl.cast(world.rank, tl.int32)
    to, partner = _partner(pid, rank, world)
    home, keeper = tl.minimum(rank, to), tl.where(rank < to, pid, partner)
    offs = tl.arange(0, BLOCK)
    stale = 0
    seen = 0
    for i in range(first, first + rounds):
        slot = i % SLOTS
        pl.store(box + (partner * SLOTS + slot) * BLOCK + offs, _value(i, rank, pid, offs), to, world)
        before = pl.atomic_add(tickets + keeper * SLOTS + slot, 1, home, world)
        if (before & 1) == 1:
            tl.debug_barrier()  # one thread does the atomic, all threads do the loads
            found = tl.load(box + (pid * SLOTS + slot) * BLOCK + offs)
            wrong = tl.sum((found != _value(i, to, partner, offs)).to(tl.int32), 0)
            stale += (wrong > 0).to(tl.int32)
            seen += 1
        if slot == SLOTS - 1:
            pl.world_barrier(bar, world)  # before overwrite; a partner has another program index, so all programs meet
    tl.store(stale_ptr + pid, stale)
    tl.store(seen_ptr + pid, seen)


def tickets(world: Any, programs: int, rounds: int, launches: int = 2) -> Counts:
    """Store buffering with acquire-release atomics. In every round one message of each pair must be seen."""
    slots, block = 4, 128
    rounds = max(slots, rounds - rounds % slots)
    programs -= programs % (world.size - 1)
    box, counters = pkt.zeros(programs, slots, block, dtype=torch.int32), pkt.zeros(programs, slots, dtype=torch.int32)
    bar = pkt.signals(2)
    seen = torch.full((launches, programs), -1, dtype=torch.int32, device=world.torch_device)

    def launch(first: int, stale: torch.Tensor) -> None:
        tickets_kernel[(programs,)](
            box, counters, bar, stale, seen[first // rounds], first, rounds, world.device, slots, block,
            launch_cooperative_grid=True,
        )  # fmt: skip

    counts = _count(world, launch, programs, rounds, launches, each=1)
    all_seen = sum(world.all_gather_object(int(seen.sum())))
    assert all_seen == programs * rounds * launches * world.size // 2, "in each round one of two comes last"
    return Counts(int(seen.sum()), counts.stale)


# -- through a third rank ----------------------------------------------------------------------------------------------
@triton.jit(do_not_specialize=["first", "rounds"])
def relay_kernel(
    box,  # int32 (programs, BLOCK) on every rank
    flags,  # int32 (2, programs) on every rank: signals of the writer; signals of the messenger
    bar,  # int32 (programs,) on every rank
    stale_ptr,  # int32 (programs,) of this rank
    first,
    rounds,
    world,
    BLOCK: tl.constexpr,
):
    """A writes to C and signals B, B signals C: C must see A's stores without A's signal. Each rank is A, B and C."""
    pid = tl.program_id(0)
    n = tl.num_programs(0)
    rank = tl.cast(world.rank, tl.int32)
    following, behind = (rank + 1) % world.size, (rank + 2) % world.size
    writer = (rank + world.size - 2) % world.size
    offs = tl.arange(0, BLOCK)
    stale = 0
    for i in range(first, first + rounds):
        pl.store(box + pid * BLOCK + offs, _value(i, rank, pid, offs), behind, world)
        pl.signal(flags + pid, following, world)
        pl.wait(flags + pid, i + 1, world)
        pl.signal(flags + n + pid, following, world)
        pl.wait(flags + n + pid, i + 1, world)
        found = tl.load(box + pid * BLOCK + offs)
        wrong = tl.sum((found != _value(i, writer, pid, offs)).to(tl.int32), 0)
        stale += (wrong > 0).to(tl.int32)
        pl.barrier(bar + pid, world)  # before overwrite
    tl.store(stale_ptr + pid, stale)


def relay(world: Any, programs: int, rounds: int, launches: int = 2) -> Counts:
    """Causality over three ranks (with two ranks A is C)."""
    block = 128
    box, flags, bar = pkt.zeros(programs, block, dtype=torch.int32), pkt.signals(2 * programs), pkt.signals(programs)

    def launch(first: int, stale: torch.Tensor) -> None:
        relay_kernel[(programs,)](
            box, flags, bar, stale, first, rounds, world.device, block, launch_cooperative_grid=True
        )

    return _count(world, launch, programs, rounds, launches, each=1)


LITMUS: dict[str, Callable[..., Counts]] = {
    "plain stores": functools.partial(pairs, send="store", receive="load"),
    "store-release, load-acquire": functools.partial(pairs, send="release", receive="acquire"),
    "TMA stores": functools.partial(pairs, send="tma", receive="load"),
    "TMA reads after a wait": functools.partial(pairs, send="store", receive="tma"),
    "TMA both ways": functools.partial(pairs, send="tma", receive="tma"),
    "TMA reduce-add": functools.partial(pairs, send="tma add", receive="load"),
    "TMA reduce-add, TMA read": functools.partial(pairs, send="tma add", receive="tma"),
    "atomic adds": functools.partial(pairs, send="atomic add", receive="load"),
    "flagged words": flagged,
    "one fence for all": functools.partial(all_to_all, sync="signal_all"),
    "store buffering, barrier": functools.partial(all_to_all, sync="barrier"),
    "store buffering, world barrier": functools.partial(all_to_all, sync="world_barrier"),
    "store buffering, tickets": tickets,
    "through a third rank": relay,
}
"""Name of a pattern -> fn(world, programs, rounds), which returns this rank's Counts."""

WITHOUT_FENCE = "a relaxed signal behind TMA stores"
WRONG: dict[str, Callable[..., Counts]] = {
    "a signal before its data": functools.partial(pairs, send="store", receive="load", without="order"),
    WITHOUT_FENCE: functools.partial(pairs, send="tma", receive="tma", without="fence", rows=64, cols=64),
    "a flag before its data": functools.partial(flagged, early=True),
}
"""Patterns with a planted mistake, whose messages must be found stale."""
