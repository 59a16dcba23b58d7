"""The race detector and the memory model: each wrong program is found, its right twin never is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import pkt
import pkt.language as pl
from pkt.errors import DataRace
from tests.simulate.helpers import failures, outcome

SEEDS = range(50)


def line_of(kernel: Any, text: str) -> str:
    """`file.py:12`, where `text` is in the kernel's source."""
    at = next(i for i, line in enumerate(kernel.raw_src) if text in line)
    return f"{kernel.fn.__code__.co_filename.rsplit('/', 1)[1]}:{kernel.starting_line_number + at}"


def right(fn: Callable, ranks: int = 2, args: tuple = (), seeds: Any = SEEDS) -> None:
    """No finding and no wrong result in any schedule, and none without the race detector."""
    assert failures(fn, ranks, seeds, args=args) == {}
    assert failures(fn, ranks, seeds, args=args, races=False) == {}


def raced(fn: Callable, ranks: int = 2, args: tuple = (), seeds: Any = range(8)) -> DataRace:
    """A race that some of the first schedules shows; what the values happen to be does not matter."""
    found = [f for s in seeds for f in outcome(fn, ranks, s, args).findings if isinstance(f, DataRace)]
    assert found
    return found[0]


# -- waits and signals that are missing ------------------------------------------------------------------------------


@triton.jit
def send(x, out, flags, world, HOW: tl.constexpr, N: tl.constexpr):
    o = tl.arange(0, N)
    other = (world.rank + 1) % world.size
    pl.store(x + o, o + 100, other, world)
    if HOW == "right":
        pl.signal(flags, other, world)
        pl.wait(flags, 1, world)
    elif HOW == "no wait":
        pl.signal(flags, other, world)
    elif HOW == "no signal":
        pl.wait(flags, 0, world)
    elif HOW == "relaxed signal":
        pl.atomic_add(flags, 1, other, world, sem="relaxed")
        pl.wait(flags, 1, world)
    elif HOW == "relaxed wait":
        pl.signal(flags, other, world)
        while tl.atomic_add(flags, 0, sem="relaxed", scope="sys") < 1:
            pass
    elif HOW == "gpu scope":
        pl.signal(flags, other, world)
        while tl.atomic_add(flags, 0, sem="acquire", scope="gpu") < 1:
            pass
    elif HOW == "gpu scope of the release":
        tl.atomic_add(pl.peer(flags, other, world), 1, sem="release", scope="gpu")
        pl.wait(flags, 1, world)
    elif HOW == "signal first":
        pl.signal(flags, other, world)
        pl.store(x + N + o, 1, other, world)
        pl.wait(flags, 1, world)
        tl.store(out + o, tl.load(x + N + o))
    elif HOW == "raw":
        tl.debug_barrier()
        tl.atomic_add(pl.peer(flags, other, world), 1, sem="release", scope="sys")
        while tl.atomic_add(flags, 0, sem="acquire", scope="sys") < 1:
            pass
    elif HOW == "raw, default order":
        tl.atomic_add(pl.peer(flags, other, world), 1, scope="sys")
        while tl.atomic_cas(flags, 1, 1, scope="sys") != 1:
            pass
    tl.store(out + o, tl.load(x + o))


def send_main(world: Any, how: str) -> None:
    n = 8
    x, flags = pkt.zeros(2 * n, dtype=torch.int32), pkt.signals(1)
    out = torch.zeros(n, dtype=torch.int32)
    send[(1,)](x, out, flags, world.device, how, n)
    assert out.tolist() == list(range(100, 100 + n)), "wrong values"
    world.barrier()


@pytest.mark.parametrize("how", ["right", "raw", "raw, default order"])
def test_a_message_with_its_signal(how: str) -> None:
    right(send_main, args=(how,))


MISSING = ["no wait", "relaxed signal", "relaxed wait", "gpu scope", "gpu scope of the release", "signal first"]


