"""Signals, waits, barriers, fences and epochs of pkt.language in the simulator."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import pkt
import pkt.language as pl
from pkt.simulate.findings import Deadlock
from tests.simulate.helpers import failures, launch, outcome

SEEDS = (0, 1, 2, 3, 4, 6)


def signed(value: int) -> int:
    return (value + 2**31) % 2**32 - 2**31


# -- signal and wait -------------------------------------------------------------------------------------------------


@triton.jit
def signals(flags, found, world):
    right = (world.rank + 1) % world.size
    pl.signal(flags, right, world)
    pl.signal(flags + 1, right, world, value=5)
    pl.signal(flags + 1, right, world, 2)
    pl.signal(flags + 2, right, world, value=40 + world.rank, op="set")
    pl.signal_all(flags + 3, world)
    pl.signal_all(flags + 4, world, value=3)
    pl.signal_all(flags + 5, world, value=9, op="set")
    tl.store(found, pl.wait(flags, 1, world))
    tl.store(found + 1, pl.wait(flags + 1, 7, world))
    tl.store(found + 2, pl.wait(flags + 2, 40, world))
    tl.store(found + 3, pl.wait(flags + 3, world.size, world))
    tl.store(found + 4, pl.wait(flags + 4, 3 * world.size, world))
    tl.store(found + 5, pl.wait(flags + 5, 0, world, cmp="ne"))


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_signals_add_and_set(ranks: int) -> None:
    def main(world: Any) -> None:
        flags, found = pkt.signals(6), torch.zeros(6, dtype=torch.int32)
        signals[(1,)](flags, found, world.device)
        world.barrier()
        left = (world.rank - 1) % ranks
        assert found.tolist() == [1, 7, 40 + left, ranks, 3 * ranks, 9]
        assert flags.tolist() == found.tolist()

    assert failures(main, ranks, SEEDS) == {}


@triton.jit
def runs(x, y, z, flags, nbytes, world):
    """Send half of a run into the right rank's z, and all of it into its y."""
    right = (tl.cast(world.rank, tl.int32) + 1) % world.size
    pl.put(dst=z + 1, src=x, nbytes=nbytes // 2, peer=right, world=world, BLOCK=16)
    pl.fence(world=world)
    pl.put_signal(flags, right, world, 7, dst=y + 2, src=x + 1, nbytes=nbytes, BLOCK=16)
    pl.put_signal(flags + 1, right, world, dst=y + 2, src=x + 1, nbytes=0)
    pl.wait(flags, 7, world)
    pl.quiet(world)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int8])
@pytest.mark.parametrize(("ranks", "node_size"), [(1, 1), (3, 3), (4, 2)])
def test_runs_of_bytes_reach_ranks_of_any_node(ranks: int, node_size: int, dtype: torch.dtype) -> None:
    def main(world: Any) -> None:
        x, y, z = (pkt.zeros(64, dtype=dtype) for _ in range(3))
        x.copy_(torch.arange(64) + 10 * world.rank)
        flags, left = pkt.signals(2, unwaited=True), (world.rank - 1) % ranks
        world.barrier()
        runs[(1,)](x, y, z, flags, 40 * dtype.itemsize, world.device)
        world.barrier()
        sent = [i + 10 * left for i in range(64)]
        assert y.tolist() == [0, 0, *sent[1:41], *[0] * 22]
        assert z.tolist() == [0, *sent[:20], *[0] * 43]
        assert flags.tolist() == [7, 1]

    assert failures(main, ranks, SEEDS[:3], node_size=node_size) == {}


@triton.jit
def publish(x, y, flags, world, N: tl.constexpr):
    o = tl.arange(0, N)
    right = (world.rank + 1) % world.size
    pl.store(x + o, o + 10 * world.rank, right, world)
    pl.signal(flags, right, world)
    pl.wait(flags, 1, world)
    tl.store(y + o, tl.load(x + o))


