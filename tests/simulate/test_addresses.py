"""The simulator's errors for bad addresses: outside a tensor, of no rank, freed, beside the counters."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import pkt
import pkt.language as pl
from pkt.errors import SignalIndexError, UseAfterFree
from pkt.simulate.findings import OutOfBounds
from tests.simulate.helpers import HEAP, failures, outcome

SEEDS = range(6)


# -- memory ----------------------------------------------------------------------------------------------------------


@triton.jit
def reach(x, at, peer, world, HOW: tl.constexpr):
    if HOW == "long":
        tl.store(x + at + tl.arange(0, 128), 1.0)
    elif HOW == "load":
        v = pl.load(x + at, peer, world)
        tl.store(x, v)
    elif HOW == "store":
        pl.store(x + at + tl.arange(0, 4), 1.0, peer, world)
    elif HOW == "atomic":
        pl.atomic_add(x + at, 1.0, peer, world)
    else:
        desc = tl.make_tensor_descriptor(pl.peer(x, peer, world), [64, 64], [64, 1], [16, 16])
        desc.store([at, 0], tl.zeros((16, 16), tl.float32))


@pytest.mark.parametrize(("how", "kind"), [("load", "load"), ("store", "store"), ("atomic", "atomic")])
def test_an_access_past_a_symmetric_tensor_is_out_of_bounds(how: str, kind: str) -> None:
    def main(world: Any) -> None:
        _, weights = pkt.zeros(64), pkt.zeros(100)
        if world.rank == 0:
            reach[(1,)](weights, 99 if how == "store" else 100, 1, world.device, how)

    error = outcome(main, 2).error
    assert isinstance(error, OutOfBounds)
    message = str(error)
    assert f"out of bounds: {kind} of byte " in message
    assert " of rank 1's heap by rank 0 reach program 0" in message
    assert "nearest: weights of rank 1" in message
    assert "test_addresses.py:" in message


def test_a_tma_store_past_a_tensor_is_out_of_bounds() -> None:
    def main(world: Any) -> None:
        weights = pkt.zeros(32, 64)  # the descriptor says 64 rows
        if world.rank == 0:
            reach[(1,)](weights, 16, 1, world.device, "tma")  # rows 16 to 31 are inside
            reach[(1,)](weights, 32, 1, world.device, "tma")

    error = outcome(main, 2).error
    assert isinstance(error, OutOfBounds)
    assert "TMA store" in str(error)
    assert "weights of rank 1" in str(error)


@pytest.mark.parametrize("multicast", [True, False])
@pytest.mark.parametrize("peer", [-1, 2, 5])
def test_an_access_to_a_rank_that_does_not_exist_is_out_of_bounds(peer: int, multicast: bool) -> None:
    def main(world: Any) -> None:
        weights = pkt.zeros(64)
        reach[(1,)](weights, 3, peer, world.device, "load")

    error = outcome(main, 2, multicast=multicast).error
    assert isinstance(error, OutOfBounds)
    assert f"load of rank {peer}'s weights[3] by rank 0 reach" in str(error)
    assert "peers are ranks 0 to 1" in str(error)


@pytest.mark.parametrize("how", ["load", "store", "atomic"])
def test_an_access_to_a_peers_copy_of_a_plain_tensor_is_out_of_bounds(how: str) -> None:
    def main(world: Any) -> None:
        _, plain = pkt.zeros(64), torch.zeros(64)
        reach[(1,)](plain, 3, 0, world.device, how)

    error = outcome(main, 2).error  # rank 0 accesses its own copy, which is right
    assert isinstance(error, OutOfBounds)
    assert "of rank 0's x[3], a peer's copy of a plain tensor by rank 1 " in str(error)
    assert "allocate x with pkt.empty or its like" in str(error)


@pytest.mark.parametrize("count", [63, 64, 65, 127])
def test_a_gap_follows_every_tensor(count: int) -> None:
    """A gap follows tensors of every size. The error names the tensor that ends before the access."""

    def main(world: Any) -> None:
        weights, _ = pkt.zeros(count), pkt.zeros(1000)
        reach[(1,)](weights, 0, 0, world.device, "long")

    error = outcome(main, 1).error
    assert isinstance(error, OutOfBounds)
    assert "nearest: weights of rank 0, which ends 1 byte before" in str(error)


@triton.jit
def count_launches(flags, world):
    pl.epoch(flags, world)


@pytest.mark.parametrize("which", ["data", "a slice", "plain"])
def test_epoch_refuses_tensors_that_are_no_signals(which: str) -> None:
    def main(world: Any) -> None:
        _, data, flags = pkt.zeros(64, dtype=torch.int32), pkt.zeros(64, dtype=torch.int32), pkt.signals(4)
        count_launches[(2,)](flags, world.device)
        odd = {"data": data, "a slice": flags[1:], "plain": torch.zeros(64, dtype=torch.int32)}
        count_launches[(2,)](odd[which], world.device)

    error = outcome(main, 1).error
    assert isinstance(error, SignalIndexError)
    assert "epoch: atomic of " in str(error)
    assert "pass the tensor as pkt.signals gave it" in str(error)


@triton.jit
def a_barrier_each(flags, world):
    pl.barrier(flags + tl.program_id(0), world)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("programs", [3, 40])  # the words beside the counters, and the memory behind them
def test_a_barrier_with_too_few_counters_is_reported(programs: int, seed: int) -> None:
    def main(world: Any) -> None:
        flags = pkt.signals(2)
        a_barrier_each[(programs,)](flags, world.device)

    error = outcome(main, 2, seed).failure
    assert isinstance(error, SignalIndexError if programs == 3 else (SignalIndexError, OutOfBounds))
    assert ("wanted flags[0] to flags[1]" if isinstance(error, SignalIndexError) else "nearest: flags") in str(error)


def test_a_barrier_on_freed_counters_is_use_after_free() -> None:
    @triton.jit
    def keep(flags, kept):
        tl.store(kept, flags.to(tl.int64))

    @triton.jit
    def use(kept, world):
        pl.barrier(tl.load(kept).to(tl.pointer_type(tl.int32)), world)

    def main(world: Any) -> None:
        flags, kept = pkt.signals(1), torch.zeros(1, dtype=torch.int64)
        keep[(1,)](flags, kept)
        flags.free()
        use[(1,)](kept, world.device)

    assert isinstance(outcome(main, 1).error, UseAfterFree)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16])
def test_a_signal_refuses_a_tensor_that_is_not_of_counters(dtype: torch.dtype) -> None:
    def main(world: Any) -> None:
        signal_at[(1,)](pkt.zeros(4, dtype=dtype), 0, world.device)

    assert "a counter is int32 or int64" in str(outcome(main, 1).error)


def test_a_load_from_a_freed_tensor_is_use_after_free() -> None:
    @triton.jit
    def keep_pointer(x, keep):
        tl.store(keep, x.to(tl.int64))

    @triton.jit
    def use_pointer(keep, out):
        p = tl.load(keep).to(tl.pointer_type(tl.float32))
        tl.store(out, tl.load(p + 2))

    def main(world: Any) -> None:
        keep, out = torch.zeros(1, dtype=torch.int64), torch.zeros(1)
        weights = pkt.ones(64)
        keep_pointer[(1,)](weights, keep)
        use_pointer[(1,)](keep, out)
        assert out.item() == 1
        weights.free()
        use_pointer[(1,)](keep, out)

    error = outcome(main, 2).error
    assert isinstance(error, UseAfterFree)
    message = str(error)
    r = error.access.rank
    assert (
        f"use after free: load of rank {r}'s weights[2] by rank {r} use_pointer program 0 at test_addresses.py:"
        in message
    )
    lines, begin = inspect.getsourcelines(main)
    assert f"freed at test_addresses.py:{begin + lines.index('        weights.free()' + chr(10))}" in message


def test_fresh_memory_holds_nan_and_minus_one() -> None:
    def main(world: Any) -> None:
        x, i = pkt.empty(8), pkt.empty(8, dtype=torch.int32)
        assert x.isnan().all()
        assert (i == -1).all()

    assert failures(main, 2, [0]) == {}


@triton.jit
def signal_at(flags, at, world):
    pl.signal(flags + at, 0, world)


@pytest.mark.parametrize("at", [4, 15, -1, -13])
def test_a_signal_beside_the_counters_is_reported(at: int) -> None:
    """The words around the counters are reserved; farther away there is no allocation, or another tensor."""

    def main(world: Any) -> None:
        _, mailbox, _ = pkt.zeros(64), pkt.signals(4), pkt.zeros(64)
        signal_at[(1,)](mailbox, at, world.device)

    error = outcome(main, 2).error
    assert isinstance(error, SignalIndexError)
    assert f"signal index: atomic of rank 0's mailbox[{at}] by rank 0 signal_at program 0 at " in str(error)
    assert "wanted mailbox[0] to mailbox[3]" in str(error)


def test_a_signal_far_from_the_counters_is_out_of_bounds() -> None:
    def main(world: Any) -> None:
        mailbox = pkt.signals(4)
        signal_at[(1,)](mailbox, 4 + 16 + 100, world.device)

    error = outcome(main, 2).error
    assert isinstance(error, OutOfBounds)
    assert "nearest: mailbox of rank 0" in str(error)


@triton.jit
def astray(x, at, rank, world, HOW: tl.constexpr):
    if HOW == "peer":
        tl.store(pl.peer(x, rank, world), 1.0)
    elif HOW == "peers":
        i = tl.arange(0, 2)
        tl.store(pl.peer(x + i, rank + i - 1, world), 1.0)
    elif HOW == "multicast":
        tl.store(pl.multicast(x, world), 1.0)
    else:
        tl.store(x + at, 1.0)


@pytest.mark.parametrize("how", ["peer", "peers"])
def test_a_peer_past_the_last_rank_is_no_access_to_the_multicast_window(how: str) -> None:
    def main(world: Any, rank: int, how: str = how) -> None:
        weights = pkt.zeros(4)
        if world.rank == 0:
            astray[(1,)](weights, 0, rank, world.device, how)

    assert failures(main, 3, (0, 1), args=(2,)) == {}
    error = outcome(main, 3, args=(3,)).error
    assert isinstance(error, OutOfBounds)
    assert "store of rank 3's weights[" in str(error)
    assert "peers are ranks 0 to 2" in str(error)
    assert isinstance(outcome(main, 3, args=(0, "multicast")).error, pkt.MulticastAccess)


def test_an_address_in_the_multicast_window_where_no_tensor_is_lies_outside_every_heap() -> None:
    """An index that overflows may lead there, and no multimem instruction would mend it."""

    def main(world: Any) -> None:
        x = pkt.zeros(4)
        astray[(1,)](x, ((world.size - world.rank) * world.device.stride + HEAP // 2) // 4, 0, world.device, "here")

    error = outcome(main, 2).error
    assert isinstance(error, OutOfBounds)
    assert "store of an address in no rank's heap by rank" in str(error)


@triton.jit
def packed(x, past, world, HOW: tl.constexpr):
    """Words of 4 bytes that begin `past` bytes into each 8."""
    i = tl.arange(0, 4)
    p = (x.to(tl.pointer_type(tl.int8)) + past + 8 * i).to(tl.pointer_type(tl.int32))
    if HOW == "load":
        tl.load(p)
    elif HOW == "masked":
        tl.store(p, i, mask=i > 1)
    elif HOW == "scattered":
        tl.store(p + (i * i) % 5 * 4, i)
    else:
        pl.atomic_add(p, 1, 0, world)


@pytest.mark.parametrize("how", ["load", "masked", "scattered", "atomic"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_an_element_that_begins_at_no_multiple_of_its_bytes_is_misaligned(how: str, symmetric: bool) -> None:
    def main(world: Any, past: int) -> None:
        x = pkt.zeros(64, name="x") if symmetric else torch.zeros(64)
        packed[(1,)](x, past, world.device, how)

    for past in (0, 4):
        assert failures(main, 1, (0, 1), args=(past,)) == {}
    for past in (1, 2, 3):
        error = outcome(main, 1, args=(past,)).error
        assert isinstance(error, pkt.MisalignedAccess)
        kind = {"masked": "store", "scattered": "store"}.get(how, how)
        owner = "rank 0's " if symmetric else ""
        assert f"misaligned: {kind} of {owner}x[" in str(error)
        assert f"an element of 4 bytes, {past} past a multiple of 4; a GPU refuses it" in str(error)


@triton.jit
def odd_rows(x, SCATTERED: tl.constexpr):
    """Rows of two words, ten bytes apart, or words at 0, 6, 24 and 54 bytes."""
    i = tl.arange(0, 4)
    step = i * i * 6 if SCATTERED else 10 * i[:, None] + 4 * tl.arange(0, 2)[None, :]
    tl.load((x.to(tl.pointer_type(tl.int8)) + step).to(tl.pointer_type(tl.int32)))


@pytest.mark.parametrize("scattered", [False, True])
def test_a_later_element_may_be_the_misaligned_one(scattered: bool) -> None:
    error = outcome(lambda world: odd_rows[(1,)](torch.zeros(64), scattered), 1).error
    assert isinstance(error, pkt.MisalignedAccess)
    assert f"load of x[{1 if scattered else 2}] by rank 0" in str(error)
    assert "an element of 4 bytes, 2 past a multiple of 4" in str(error)


def test_the_nearest_tensor_may_be_the_one_after_the_address() -> None:
    def main(world: Any, at: int) -> None:
        first, second = pkt.zeros(4), pkt.zeros(1000)
        astray[(1,)](second, at, 0, world.device, "here")
        del first

    assert "nearest: second of rank 0, which begins 4 bytes after" in str(outcome(main, 1, args=(-1,)).error)
    assert "nearest: second of rank 0, which ends 1 byte before" in str(outcome(main, 1, args=(1000,)).error)
    assert outcome(main, 1, args=(999,)).failure is None


@triton.jit
def store_right(x, world):
    pl.store(x, world.rank, (world.rank + 1) % world.size, world)


@pytest.mark.parametrize("team", [False, True])
def test_a_fast_rank_may_store_into_memory_that_a_slow_one_is_allocating(team: bool) -> None:
    def main(world: Any) -> bool:
        ranks = world.team([2 * (world.rank // 2), 2 * (world.rank // 2) + 1]) if team else world
        x = pkt.empty(1, dtype=torch.int32, world=ranks)
        store_right[(1,)](x, ranks.device)
        ranks.barrier()
        return x.item() == (ranks.rank - 1) % ranks.size

    for seed in range(40):
        found = outcome(main, 4, seed)
        assert found.failure is None
        assert found.results == [True] * 4