@pytest.mark.parametrize("how", [*MISSING, "no signal"])
def test_a_message_without(how: str) -> None:
    race = raced(send_main, args=(how,))
    told = str(race)
    assert "data race: load of rank" in told or "data race: store of rank" in told
    assert "x[" in told
    assert "is not ordered after: " in told
    assert "send program 0" in told
    assert "put a signal after the first and a wait before the second" in told
    assert race.first.rank != race.second.rank
    load = line_of(send, "tl.load(x + N + o)" if how == "signal first" else "tl.store(out + o, tl.load(x + o))")
    store = line_of(send, "pl.store(x + N + o" if how == "signal first" else "pl.store(x + o")
    assert {race.first.site, race.second.site} == {load, store}


@pytest.mark.parametrize("how", ["no wait", "no signal", "relaxed signal"])
def test_late_stores_are_real(how: str) -> None:
    """With no race detector: in some schedule the value itself is wrong. A missing acquire or a scope too small cannot
    be seen this way (loads are never early here, a release of any scope is seen by all): those the detector knows."""
    found = failures(send_main, 2, SEEDS, args=(how,), races=False)
    assert any("wrong values" in str(e) for e in found.values())


def test_stores_arrive_late_and_out_of_order() -> None:
    """Two stores and no order: all four outcomes are seen."""
    seen = set()

    @triton.jit
    def two(x, out, world):
        if world.rank == 0:
            pl.store(x, 1, 1, world)
            pl.store(x + 64, 1, 1, world)
            for i in range(8):
                tl.atomic_add(x + 128, 1, sem="relaxed")
        else:
            for i in range(4):
                tl.atomic_add(x + 128, 1, sem="relaxed")
            tl.store(out, tl.load(x))
            tl.store(out + 1, tl.load(x + 64))

    def main(world: Any) -> None:
        x, out = pkt.zeros(192, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
        two[(1,)](x, out, world.device)
        if world.rank == 1:
            seen.add(tuple(out.tolist()))

    failures(main, 2, range(120), races=False)
    assert seen == {(0, 0), (0, 1), (1, 0), (1, 1)}


def test_a_program_sees_its_own_stores() -> None:
    @triton.jit
    def own(x, bad, world):
        o = tl.arange(0, 8)
        other = (world.rank + 1) % world.size
        mine = x + 8 * world.rank
        for i in range(4):
            pl.store(mine + o, o + i, other, world)
            pl.store(mine + 2, -i, other, world)
            v = pl.load(mine + o, other, world)
            tl.atomic_add(bad, tl.sum((v != tl.where(o == 2, -i, o + i)).to(tl.int32)))

    def main(world: Any) -> None:
        x, bad = pkt.zeros(16, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        own[(1,)](x, bad, world.device)
        assert bad.item() == 0

    right(main)


# -- the next launch -------------------------------------------------------------------------------------------------


@triton.jit
def gather(x, inbox, out, flags, world, HOW: tl.constexpr):
    """All-gather of one number, launched again and again (FAILURES: a fast rank's next launch overwrites what a slow
    one still reads)."""
    epoch = pl.epoch(flags, world)
    if HOW == "entry barrier":
        pl.barrier(flags + world.size, world)
    cells = inbox
    if HOW == "double buffer":
        cells += epoch % 2 * world.size
    for r in range(world.size):
        pl.store(cells + world.rank, tl.load(x), r, world)
        pl.signal(flags + world.rank, r, world)
    for r in range(world.size):
        want = 1 if HOW == "constant" else epoch
        pl.wait(flags + r, want, world)
        tl.store(out + r, tl.load(cells + r))


def gather_main(world: Any, how: str) -> None:
    x, inbox = torch.zeros(1, dtype=torch.int32), pkt.zeros(2 * world.size, dtype=torch.int32)
    flags, out = pkt.signals(world.size + 1), torch.zeros(world.size, dtype=torch.int32)
    for launch in range(3):
        x.fill_(launch * 100 + world.rank)
        gather[(1,)](x, inbox, out, flags, world.device, how)
        assert out.tolist() == [launch * 100 + r for r in range(world.size)], "wrong values"
    world.barrier()


@pytest.mark.parametrize("how", ["double buffer", "entry barrier"])
def test_relaunches_that_cannot_overtake(how: str) -> None:
    right(gather_main, 3, args=(how,), seeds=range(30))


def test_a_fast_ranks_next_launch_overtakes() -> None:
    race = raced(gather_main, 3, args=("none",), seeds=SEEDS)
    assert "inbox[" in str(race)
    assert "store of rank" in str(race)
    wrong = failures(gather_main, 3, SEEDS, args=("none",), races=False)
    assert any("wrong values" in str(e) for e in wrong.values())


def test_waiting_for_a_constant_is_satisfied_by_the_last_launch() -> None:
    race = raced(gather_main, 3, args=("constant",), seeds=SEEDS)
    notes = [
        note
        for s in SEEDS
        for f in outcome(gather_main, 3, s, ("constant",)).findings
        for note in getattr(f, "__notes__", ())
    ]
    assert isinstance(race, DataRace)
    assert any(
        "stale flag: rank" in n
        and "gather program 0 waits on flags[" in n
        and f"at {line_of(gather, 'pl.wait(flags + r')}" in n
        and "wanted >= 1" in n
        and "that value was written in launch" in n
        and "wait for epoch(flags, world) * arrivals, not for a constant" in n
        for n in notes
    )
    wrong = failures(gather_main, 3, SEEDS, args=("constant",), races=False)
    assert any("wrong values" in str(e) for e in wrong.values())


def test_launches_of_one_rank_are_in_order() -> None:
    @triton.jit
    def add_one(x, N: tl.constexpr):
        o = tl.program_id(0) * N + tl.arange(0, N)
        tl.store(x + o, tl.load(x + o) + 1)

    @triton.jit
    def reverse(x, N: tl.constexpr, TOTAL: tl.constexpr):
        o = tl.program_id(0) * N + tl.arange(0, N)
        tl.store(x + TOTAL + o, tl.load(x + TOTAL - 1 - o))

    def main(world: Any) -> None:
        x = pkt.zeros(64, dtype=torch.int32)
        for _ in range(3):
            add_one[(4,)](x, 8)
        reverse[(4,)](x, 8, 32)
        assert (x == 3).all()

    right(main)


# -- bytes, granules and regions -------------------------------------------------------------------------------------


@triton.jit
def neighbours(x, world, STEP: tl.constexpr):
    """Every rank writes its own bytes of one 16-byte granule of rank 0's copy."""
    pl.store(x + world.rank * STEP, world.rank + 1, 0, world)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32], ids=str)