@triton.jit
def publish_all(x, y, flags, world, N: tl.constexpr):
    o = tl.arange(0, N)
    for r in range(world.size):
        pl.store(x + world.rank * N + o, o + 10 * world.rank, r, world)
    pl.signal_all(flags, world)
    pl.wait(flags, world.size, world)
    for r in range(world.size):
        tl.store(y + r * N + o, tl.load(x + r * N + o))


def test_stores_before_a_signal_are_visible_after_the_wait() -> None:
    def main(world: Any) -> None:
        x, y, flags = pkt.empty(8, dtype=torch.int32), torch.zeros(8, dtype=torch.int32), pkt.signals(1)
        publish[(1,)](x, y, flags, world.device, 8)
        assert y.tolist() == [i + 10 * ((world.rank - 1) % world.size) for i in range(8)]

    def everyone(world: Any) -> None:
        x, y = pkt.empty((world.size, 8), dtype=torch.int32), torch.zeros(world.size, 8, dtype=torch.int32)
        flags = pkt.signals(1)
        publish_all[(1,)](x, y, flags, world.device, 8)
        assert y.tolist() == [[i + 10 * r for i in range(8)] for r in range(world.size)]

    for fn in (main, everyone):
        assert failures(fn, 3) == {}
        assert failures(fn, 3, races=False) == {}


@triton.jit
def compare(flags, found, want, world, CMP: tl.constexpr):
    tl.store(found, pl.test(flags, want, world, CMP).to(tl.int32))


@triton.jit
def wait_once(flags, want, world, CMP: tl.constexpr):
    pl.wait(flags, want, world, CMP)


SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<", "eq": "==", "ne": "!="}
# around zero, and on both sides of the wraps of int32 and uint32
VALUES = [(5, 5), (4, 5), (6, 5), (2**31 - 1, 2**31 + 2), (2**31 + 2, 2**31 - 1), (2**32 - 2, 1), (1, 2**32 - 2)]


@pytest.mark.parametrize("cmp", SIGNS)
def test_comparisons_hold_across_the_wrap_of_the_counter(cmp: str) -> None:
    def main(world: Any) -> None:
        flags, found = pkt.signals(1), torch.zeros(1, dtype=torch.int32)
        for value, want in VALUES:
            flags[0] = signed(value)
            holds = getattr(operator, cmp)(signed(value - want), 0)
            compare[(1,)](flags, found, signed(want), world.device, cmp)
            assert bool(found) is holds, (value, want)
            if holds:
                wait_once[(1,)](flags, signed(want), world.device, cmp)

    launch(main, 1)

    def never(world: Any, value: int, want: int) -> None:
        flags = pkt.signals(1)
        flags[0] = signed(value)
        wait_once[(1,)](flags, signed(want), world.device, cmp)

    for value, want in VALUES:
        if not getattr(operator, cmp)(signed(value - want), 0):
            error = outcome(never, 1, args=(value, want)).error
            assert isinstance(error, Deadlock), (value, want)
            assert f"wanted {SIGNS[cmp]} {signed(want)}, found {signed(value)}" in str(error)


@triton.jit
def wrapping_handshake(flags, found, start, rounds, world):
    """Advance counters through the wrap, one step a round."""
    other = (world.rank + 1) % world.size
    for i in range(rounds):
        pl.signal(flags, other, world)
        tl.store(found + i, pl.wait(flags, start + i + 1, world) - start)


@pytest.mark.parametrize("start", [2**31 - 3, 2**32 - 3])
def test_counters_run_through_the_wrap(start: int) -> None:
    def main(world: Any) -> None:
        flags, found = pkt.signals(1), torch.zeros(6, dtype=torch.int32)
        flags[0] = signed(start)
        world.barrier()
        wrapping_handshake[(1,)](flags, found, signed(start), 6, world.device)
        for i, ahead in enumerate(found.tolist()):
            assert ahead in (i + 1, i + 2)  # the other rank may be one round ahead
        assert flags[0] == signed(start + 6)

    assert failures(main, 2, SEEDS) == {}


