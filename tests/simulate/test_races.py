"""The race detector reports each wrong program and never its right twin. Overlaps and TMA have their own files."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import pkt
import pkt.language as pl
from pkt.simulate.findings import DataRace
from tests.simulate.helpers import EVERY_POLICY, SEEDS, assert_right, failures, find_race, line_of, outcome

# -- missing waits and signals ---------------------------------------------------------------------------------------


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
    elif HOW == "acquire and release":
        pl.store_release(flags, 1, other, world)
        while pl.load_acquire(flags, world.rank, world) < 1:
            pass
    elif HOW == "relaxed store":
        pl.store_relaxed(flags, 1, other, world)
        while pl.load_acquire(flags, world.rank, world) < 1:
            pass
    elif HOW == "relaxed load":
        pl.store_release(flags, 1, other, world)
        while pl.load_relaxed(flags, world.rank, world) < 1:
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


@pytest.mark.parametrize("how", ["right", "raw", "raw, default order", "acquire and release"])
def test_a_message_with_its_signal_is_right(how: str) -> None:
    assert_right(send_main, args=(how,))


MISSING = [
    "no wait", "relaxed signal", "relaxed wait", "gpu scope", "gpu scope of the release", "signal first",
    "relaxed store", "relaxed load",
]  # fmt: skip


@pytest.mark.parametrize("how", [*MISSING, "no signal"])
def test_a_message_without_its_signal_is_a_race(how: str) -> None:
    race = find_race(send_main, args=(how,))
    message = str(race)
    if how.startswith("gpu scope"):  # reported for the counter itself
        assert "data race: atomic of rank" in message or "data race: wait of rank" in message
        assert "flags[0]" in message
        assert 'atomic at scope "gpu", which leaves the other out' in str(race)
        assert "put a signal" not in str(race)
        return
    assert "data race: load of rank" in message or "data race: store of rank" in message
    assert "x[" in message
    assert "is not ordered after: " in message
    assert "send program 0" in message
    assert "put a signal after the first and a wait before the second" in message
    assert race.first.rank != race.second.rank
    load = line_of(send, "tl.load(x + N + o)" if how == "signal first" else "tl.store(out + o, tl.load(x + o))")
    store = line_of(send, "pl.store(x + N + o" if how == "signal first" else "pl.store(x + o")
    assert {(race.first.kind, race.first.site), (race.second.kind, race.second.site)} == {
        ("load", load),
        ("store", store),
    }


@pytest.mark.parametrize("how", ["gpu scope", "gpu scope of the release"])
def test_too_narrow_a_scope_does_not_order_the_message_either(how: str) -> None:
    found = [str(race) for seed in range(8) for race in outcome(send_main, 2, seed, (how,)).findings]
    assert any("load of rank" in race and "x[0] by" in race for race in found), "of the data, not of the counter"


@pytest.mark.parametrize("how", ["no wait", "no signal", "relaxed signal"])
def test_a_missing_order_shows_as_a_wrong_value(how: str) -> None:
    """Without the race detector, some schedule shows a wrong value. Only the detector finds a missing acquire or too
    small a scope: simulated loads are never early, and every program sees a release of any scope."""
    found = failures(send_main, 2, SEEDS, args=(how,), races=False)
    assert any("wrong values" in str(e) for e in found.values())


@pytest.mark.machine
def test_stores_arrive_late_and_out_of_order() -> None:
    """Two stores without an order show all four outcomes."""
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

    assert_right(main)


# -- the next launch -------------------------------------------------------------------------------------------------


@triton.jit
def gather(x, inbox, out, flags, world, HOW: tl.constexpr):
    """All-gather of one number, launched repeatedly: a fast rank's next launch may overwrite data that a slow rank
    still reads."""
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


@pytest.mark.machine
@pytest.mark.parametrize("how", ["double buffer", "entry barrier"])
def test_relaunches_that_cannot_overtake_are_right(how: str) -> None:
    assert_right(gather_main, 3, args=(how,), seeds=range(30))


@pytest.mark.machine
@pytest.mark.parametrize("seed", range(EVERY_POLICY))
def test_the_detector_changes_no_schedule(seed: int) -> None:
    """So `assert_right` need not try all of them twice."""
    whole, without = (outcome(gather_main, 3, seed, ("entry barrier",), races=races) for races in (True, False))
    assert whole.machine.order == without.machine.order
    assert whole.machine.steps == without.machine.steps


@pytest.mark.machine
def test_a_fast_ranks_next_launch_that_overtakes_is_a_race() -> None:
    race = find_race(gather_main, 3, args=("none",), seeds=SEEDS)
    assert "inbox[" in str(race)
    assert "store of rank" in str(race)
    wrong = failures(gather_main, 3, SEEDS, args=("none",), races=False)
    assert any("wrong values" in str(e) for e in wrong.values())


@pytest.mark.machine
def test_the_last_launchs_signal_satisfies_a_wait_for_a_constant() -> None:
    race = find_race(gather_main, 3, args=("constant",), seeds=SEEDS)
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


@pytest.mark.machine
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

    assert_right(main)


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


@pytest.mark.machine
def test_gpu_scope_is_enough_within_a_rank() -> None:
    def main(world: Any) -> None:
        x, flags, out = pkt.zeros(1, dtype=torch.int32), pkt.signals(1), torch.zeros(4, dtype=torch.int32)
        within_a_rank[(4,)](x, flags, out, world.device)
        assert out.tolist() == [0, 3, 3, 3]

    assert_right(main)


@pytest.mark.machine
def test_order_is_transitive() -> None:
    """Rank 0 publishes to 1, and 1 to 2: rank 2 sees the stores of rank 0."""

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

    assert_right(main, 3)


def test_one_fence_acquires_and_releases() -> None:
    """The same chain by relaxed atomics: the fence of rank 1 acquires from rank 0 and releases to rank 2."""

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

    assert_right(main, 3, args=(True,), seeds=range(20))
    find_race(main, 3, args=(False,))


@pytest.mark.machine
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

    assert_right(main, 4, args=(True,))
    find_race(main, 4, args=(False,), seeds=range(20))


# -- atomics of too small a scope, and atomics that only read ---------------------------------------------------------


@triton.jit
def count(x, peer, world, SCOPE: tl.constexpr, SYNC: tl.constexpr, N: tl.constexpr):
    tl.atomic_add(pl.peer(x + tl.arange(0, N), peer, world), 1, sem="relaxed", scope=SCOPE)
    if SYNC:
        pl.signal(x + N, peer, world)


@pytest.mark.machine
@pytest.mark.parametrize("size", [1, 32])
@pytest.mark.parametrize(
    ("scope", "ranks", "programs", "raced"),
    [("sys", 2, 2, False), ("gpu", 2, 1, True), ("gpu", 1, 2, False), ("cta", 1, 2, True), ("cta", 1, 1, False)],
)
def test_updates_of_too_small_a_scope_race(scope: str, ranks: int, programs: int, raced: bool, size: int) -> None:
    def main(world: Any) -> None:
        count[(programs,)](pkt.zeros(size, dtype=torch.int32), 0, world.device, scope, False, size)

    found = failures(main, ranks, range(6))
    assert all(isinstance(error, DataRace) for error in found.values())
    assert bool(found) == raced
    if raced:
        assert f'scope "{scope}", which leaves the other out' in str(next(iter(found.values())))


@triton.jit
def count_words(words, flags, world, HOW: tl.constexpr):
    """Rank 0 updates 4 bytes of an aligned word of 8 bytes, and rank 1 updates or reads all 8 or the other 4."""
    long = words.to(tl.pointer_type(tl.int64))
    if world.rank == 0:
        pl.atomic_add(words + 1, 1, 0, world, sem="relaxed")
    if HOW == "ordered":
        pl.barrier(flags, world)
    if world.rank == 1:
        if HOW == "read":
            tl.load(pl.peer(long, 0, world), volatile=True)
        elif HOW == "beside":
            pl.atomic_add(words, 1, 0, world, sem="relaxed")
            pl.atomic_add(long + 1, tl.full((), 1, tl.int64), 0, world, sem="relaxed")
        else:
            pl.atomic_add(long, tl.full((), 1, tl.int64), 0, world, sem="relaxed")


def count_words_main(world: Any, how: str) -> None:
    count_words[(1,)](pkt.zeros(4, dtype=torch.int32), pkt.signals(1), world.device, how)


@pytest.mark.machine
@pytest.mark.parametrize("how", ["updated", "read"])
def test_atomics_of_two_sizes_race(how: str) -> None:
    """In PTX they are not atomic for each other, and do not order anything. Each may come first."""
    found = failures(count_words_main, 2, args=(how,))
    assert set(found) == set(SEEDS)
    orders = {(error.second.rank, error.second.kind) for error in found.values() if isinstance(error, DataRace)}
    assert orders == {(0, "atomic"), (1, "atomic" if how == "updated" else "volatile load")}
    for error in found.values():
        assert "one of the two has 4 bytes, the other 8: atomics of two sizes do not order each other" in str(error)


@pytest.mark.machine
@pytest.mark.parametrize("how", ["ordered", "beside"])
def test_ordered_atomics_of_two_sizes_do_not_race(how: str) -> None:
    assert_right(count_words_main, 2, (how,), range(20))


@triton.jit
def wait_for_the_gpu(flags, world):
    """Rank 0's counter is only read, so that no data shows the missing order."""
    if world.rank == 0:
        pl.wait(flags, 1, world)
    else:
        tl.atomic_add(pl.peer(flags, 0, world), 1, sem="release", scope="gpu")