def test_neighbouring_bytes_are_no_race(dtype: torch.dtype) -> None:
    def main(world: Any, step: int) -> None:
        x = pkt.zeros(16, dtype=dtype)
        neighbours[(1,)](x, world.device, step)
        world.barrier()
        if world.rank == 0:
            assert x[:4].tolist() == ([1, 2, 3, 4] if step else x[:4].tolist())

    right(main, 4, args=(1,))
    race = raced(main, 4, args=(0,))
    assert race.first.tensor == race.second.tensor == "rank 0's x[0]"


@triton.jit
def rows_and_columns(x, world, N: tl.constexpr, COLUMNS: tl.constexpr):
    o = tl.arange(0, N)
    me = tl.cast(world.rank, tl.int32)
    at = o * N + me if COLUMNS else me * N + o
    pl.store(x + at, me, 0, world)


def test_interleaved_columns_are_no_race() -> None:
    def main(world: Any, columns: bool) -> None:
        x = pkt.zeros((4, 4), dtype=torch.int32)
        rows_and_columns[(1,)](x, world.device, 4, columns)

    right(main, 4, args=(True,))
    right(main, 4, args=(False,))


def test_readers_alone_are_no_race() -> None:
    @triton.jit
    def read(x, out, world):
        o = tl.arange(0, 32)
        tl.store(out + o, pl.load(x + o, (world.rank + 1) % world.size, world))

    def main(world: Any) -> None:
        x, out = pkt.ones(32), torch.zeros(32)
        read[(3,)](x, out, world.device)
        assert (out == 1).all()

    right(main, 3)