@triton.jit
def poll(x, flags, out, world):
    if world.rank == 0:
        pl.store(x, 7, 1, world)
        pl.signal(flags, 1, world)
    else:
        polls = 0
        while not pl.test(flags, 1, world):
            polls += 1
        tl.store(out, tl.load(x))  # a true pl.test makes published data visible, as pl.wait does
        tl.store(out + 1, polls)


def test_pl_test_does_not_wait() -> None:
    seen = set()

    def main(world: Any) -> None:
        x, flags, out = pkt.zeros(1, dtype=torch.int32), pkt.signals(1), torch.zeros(2, dtype=torch.int32)
        poll[(1,)](x, flags, out, world.device)
        if world.rank == 1:
            assert out[0] == 7
            seen.add(out[1].item() > 0)

    assert failures(main, 2) == {}
    assert seen == {True, False}  # some schedules make it poll, some do not


# -- barriers --------------------------------------------------------------------------------------------------------


@triton.jit
def barrier_rounds(x, bad, flags, rounds, world):
    """In each round a program writes its rank's cell on every rank, and then must see all cells of its index."""
    pid = tl.program_id(0)
    cells = x + pid * world.size
    for i in range(rounds):
        for r in range(world.size):
            pl.store(cells + world.rank, i + 1, r, world)
        pl.barrier(flags + pid, world)
        for r in range(world.size):
            if tl.load(cells + r) != i + 1:
                tl.atomic_add(bad, 1)
        pl.barrier(flags + pid, world)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_barrier_joins_the_programs_of_one_index(ranks: int) -> None:
    def main(world: Any) -> None:
        x, flags = pkt.zeros((3, world.size), dtype=torch.int32), pkt.signals(3)
        bad = torch.zeros(1, dtype=torch.int32)
        for _ in range(2):  # five rounds each: the counter's top bit flips ten times
            barrier_rounds[(3,)](x, bad, flags, 5, world.device)
            assert bad.item() == 0
            world.barrier()
        assert (flags.plain() & 0x7FFFFFFF == 0).all()  # only the top bit is left

    assert failures(main, ranks, (0, 1, 2, 3)) == {}


@triton.jit
def grid_barrier_rounds(x, bad, flags, rounds, world):
    pid, n = tl.program_id(0), tl.num_programs(0)
    other = (world.rank + 1) % world.size
    theirs = x + 8 * (world.rank + 1)
    for i in range(rounds):
        tl.store(x + pid, i + 1)
        pl.store(theirs + pid, i + 1, other, world)
        pl.grid_barrier(flags, world)
        for p in range(n):
            if tl.load(x + p) != i + 1:
                tl.atomic_add(bad, 1)
            if pl.load(theirs + p, other, world) != i + 1:
                tl.atomic_add(bad, 1)
        pl.grid_barrier(flags, world)


def test_grid_barrier_joins_one_ranks_programs() -> None:
    def main(world: Any) -> None:
        n = 3 + world.rank
        x, flags = pkt.zeros((world.size + 1, 8), dtype=torch.int32), pkt.signals(1)
        bad = torch.zeros(1, dtype=torch.int32)
        for _ in range(2):
            grid_barrier_rounds[(n,)](x, bad, flags, 3, world.device)
        assert bad.item() == 0
        assert flags[0] & 0x7FFFFFFF == 0

    assert failures(main, 2, (0, 1, 2, 3)) == {}