@pytest.mark.machine
def test_a_wait_races_with_an_update_of_too_small_a_scope() -> None:
    def main(world: Any) -> None:
        flags = pkt.signals(1)
        wait_for_the_gpu[(1,)](flags, world.device)

    race = find_race(main)
    wait, update = sorted((race.first, race.second), key=lambda access: access.rank)
    assert (wait.kind, wait.site) == ("wait", line_of(wait_for_the_gpu, "pl.wait("))
    assert (update.kind, update.site) == ("atomic", line_of(wait_for_the_gpu, "tl.atomic_add("))
    assert 'one of the two is atomic at scope "gpu", which leaves the other out: use scope="sys"' in str(race)


@triton.jit
def read_the_flag(mine, flags, out, world):
    tl.atomic_add(mine, 1, sem="relaxed", scope="gpu")
    pl.atomic_add(flags, 1, (world.rank + 1) % world.size, world, sem="release")
    pl.wait(flags, 1, world)
    tl.store(out, tl.load(flags))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_release_covers_its_own_update(dtype: torch.dtype) -> None:
    """Also where the program's update before it had another scope, or another size."""

    def main(world: Any) -> None:
        flags, out = pkt.signals(1), torch.zeros(1, dtype=torch.int32)
        read_the_flag[(1,)](pkt.zeros(1, dtype=dtype), flags, out, world.device)
        assert out.item() == 1

    assert_right(main, 3, seeds=range(12))