@pytest.mark.parametrize("readers", [1, 3])
def test_a_write_after_several_reads(readers: int) -> None:
    """Every reader is remembered, not only the last one."""

    @triton.jit
    def read_then_write(x, out, flags, wanted, world):
        if world.rank < world.size - 1:
            tl.store(out, pl.load(x, world.size - 1, world))
            pl.signal(flags, world.size - 1, world)
        else:
            pl.wait(flags, wanted, world)
            tl.store(x, 2.0)

    def main(world: Any, wanted: int) -> None:
        x, out, flags = pkt.ones(4), torch.zeros(1), pkt.signals(1)
        read_then_write[(1,)](x, out, flags, wanted, world.device)
        world.barrier()

    right(main, readers + 1, args=(readers,))
    race = raced(main, readers + 1, args=(readers - 1,), seeds=range(30))
    assert race.second.kind in ("load", "store")


@pytest.mark.parametrize("sizes", [(4, 4), (16, 32), (32, 16)])
@pytest.mark.parametrize("awaited", [0, 1])
def test_a_reader_behind_the_last_one_is_remembered(awaited: int, sizes: tuple[int, int]) -> None:
    """In the plain order two ranks read one after the other; the writer waits for one of them, whichever came last."""

    @triton.jit
    def read_both(x, out, flags, awaited, size, world, N: tl.constexpr):
        o = tl.arange(0, N)
        if world.rank < 2:
            tl.store(out + o, pl.load(x + o, 2, world, mask=o < size))
            pl.signal(flags + world.rank, 2, world)
        else:
            pl.wait(flags + awaited, 1, world)
            tl.store(x + o, 2.0)
            pl.wait(flags + 1 - awaited, 1, world)

    def main(world: Any) -> None:
        x, out, flags = pkt.ones(32), torch.zeros(32), pkt.signals(2)
        size = (*sizes, 0)[world.rank]
        read_both[(1,)](x, out, flags, awaited, size, world.device, 32)

    race = raced(main, 3, seeds=[0])
    assert (race.first.rank, race.first.kind, race.second.kind) == (1 - awaited, "load", "store")


def test_atomics_do_not_race_with_each_other_but_with_stores() -> None:
    @triton.jit
    def update(x, world, STORE: tl.constexpr):
        if STORE and world.rank == 0:
            tl.store(x, 1)
        else:
            pl.atomic_add(x, 1, 0, world, sem="relaxed")

    def main(world: Any, store: bool) -> None:
        x = pkt.zeros(1, dtype=torch.int32)
        update[(2,)](x, world.device, store)
        world.barrier()
        assert store or world.rank or x.item() == 2 * world.size

    right(main, 3, args=(False,))
    race = raced(main, 3, args=(True,))
    assert {race.first.kind, race.second.kind} == {"atomic", "store"}


# -- TMA -------------------------------------------------------------------------------------------------------------


@triton.jit
def tile_out(x, out, flags, world, HOW: tl.constexpr):
    """A tile to the neighbour by TMA, and its signal."""
    o = tl.arange(0, 256)
    other = (world.rank + 1) % world.size
    desc = tl.make_tensor_descriptor(pl.peer(x, other, world), [16, 16], [16, 1], [16, 16])
    if HOW == "reduce":
        desc.atomic_add([0, 0], tl.full((16, 16), 5, tl.int32))
    else:
        desc.store([0, 0], tl.full((16, 16), 5, tl.int32))
    if HOW == "no drain":
        tl.debug_barrier()
        tl.atomic_add(pl.peer(flags, other, world), 1, sem="release", scope="sys")
    else:
        pl.signal(flags, other, world)
    pl.wait(flags, 1, world)
    tl.store(out + o, tl.load(x + o))