@triton.jit
def world_barrier_rounds(x, bad, total, flags, first, rounds, world):
    me = first + tl.program_id(0) + tl.num_programs(0) * tl.program_id(1)
    for i in range(rounds):
        for r in range(world.size):
            pl.store(x + me, i + 1, r, world)
        pl.world_barrier(flags, world)
        for p in range(total):
            if tl.load(x + p) != i + 1:
                tl.atomic_add(bad, 1)
        pl.world_barrier(flags, world)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_world_barrier_joins_all_programs(ranks: int) -> None:
    """Grids differ between ranks: rank r has 2 * (r + 1) programs."""

    def main(world: Any) -> None:
        sizes = [2 * (r + 1) for r in range(world.size)]
        x, flags = pkt.zeros(sum(sizes), dtype=torch.int32), pkt.signals(2)
        bad = torch.zeros(1, dtype=torch.int32)
        for _ in range(2):
            world_barrier_rounds[(2, world.rank + 1)](
                x, bad, sum(sizes), flags, sum(sizes[: world.rank]), 3, world.device
            )
        assert bad.item() == 0

    assert failures(main, ranks, (0, 1, 2, 3)) == {}


# -- fences ----------------------------------------------------------------------------------------------------------


@triton.jit
def message(x, out, flag, world, FENCE: tl.constexpr):
    """Pass a message by hand: a relaxed flag, with or without a fence on both sides."""
    o = tl.arange(0, 16)
    if world.rank == 0:
        pl.store(x + o, o + 1, 1, world)
        if FENCE == "fence":
            pl.fence()
        elif FENCE == "quiet":
            pl.quiet()
        pl.atomic_xchg(flag, 1, 1, world, sem="relaxed")
    else:
        while pl.atomic_add(flag, 0, 1, world, sem="relaxed") != 1:
            pass
        if FENCE != "none":
            pl.fence()
        tl.store(out + o, tl.load(x + o))


def message_main(world: Any, kind: str) -> None:
    x, flag = pkt.zeros(16, dtype=torch.int32), pkt.zeros(1, dtype=torch.int32)
    out = torch.zeros(16, dtype=torch.int32)
    message[(1,)](x, out, flag, world.device, kind)
    if world.rank == 1:
        assert out.tolist() == list(range(1, 17)), "stale"


@pytest.mark.parametrize("kind", ["fence", "quiet"])
def test_fence_and_quiet_order_relaxed_flags(kind: str) -> None:
    assert failures(message_main, 2, args=(kind,)) == {}
    assert failures(message_main, 2, args=(kind,), races=False) == {}


def test_a_message_without_fences_is_stale() -> None:
    stale = failures(message_main, 2, args=("none",), races=False)
    assert sum("stale" in str(e) for e in stale.values()) >= 6  # of 50 schedules: not a rare case
    raced = failures(message_main, 2, args=("none",))
    assert any(isinstance(e, pkt.DataRace) for e in raced.values())


@triton.jit
def tiles_message(x, out, flag, world, QUIET: tl.constexpr):
    """Pass a message by a TMA store. A fence does not wait for that store, quiet does."""
    if world.rank == 0:
        desc = tl.make_tensor_descriptor(pl.peer(x, 1, world), [16, 16], [16, 1], [16, 16])
        desc.store([0, 0], tl.full((16, 16), 3, tl.int32))
        if QUIET:
            pl.quiet()
        else:
            pl.fence()
        pl.atomic_xchg(flag, 1, 1, world, sem="relaxed")
    else:
        while pl.atomic_add(flag, 0, 1, world, sem="relaxed") != 1:
            pass
        pl.fence()
        o = tl.arange(0, 256)
        tl.store(out + o, tl.load(x + o))


def tiles_main(world: Any, quiet: bool) -> None:
    x, flag = pkt.zeros((16, 16), dtype=torch.int32), pkt.zeros(1, dtype=torch.int32)
    out = torch.zeros(256, dtype=torch.int32)
    tiles_message[(1,)](x, out, flag, world.device, quiet)
    if world.rank == 1:
        assert (out == 3).all(), "stale"


