"""Addresses, accesses, atomics and multimem forms of pkt.language in the simulator, on several ranks."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import pkt
import pkt.language as pl
from pkt.errors import RankError, ShapeError
from tests.simulate.helpers import assert_same, failures, launch, outcome

SEEDS = (0, 1, 2, 3)


# -- address ---------------------------------------------------------------------------------------------------------


@triton.jit
def addresses(x, out, world):
    for r in range(world.size):
        tl.store(out + r, pl.peer(x + 5, r, world).to(tl.int64))
    if world.multicast:
        tl.store(out + world.size, pl.multicast(x + 5, world).to(tl.int64))
    block = pl.peer(x + tl.arange(0, 4), 1, world)
    tl.store(out + world.size + 1 + tl.arange(0, 4), block.to(tl.int64))


@pytest.mark.parametrize("multicast", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.int64, torch.bool], ids=str)
def test_peer_and_multicast_addresses(dtype: torch.dtype, multicast: bool) -> None:
    def main(world: Any) -> None:
        x, out = pkt.zeros(16, dtype=dtype), torch.empty(world.size + 5, dtype=torch.int64)
        addresses[(1,)](x, out, world.device)
        assert out[: world.size].tolist() == [x.peer(r)[5:].data_ptr() for r in range(world.size)]
        assert (x.multicast is not None) == multicast
        if x.multicast is not None:
            assert out[world.size] == x.multicast[5:].data_ptr()
        assert out[world.size + 1 :].tolist() == [x.peer(1)[i:].data_ptr() for i in range(4)]
        assert x.peer(world.rank).data_ptr() == x.data_ptr()
        with pytest.raises(RankError):
            x.peer(world.size)

    launch(main, multicast=multicast)


# -- loads, stores and copies ----------------------------------------------------------------------------------------


@triton.jit
def load_store(x, y, out, flags, world, N: tl.constexpr):
    o = tl.arange(0, N)
    right = (world.rank + 1) % world.size
    tl.store(out + o, pl.load(x + o, right, world, mask=o < N - 2, other=-5))
    tl.store(out + N, pl.load(x + 3, right, world))
    pl.store(y + o, tl.load(x + o) + 1000, right, world, mask=o % 2 == 0)
    pl.store(y + 1, 7, right, world)
    pl.signal(flags, right, world)
    pl.wait(flags, 1, world)
    tl.store(out + 2 * N + o, tl.load(y + o))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_load_and_store_reach_every_rank(ranks: int, seed: int) -> None:
    n = 8

    def main(world: Any) -> None:
        x, y = pkt.arange(n), pkt.zeros(n, dtype=torch.int64)
        out, flags = torch.zeros(3 * n, dtype=torch.int64), pkt.signals(1)
        x += 100 * world.rank
        world.barrier()
        load_store[(1,)](x, y, out, flags, world.device, n)
        right, left = (world.rank + 1) % ranks, (world.rank - 1) % ranks
        base = torch.arange(n)
        assert out[:n].tolist() == [*(base + 100 * right).tolist()[:-2], -5, -5]
        assert out[n] == 100 * right + 3
        wanted = torch.where(base % 2 == 0, base + 100 * left + 1000, 0)
        wanted[1] = 7
        assert out[2 * n :].tolist() == wanted.tolist()

    launch(main, ranks, seed)


@triton.jit
def copies(x, got, put, between, flags, world, N: tl.constexpr):
    o = tl.arange(0, N)
    right = (world.rank + 1) % world.size
    pl.get(dst=got + o, src=x + o, peer=right, world=world, mask=o > 0)
    pl.put(dst=put + o, src=x + o, peer=right, world=world, mask=o < N - 1)
    if world.rank == 0:
        pl.copy(between + o, x + o, 2, 1, world, mask=o != 3)
    pl.barrier(flags, world)


@pytest.mark.parametrize("seed", SEEDS)
def test_get_put_and_copy_move_blocks(seed: int) -> None:
    n = 8

    def main(world: Any) -> None:
        x, got, put, between = (pkt.zeros(n, dtype=torch.float32) for _ in range(4))
        flags = pkt.signals(1)
        x.copy_(torch.arange(n) + 100 * world.rank)
        world.barrier()
        copies[(1,)](x, got, put, between, flags, world.device, n)
        base = torch.arange(n).float()
        right, left = (world.rank + 1) % 3, (world.rank - 1) % 3
        assert got.tolist() == [0.0, *(base + 100 * right).tolist()[1:]]
        assert put.tolist() == [*(base + 100 * left).tolist()[:-1], 0.0]
        third = (base + 100).tolist()
        third[3] = 0.0
        assert between.tolist() == (third if world.rank == 2 else [0.0] * n)

    launch(main, 3, seed)


@triton.jit
def prefetching(x, out, world, N: tl.constexpr):
    o = tl.arange(0, N)
    pl.prefetch(x + o, mask=o < 3)
    tl.store(out + o, tl.load(x + o))


def test_prefetch_is_no_access() -> None:
    """Another rank may write what is prefetched: there is no value that it could change."""

    def main(world: Any) -> None:
        x, out = pkt.zeros(8), torch.ones(8)
        if world.rank == 0:
            prefetching[(1,)](x, out, world.device, 8)
            assert out.tolist() == [0.0] * 8
        world.barrier()

    launch(main, 2)


# -- atomics ---------------------------------------------------------------------------------------------------------


@triton.jit
def atomics(x, old, world, N: tl.constexpr):
    o = tl.arange(0, N)
    me = world.rank + 1
    tl.store(old + o, pl.atomic_add(x + o, me, 0, world, mask=o > 0))
    pl.atomic_max(x + N + o, o * me, 0, world)
    pl.atomic_min(x + 2 * N + o, o * me, 0, world, sem="relaxed")
    pl.atomic_and(x + 3 * N + o, ~(1 << world.rank), 0, world, sem="acquire")
    pl.atomic_or(x + 4 * N + o, 1 << world.rank, 0, world, sem="release")
    pl.atomic_xor(x + 5 * N + o, (1 << world.rank) | 16, 0, world)
    tl.store(old + N, pl.atomic_xchg(x + 6 * N, me, 0, world))
    tl.store(old + N + 1, pl.atomic_cas(x + 7 * N, 0, me, 0, world))


@pytest.mark.parametrize("seed", SEEDS)
def test_atomics_update_a_peers_copy(seed: int) -> None:
    n, ranks = 4, 3

    def main(world: Any) -> tuple:
        x, old = pkt.zeros((8, n), dtype=torch.int32), torch.zeros(n + 2, dtype=torch.int32)
        x[2:4] = 100
        world.barrier()
        atomics[(1,)](x, old, world.device, n)
        world.barrier()
        return x.tolist(), old.tolist()

    found = launch(main, ranks, seed)
    x = found[0][0]
    assert all(f[0][0] == [0] * n for f in found[1:])  # only rank 0's copy has changed
    assert x[0] == [0, 6, 6, 6]
    assert x[1] == [0, 3, 6, 9]
    assert x[2] == [0, 1, 2, 3]
    assert x[3] == [100 & ~7] * n
    assert x[4] == [7] * n
    assert x[5] == [7 ^ 16] * n
    olds = [f[1] for f in found]
    # In any order, each old value is the sum of the updates before it, and each exchange returns the value that the
    # exchange before it stored.
    sums = sorted((o[1], r + 1) for r, o in enumerate(olds))
    for (a, step), (b, _) in pairwise(sums):
        assert a + step == b
    assert sorted(o[n] for o in olds) + [x[6][0]] == [0, *sorted({1, 2, 3} - {x[6][0]}), x[6][0]]
    winners = [r for r, o in enumerate(olds) if o[n + 1] == 0]
    assert len(winners) == 1
    assert x[7][0] == winners[0] + 1


@triton.jit
def claims(x, old, world, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(old + i, pl.atomic_cas(x + i, -1, 10 * i + world.rank, 0, world))
    tl.store(old + N, pl.atomic_cas(x + N, -1, 1 << 20, 0, world))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32, torch.float64], ids=str)
def test_atomic_cas_takes_numbers_as_the_other_atomics(dtype: torch.dtype, seed: int) -> None:
    def main(world: Any) -> tuple[list, list]:
        x, old = pkt.full(5, -1, dtype=dtype), torch.zeros(5, dtype=dtype)
        claims[(1,)](x, old, world.device, 4)
        world.barrier()
        return x.tolist(), old.tolist()

    said = launch(main, seed=seed)
    (words, _), seen = said[0], [old for _, old in said]
    for i in range(4):
        winners = [rank for rank in range(3) if seen[rank][i] == -1]
        assert len(winners) == 1
        assert words[i] == 10 * i + winners[0]
        assert {seen[rank][i] for rank in range(3)} == {-1, words[i]}
    assert words[4] == 1 << 20


@triton.jit
def histogram(counts, old, world, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr):
    o = tl.arange(0, ROWS)[:, None] * STEP + tl.arange(0, COLUMNS)[None, :]
    i = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(old + i, pl.atomic_add(counts + o, 1, world.rank, world, sem="relaxed"))
    pl.atomic_add(counts + 64 + o, 1, world.rank, world, sem="relaxed")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("rows", "columns", "step"), [(4, 1, 0), (2, 8, 0), (32, 16, 0), (4, 8, 2), (4, 8, 8)])
def test_a_block_that_names_an_element_twice_updates_it_twice(rows: int, columns: int, step: int, seed: int) -> None:
    """Where rows of the block share elements, all or some of them."""

    def main(world: Any) -> None:
        counts, old = pkt.zeros(2, 64, dtype=torch.int32), torch.empty(rows, columns, dtype=torch.int32)
        histogram[(1,)](counts, old, world.device, rows, columns, step)
        at = (torch.arange(rows)[:, None] * step + torch.arange(columns)).flatten()
        assert counts.tolist() == [torch.bincount(at, minlength=64).tolist()] * 2
        found = [sorted(old.flatten()[at == i].tolist()) for i in at.unique()]
        assert found == [list(range(len(of_one))) for of_one in found]

    launch(main, ranks=1, seed=seed)


@triton.jit
def float_atomics(x, world):
    pl.atomic_add(x + tl.arange(0, 4), 1.5, (world.rank + 1) % world.size, world)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_atomic_add_adds_floats(dtype: torch.dtype) -> None:
    def main(world: Any) -> None:
        x = pkt.ones(4, dtype=dtype)
        float_atomics[(5,)](x, world.device)
        world.barrier()
        assert x.tolist() == [8.5] * 4

    assert failures(main, 2, SEEDS) == {}


# -- multimem --------------------------------------------------------------------------------------------------------


@triton.jit
def load_reduce(x, out, world, OP: tl.constexpr, N: tl.constexpr):
    o = tl.arange(0, N)
    tl.store(out + o, pl.multimem_load_reduce(x + o, world, OP))
    tl.store(out + N + o, pl.multimem_load_reduce(x + o, world, OP, mask=o < N // 2))


FORMS = [
    *((op, d) for op in ("add", "min", "max") for d in (torch.bfloat16, torch.float16)),
    *((op, d) for op in ("add", "min", "max") for d in (torch.int32, torch.int64, torch.float32)),
]


@pytest.mark.parametrize("multicast", [True, False])
@pytest.mark.parametrize(("op", "dtype"), FORMS, ids=lambda p: str(p).removeprefix("torch."))
def test_multimem_load_reduce(op: str, dtype: torch.dtype, multicast: bool) -> None:
    n, ranks = 32, 4

    def main(world: Any) -> tuple[torch.Tensor, torch.Tensor]:
        x = pkt.empty(n, dtype=dtype)
        torch.manual_seed(world.rank)
        x.copy_(torch.randn(n).to(dtype) if dtype.is_floating_point else torch.randint(-99, 99, (n,)).to(dtype))
        out = torch.full((2 * n,), 77).to(dtype)
        world.barrier()
        load_reduce[(1,)](x, out, world.device, op, n)
        world.barrier()
        return x.plain().clone(), out

    found = launch(main, ranks, multicast=multicast)
    values = torch.stack([f[0] for f in found])
    if op == "add":
        wide = values.float() if dtype.is_floating_point else values
        total = wide[0]
        for row in wide[1:]:
            total = total + row  # fp32, rank by rank, rounded once
        wanted = total.to(dtype)
    else:
        wanted = values.amin(0) if op == "min" else values.amax(0)
    for _, out in found:
        assert_same(out[:n], wanted)
        assert_same(out[n:], torch.where(torch.arange(n) < n // 2, wanted, torch.zeros_like(wanted)))


@triton.jit
def in_groups(x, start, step, half, world, WHAT: tl.constexpr, N: tl.constexpr):
    o = tl.arange(0, N)
    ptrs, mask = x + start + o * step, (o % 4 < half) | (o >= N)
    if WHAT == "load_reduce":
        pl.multimem_load_reduce(ptrs, world, mask=mask)
    elif WHAT == "store":
        pl.multimem_store(ptrs, tl.zeros((N,), tl.float32), world, mask=mask)
    else:
        pl.multimem_reduce_add(ptrs, tl.zeros((N,), tl.float32), world, mask=mask)


@pytest.mark.parametrize("what", ["load_reduce", "store", "reduce_add"])
@pytest.mark.parametrize(
    ("start", "step", "half", "found"), [(0, 1, 4, None), (4, 1, 4, None), (1, 1, 4, 0), (0, 2, 4, 1), (4, 1, 2, 2)]
)
def test_multimem_refuses_irregular_groups(start: int, step: int, half: int, found: int | None, what: str) -> None:
    """An instruction has one address and one mask for all elements of its 16 bytes."""

    def main(world: Any) -> None:
        in_groups[(1,)](pkt.zeros(512), start, step, half, world.device, what, 128)

    error = outcome(main, 1).error
    if found is None:
        assert error is None
    else:
        assert isinstance(error, ShapeError)
        assert f"multimem_{what}: ptr: found element {found} of the block at test_semantics_memory.py:" in str(error)
    assert outcome(main, 1, multicast=False).error is None


@triton.jit
def multimem_write(x, y, flags, world, N: tl.constexpr):
    o = tl.arange(0, N)
    v = (o + 100 * (world.rank + 1)).to(x.dtype.element_ty)
    half = N // world.size
    mine = (o // half) == world.rank
    pl.multimem_store(x + o, v, world, mask=mine)
    pl.multimem_reduce_add(y + o, v, world)
    pl.multimem_reduce_add(y + o, v, world, mask=mine)
    pl.barrier(flags, world)


@pytest.mark.parametrize("multicast", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.float16], ids=str)
def test_multimem_store_and_reduce_add_reach_all_ranks(dtype: torch.dtype, multicast: bool) -> None:
    n = 32

    def main(world: Any) -> None:
        x, y, flags = pkt.zeros(n, dtype=dtype), pkt.ones(n, dtype=dtype), pkt.signals(1)
        multimem_write[(1,)](x, y, flags, world.device, n)
        o = torch.arange(n)
        rank = o // (n // 2)
        assert x.tolist() == (o + 100 * (rank + 1)).to(dtype).tolist()
        total = 1 + sum((o + 100 * (r + 1)).to(dtype).double() for r in range(2)) + (o + 100 * (rank + 1)).to(dtype)
        error = (y.double() - total).abs().max()
        # bf16 rounds at each of three additions, to multiples of 2 or 4 here
        assert error <= {torch.bfloat16: 8, torch.float16: 1}.get(dtype, 0)

    for seed in SEEDS:
        launch(main, 2, seed, multicast=multicast)


@triton.jit
def hand_made_multicast(x, world):
    tl.store(pl.multicast(x + 3, world), 1.0)


def test_a_plain_access_to_the_multicast_window_is_an_error() -> None:
    def main(world: Any) -> None:
        x = pkt.zeros(4)
        hand_made_multicast[(1,)](x, world.device)

    failure = outcome(main, 2).failure
    assert isinstance(failure, pkt.MulticastAccess)
    assert "plain access to the multicast window: store of the multicast window at x[3] by rank" in str(failure)
    assert "hand_made_multicast program 0 at test_semantics_memory.py:" in str(failure)


@triton.jit
def named_orders(words, out, world):
    right = (world.rank + 1) % world.size
    pl.store_relaxed(words, 1.5, right, world)
    pl.store_release(words + 1, 2.5, right, world)
    while pl.load_acquire(words + 1, world.rank, world) != 2.5:
        pass
    tl.store(out, pl.load_relaxed(words, world.rank, world))


def test_loads_and_stores_of_named_orders_move_values() -> None:
    def main(world: Any) -> None:
        words, out = pkt.zeros(2), torch.zeros(1)
        world.barrier()
        named_orders[(1,)](words, out, world.device)
        assert (words.tolist(), out.item()) == ([1.5, 2.5], 1.5)

    assert failures(main, 3, range(12)) == {}