def tile_out_main(world: Any, how: str) -> None:
    x, flags, out = pkt.zeros((16, 16), dtype=torch.int32), pkt.signals(1), torch.zeros(256, dtype=torch.int32)
    tile_out[(1,)](x, out, flags, world.device, how)
    assert (out == 5).all(), "wrong values"
    world.barrier()


@pytest.mark.parametrize("how", ["store", "reduce"])
def test_a_signal_waits_for_tma_stores(how: str) -> None:
    right(tile_out_main, args=(how,))


def test_the_end_of_a_launch_waits_for_tma_stores() -> None:
    @triton.jit
    def fill(x, world):
        desc = tl.make_tensor_descriptor(pl.peer(x, 0, world), [16, 16], [16, 1], [16, 16])
        if world.rank == 0:
            desc.store([0, 0], tl.full((16, 16), 7, tl.int32))

    @triton.jit
    def read(x, out, world):
        o = tl.arange(0, 256)
        tl.store(out + o, pl.load(x + o, 0, world))

    def main(world: Any) -> None:
        x, out = pkt.zeros((16, 16), dtype=torch.int32), torch.zeros(256, dtype=torch.int32)
        fill[(1,)](x, world.device)
        if world.rank == 0:
            read[(1,)](x, out, world.device)
            assert (out == 7).all()
        world.barrier()
        read[(1,)](x, out, world.device)
        assert (out == 7).all()

    right(main)


def test_a_raw_release_does_not_wait_for_tma_stores() -> None:
    race = raced(tile_out_main, args=("no drain",))
    assert {race.first.kind, race.second.kind} == {"TMA store", "load"}
    wrong = failures(tile_out_main, 2, SEEDS, args=("no drain",), races=False)
    assert any("wrong values" in str(e) for e in wrong.values())


@triton.jit
def tile_in(x, out, flags, world, HOW: tl.constexpr):
    """Plain stores to the neighbour, which loads them by TMA."""
    o = tl.arange(0, 256)
    other = (world.rank + 1) % world.size
    pl.store(x + o, 6, other, world)
    pl.signal(flags, other, world)
    if HOW == "wait":
        pl.wait(flags, 1, world)
    elif HOW == "test":
        while not pl.test(flags, 1, world):
            pass
    else:
        while tl.atomic_add(flags, 0, sem="acquire", scope="sys") < 1:
            pass
    desc = tl.make_tensor_descriptor(x, [16, 16], [16, 1], [16, 16])
    tl.store(out + o, desc.load([0, 0]).reshape((256,)))


def tile_in_main(world: Any, how: str) -> None:
    x, flags, out = pkt.zeros((16, 16), dtype=torch.int32), pkt.signals(1), torch.zeros(256, dtype=torch.int32)
    tile_in[(1,)](x, out, flags, world.device, how)
    assert (out == 6).all()
    world.barrier()


@pytest.mark.parametrize("how", ["wait", "test"])
def test_a_wait_orders_tma_loads_too(how: str) -> None:
    right(tile_in_main, args=(how,))


def test_a_raw_acquire_does_not_order_tma_loads() -> None:
    race = raced(tile_in_main, args=("raw",))
    assert {race.first.kind, race.second.kind} == {"TMA load", "store"}
    assert line_of(tile_in, "desc.load") in (race.first.site, race.second.site)


def test_a_programs_own_stores_and_tma_loads() -> None:
    """Generic and async proxy differ within one program too: it needs a fence of the two (pl.quiet has one)."""

    @triton.jit
    def own(x, out, world, FENCE: tl.constexpr):
        o = tl.arange(0, 256)
        tl.store(x + o, 4)
        if FENCE:
            pl.quiet()
        desc = tl.make_tensor_descriptor(x, [16, 16], [16, 1], [16, 16])
        tl.store(out + o, desc.load([0, 0]).reshape((256,)))

    def main(world: Any, fence: bool) -> None:
        x, out = pkt.zeros((16, 16), dtype=torch.int32), torch.zeros(256, dtype=torch.int32)
        own[(1,)](x, out, world.device, fence)
        assert (out == 4).all()

    right(main, 1, args=(True,))
    race = raced(main, 1, args=(False,))
    assert {race.first.kind, race.second.kind} == {"TMA load", "store"}