def test_quiet_waits_for_tma_stores_and_fence_does_not() -> None:
    assert failures(tiles_main, 2, args=(True,)) == {}
    assert failures(tiles_main, 2, args=(True,), races=False) == {}
    stale = failures(tiles_main, 2, args=(False,), races=False)
    assert sum("stale" in str(e) for e in stale.values()) >= 6


# -- epochs ----------------------------------------------------------------------------------------------------------


@triton.jit
def epochs(flags, seen, world):
    pid = tl.program_id(0) + tl.num_programs(0) * tl.program_id(1)
    e = pl.epoch(flags, world)
    tl.store(seen + pid, e)
    pl.signal(flags, (world.rank + 1) % world.size, world)


@triton.jit
def epoch_waits(x, bad, flags, world):
    """All-to-all of one number a launch, without resets. Each sender has a counter: the sum of two senders' signals
    would not say which of them is one launch ahead."""
    e = pl.epoch(flags, world)
    parity = (e % 2 + 2) % 2 * world.size  # fast ranks may be one launch ahead
    for r in range(world.size):
        pl.store(x + parity + world.rank, e, r, world)
        pl.signal(flags + world.rank, r, world)
    for r in range(world.size):
        pl.wait(flags + r, e, world)
        if tl.load(x + parity + r) != e:
            tl.atomic_add(bad, 1)


@pytest.mark.parametrize("start", [0, 2**31 - 2, 2**32 - 3])
def test_epochs_count_launches(start: int) -> None:
    """Grids of every shape count alike, also through the wrap of the 32-bit count."""

    def main(world: Any) -> None:
        flags, seen = pkt.signals(1), torch.zeros(12, dtype=torch.int32)
        words = world.heap.words_of(flags._allocation)
        words[1] = signed(start)  # the number of epochs is the high half of the first 64 bits
        world.barrier()
        for i, grid in enumerate([(3,), (5, 2), (1,), (2, 3), (4,)]):
            seen.fill_(-77)
            epochs[grid](flags, seen, world.device)
            n = grid[0] * (grid[1] if len(grid) > 1 else 1)
            assert seen[:n].tolist() == [signed(start + i + 1)] * n
        assert words[0] == 0
        assert words[1] == signed(start + 5)

    for seed in SEEDS:
        assert outcome(main, 2, seed).error is None


@pytest.mark.parametrize("start", [0, 2**32 - 3])
def test_waits_by_epoch_need_no_reset(start: int) -> None:
    def main(world: Any) -> None:
        x, flags = pkt.zeros((2, world.size), dtype=torch.int32), pkt.signals(world.size)
        bad = torch.zeros(1, dtype=torch.int32)
        world.heap.words_of(flags._allocation)[1] = signed(start)
        flags.fill_(signed(start))
        world.barrier()
        for _ in range(6):
            epoch_waits[(1,)](x, bad, flags, world.device)
        assert bad.item() == 0
        world.barrier()
        assert flags.tolist() == [signed(start + 6)] * world.size

    assert failures(main, 3, range(12)) == {}


@triton.jit
def two_rounds_of_flags(a, b, seen, world):
    tl.store(seen, pl.epoch(a, world))
    tl.store(seen + 1, pl.epoch(b, world))


def test_two_sets_of_counters_have_separate_epochs() -> None:
    def main(world: Any) -> None:
        a, b, seen = pkt.signals(1), pkt.signals(1), torch.zeros(2, dtype=torch.int32)
        other = torch.zeros(2, dtype=torch.int32)
        two_rounds_of_flags[(1,)](a, b, seen, world.device)
        two_rounds_of_flags[(1,)](b, pkt.signals(1), other, world.device)
        assert seen.tolist() == [1, 1]
        assert other.tolist() == [2, 1]

    launch(main, 2)


# -- data that carries its flag --------------------------------------------------------------------------------------