@triton.jit
def take_over(x, flags, out, world, HOW: tl.constexpr):
    if world.rank == 0:
        pl.store(x, 7, 1, world)
        pl.signal(flags, 1, world)
    else:
        if HOW == "volatile":
            while tl.load(flags, volatile=True) < 1:
                pass
        else:
            while tl.atomic_add(flags, 0, sem="relaxed", scope="sys") < 1:
                pass
        if HOW != "no fence":
            pl.fence()
        tl.store(out, tl.load(x))


@pytest.mark.parametrize("how", ["volatile", "relaxed", "no fence"])
def test_a_relaxed_poll_and_a_fence_act_as_a_wait(how: str) -> None:
    """Polling the flag is no race, and the signal counts as waited for."""

    def main(world: Any) -> None:
        x, flags = pkt.zeros(1), pkt.signals(1)
        take_over[(1,)](x, flags, torch.zeros(1), world.device, how)

    found = failures(main, 2, range(20))
    if how == "no fence":
        assert any(isinstance(error, DataRace) and "x[0]" in str(error) for error in found.values())
    else:
        assert found == {}


@triton.jit
def many_flags(x, flags, out, world, N: tl.constexpr):
    i = tl.arange(0, N)
    if world.rank == 0:
        pl.store(x, 7, 1, world)
        tl.debug_barrier()
        tl.atomic_add(pl.peer(flags + i, 1, world), 1, sem="release", scope="sys")
    else:
        pl.wait(flags + N - 1, 1, world)
        tl.store(out, tl.load(x))


def test_a_large_block_of_atomics_releases() -> None:
    def main(world: Any) -> None:
        flags, out = pkt.signals(512), torch.zeros(1)
        many_flags[(1,)](pkt.zeros(1), flags, out, world.device, 512)
        assert world.rank == 0 or out.item() == 7

    assert failures(main, 2, range(6)) == {}


def test_a_release_can_be_lost_and_an_acquire_only_relaxed() -> None:
    report = pkt.simulate(
        send_main, ranks=2, seeds=2, args=("acquire and release",), heap="1MiB", mutants=True, lost_signals=True
    )
    report.check()
    changes = {(mutant.site.call, mutant.change) for mutant in report.mutants}
    assert changes == {("store_release", "remove"), ("store_release", "relax"), ("load_acquire", "relax")}
    assert {signal.site.call for signal in report.signals} == {"store_release"}