# -- scope -----------------------------------------------------------------------------------------------------------


@triton.jit
def within_a_rank(x, flags, out, world):
    if tl.program_id(0) == 0:
        tl.store(x, 3)
        tl.debug_barrier()
        tl.atomic_add(flags, 1, sem="release", scope="gpu")
    else:
        while tl.atomic_add(flags, 0, sem="acquire", scope="gpu") < 1:
            pass
        tl.store(out + tl.program_id(0), tl.load(x))


def test_gpu_scope_is_enough_within_a_rank() -> None:
    def main(world: Any) -> None:
        x, flags, out = pkt.zeros(1, dtype=torch.int32), pkt.signals(1), torch.zeros(4, dtype=torch.int32)
        within_a_rank[(4,)](x, flags, out, world.device)
        assert out.tolist() == [0, 3, 3, 3]

    right(main)


def test_order_is_transitive() -> None:
    """0 publishes to 1, 1 to 2: what 0 wrote is there for 2."""

    @triton.jit
    def chain(x, out, flags, world):
        if world.rank == 0:
            pl.store(x, 9, 2, world)
            pl.signal(flags, 1, world)
        elif world.rank == 1:
            pl.wait(flags, 1, world)
            pl.signal(flags, 2, world)
        else:
            pl.wait(flags, 1, world)
            tl.store(out, tl.load(x))

    def main(world: Any) -> None:
        x, out, flags = pkt.zeros(1), torch.zeros(1), pkt.signals(1)
        chain[(1,)](x, out, flags, world.device)
        assert world.rank != 2 or out.item() == 9

    right(main, 3)


def test_one_fence_acquires_and_releases() -> None:
    """The same chain by relaxed atomics: the fence in the middle takes over what 0 published and passes it on to 2."""

    @triton.jit
    def fenced_chain(x, out, flag, world, MIDDLE: tl.constexpr):
        if world.rank == 0:
            pl.store(x, 9, 2, world)
            pl.fence()
            pl.atomic_xchg(flag, 1, 1, world, sem="relaxed")
        else:
            while pl.atomic_or(flag, 0, world.rank, world, sem="relaxed") != 1:
                pass
            if world.rank == 1:
                if MIDDLE:
                    pl.fence()
                pl.atomic_xchg(flag, 1, 2, world, sem="relaxed")
            else:
                pl.fence()
                tl.store(out, tl.load(x))

    def main(world: Any, middle: bool) -> None:
        x, out, flag = pkt.zeros(1), torch.zeros(1), pkt.zeros(1, dtype=torch.int32)
        fenced_chain[(1,)](x, out, flag, world.device, middle)
        assert world.rank != 2 or out.item() == 9

    right(main, 3, args=(True,), seeds=range(20))
    raced(main, 3, args=(False,))


def test_host_barriers_order_launches_of_different_ranks() -> None:
    @triton.jit
    def put(x, world):
        pl.store(x + world.rank, world.rank + 1, 0, world)

    @triton.jit
    def take(x, out, N: tl.constexpr):
        tl.store(out + tl.arange(0, N), tl.load(x + tl.arange(0, N)))

    def main(world: Any, barrier: bool) -> None:
        x, out = pkt.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
        put[(1,)](x, world.device)
        if barrier:
            world.barrier()
        if world.rank == 0:
            take[(1,)](x, out, 4)
            assert out.tolist() == [1, 2, 3, 4], "wrong values"

    right(main, 4, args=(True,))
    raced(main, 4, args=(False,), seeds=range(20))