@triton.jit
def flagged_to_the_next(slots, flags, x, out, world, N: tl.constexpr):
    launch = pl.epoch(flags, world)
    o = tl.arange(0, N)
    right = (world.rank + 1) % world.size
    words = slots + ((launch & 1) * N + o) * 4
    values = (tl.load(x + o), tl.load(x + N + o), tl.load(x + 2 * N + o))
    pl.put_flagged(words, values, launch, right, world, mask=o < N - 3)
    a, b, c = pl.take_flagged(words, launch, world, mask=o < N - 3)
    tl.store(out + o, a)
    tl.store(out + N + o, b)
    tl.store(out + 2 * N + o, c)


@triton.jit
def flagged_by_all(slots, flags, x, out, world, N: tl.constexpr):
    launch = pl.epoch(flags, world)
    o = tl.arange(0, N)
    half = slots + (launch & 1) * world.size * N * 4
    values = (tl.load(x + o), tl.load(x + N + o), tl.load(x + 2 * N + o))
    for r in tl.static_range(world.size):
        pl.put_flagged(half + (world.rank * N + o) * 4, values, launch, r, world, mask=o < N - 3)
    found = pl.take_flagged_all(half + 4 * o, 4 * N, launch, world, mask=o < N - 3)
    for r in tl.static_range(world.size):
        for j in tl.static_range(3):
            tl.store(out + (3 * r + j) * N + o, found[r][j])


@triton.jit
def flagged_where_an_atomic_was(slots, out, world):
    o = tl.arange(0, 1)
    pl.atomic_add(slots, 5, world.rank, world)
    pl.put_flagged(slots + o, (o + 1, o + 2, o + 3), 7, world.rank, world)
    a, b, c = pl.take_flagged(slots + o, 7, world)
    tl.store(out + o, a + b + c)


def test_words_may_be_put_where_an_atomic_was() -> None:
    """As in memory that is used again: the atomic has left its program's clock there, and the words leave none."""

    def main(world: Any) -> None:
        slots, out = pkt.zeros(1, 4, dtype=torch.int32), torch.empty(1, dtype=torch.int32)
        flagged_where_an_atomic_was[(1,)](slots, out, world.device)
        assert out.item() == 6

    launch(main, 1)


def filled(n: int, turn: int, rank: int) -> list[list[int]]:
    """Three rows of n numbers; the last three words are masked."""
    return [[1000 * turn + 100 * rank + n * j + i if i < n - 3 else 0 for i in range(n)] for j in range(3)]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_take_flagged_all_returns_every_ranks_words(ranks: int) -> None:
    n = 16

    def main(world: Any) -> None:
        slots, flags = pkt.zeros(2 * world.size * n, 4, dtype=torch.int32), pkt.signals(1)
        x, out = torch.empty(3, n, dtype=torch.int32), torch.empty(world.size, 3, n, dtype=torch.int32)
        for turn in range(3):
            x.copy_(torch.arange(3 * n).view(3, n) + 1000 * turn + 100 * world.rank)
            flagged_by_all[(1,)](slots, flags, x, out, world.device, n)
            assert out.tolist() == [filled(n, turn, r) for r in range(world.size)]

    assert failures(main, ranks, SEEDS) == {}


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_take_flagged_returns_the_words_of_this_launch(ranks: int) -> None:
    """Each rank takes the previous rank's words of this launch, ordered by their flags alone; masked words are 0."""
    n = 16

    def main(world: Any) -> None:
        slots, flags = pkt.zeros(2 * n, 4, dtype=torch.int32), pkt.signals(1)
        x, out = torch.empty(3, n, dtype=torch.int32), torch.empty(3, n, dtype=torch.int32)
        for turn in range(3):
            x.copy_(torch.arange(3 * n).view(3, n) + 1000 * turn + 100 * world.rank)
            flagged_to_the_next[(1,)](slots, flags, x, out, world.device, n)
            world.barrier()  # otherwise a rank could be two launches ahead of the rank after the next
            assert out.tolist() == filled(n, turn, (world.rank - 1) % world.size)

    assert failures(main, ranks, SEEDS) == {}
