"""Every function of pkt.language in a small program that checks its own result, on any device and number of ranks.

A case is `fn(world)`, run on each rank by pkt.launch: in the simulator by test_cases_cpu, on GPUs by gpu/test_language.
Nothing in it knows which. Values are small integers, so results are exact in every dtype, and each kernel is launched
more than once with nothing reset between.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

import pkt
import pkt.language as pl

PROGRAMS = 3
LAUNCHES = 2


@dataclass(frozen=True)
class Case:
    """fn(world), and the names in pkt.language that it runs, such as "wait" or "tile.wait"."""

    name: str
    fn: Callable[[Any], None]
    covers: tuple[str, ...]


CASES: list[Case] = []


def case(*covers: str, **values: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add `fn(world, **values)` to CASES, under its name and values."""

    def add(fn: Callable[..., None]) -> Callable[..., None]:
        def run(world: Any) -> None:
            fn(world, **values)

        said = (str(v).removeprefix("torch.") for v in values.values())
        CASES.append(Case("_".join((fn.__name__, *said)), run, covers))
        return fn

    return add


def local(world: Any, *shape: int, dtype: torch.dtype = torch.int32, fill: float = -1) -> torch.Tensor:
    """A tensor of this rank alone, on its device."""
    return torch.full(shape, fill, dtype=dtype, device=world.torch_device)


def put_in(x: torch.Tensor, values: torch.Tensor, world: Any) -> None:
    """Fill a symmetric tensor; no rank goes on before all have."""
    x.copy_(values.to(x.dtype).reshape(x.shape))
    world.barrier()


def same(world: Any, found: torch.Tensor, wanted: Any) -> None:
    """Equal, when this rank's device is done."""
    world.synchronize()
    wanted = torch.as_tensor(wanted).cpu()
    found = found.cpu().reshape(wanted.shape)
    assert torch.equal(found.double(), wanted.double()), f"rank {world.rank}: found {found}, wanted {wanted}"
    world.barrier()


# -- address and memory ------------------------------------------------------------------------------------------------
@triton.jit
def addresses_kernel(x, out, world):
    for r in tl.static_range(world.size):
        tl.store(out + r, tl.load(pl.peer(x + 1, r, world)))
    last = (tl.cast(world.rank, tl.int32) + world.size - 1) % world.size
    tl.store(out + world.size, tl.load(pl.peer(x + 1, last, world)))
    distance = pl.multicast(x, world).to(tl.int64) - pl.peer(x, world.size - 1, world).to(tl.int64)
    tl.store(out + world.size + 1, (distance == world.stride).to(tl.int32))


@case("peer", "multicast")
def addresses(world: Any) -> None:
    x, out = pkt.empty(2, dtype=torch.int32), local(world, world.size + 2)
    put_in(x, torch.tensor([-7, world.rank * 10]), world)
    addresses_kernel[(1,)](x, out, world.device)
    last = (world.rank - 1) % world.size
    same(world, out, [*range(0, 10 * world.size, 10), last * 10, 1])


@triton.jit
def load_store_kernel(x, y, out, bar, n, world, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    offs = pid * BLOCK + tl.arange(0, BLOCK)
    for d in tl.static_range(1, world.size + 1):
        other = (world.rank + d) % world.size
        v = pl.load(x + offs, other, world, mask=offs < n, other=1)
        # row `rank` of the array of the rank behind `other`: nobody else writes there
        row = y + tl.cast(world.rank, tl.int32) * tl.num_programs(0) * BLOCK
        pl.store(row + offs, v, (other + 1) % world.size, world, mask=offs < n + 1)
    pl.barrier(bar + pid, world)
    for r in tl.static_range(world.size):
        at = r * tl.num_programs(0) * BLOCK + offs
        tl.store(out + at, tl.load(y + at))
    pl.barrier(bar + pid, world)


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.int64, torch.float64)


def each_dtype(fn: Callable[..., None]) -> Callable[..., None]:
    for dtype in DTYPES:
        case("load", "store", "barrier", dtype=dtype)(fn)
    return fn


@each_dtype
def load_store(world: Any, dtype: torch.dtype, n: int = 42, block: int = 16) -> None:
    total = PROGRAMS * block
    x, y = pkt.empty(total, dtype=dtype), pkt.empty(world.size, total, dtype=dtype)
    bar, out = pkt.signals(PROGRAMS), local(world, world.size, total, dtype=dtype)
    for launch in range(LAUNCHES):
        y.fill_(-1)
        put_in(x, (torch.arange(total) + 7 * world.rank + launch) % 50, world)
        load_store_kernel[(PROGRAMS,)](x, y, out, bar, n, world.device, block)
        # the rank behind `other` has other's values, from everybody
        row = (torch.arange(total) + 7 * ((world.rank - 1) % world.size) + launch) % 50
        row[n], row[n + 1 :] = 1, -1
        same(world, out, row.expand(world.size, total))


@triton.jit
def copies_kernel(x, y, out, bar, n, world, HOW: tl.constexpr, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    offs = pid * BLOCK + tl.arange(0, BLOCK)
    to = (world.rank + 1) % world.size
    if HOW == "put":
        pl.put(y + offs, x + offs, to, world, mask=offs < n)
    elif HOW == "get":
        pl.get(y + offs, x + offs, to, world, mask=offs < n)
    else:  # between two others: from the next rank to the one before
        pl.copy(y + offs, x + offs, (world.rank + world.size - 1) % world.size, to, world, mask=offs < n)
    pl.barrier(bar + pid, world)
    tl.store(out + offs, tl.load(y + offs))
    pl.barrier(bar + pid, world)


@case("put", "barrier", how="put", distance=-1)
@case("get", "barrier", how="get", distance=1)
@case("copy", "barrier", how="copy", distance=2)
def copies(world: Any, how: str, distance: int, n: int = 41, block: int = 16) -> None:
    total = PROGRAMS * block
    x, y, bar = pkt.empty(total), pkt.empty(total), pkt.signals(PROGRAMS)
    out = local(world, total, dtype=torch.float32)
    for launch in range(LAUNCHES):
        y.fill_(-1)
        put_in(x, torch.arange(total) * 3 + 100 * world.rank + launch, world)
        copies_kernel[(PROGRAMS,)](x, y, out, bar, n, world.device, how, block)
        row = torch.arange(total) * 3 + 100 * ((world.rank + distance) % world.size) + launch
        row[n:] = -1
        same(world, out, row)


# -- atomics -----------------------------------------------------------------------------------------------------------
@triton.jit
def atomics_kernel(x, old, value, bar, n, world, OP: tl.constexpr, SEM: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    mask = offs < n
    pid = tl.program_id(0)
    for d in tl.static_range(1, world.size + 1):
        to = (world.rank + d) % world.size
        if OP == "add":
            found = pl.atomic_add(x + offs, value, to, world, mask=mask, sem=SEM)
        elif OP == "and":
            found = pl.atomic_and(x + offs, value, to, world, mask=mask, sem=SEM)
        elif OP == "or":
            found = pl.atomic_or(x + offs, value, to, world, mask=mask, sem=SEM)
        elif OP == "xor":
            found = pl.atomic_xor(x + offs, value, to, world, mask=mask, sem=SEM)
        elif OP == "min":
            found = pl.atomic_min(x + offs, value, to, world, mask=mask, sem=SEM)
        elif OP == "max":
            found = pl.atomic_max(x + offs, value, to, world, mask=mask, sem=SEM)
        else:
            found = pl.atomic_xchg(x + offs, value, to, world, mask=mask, sem=SEM)
        tl.store(old + (pid * world.size + (d - 1)) * BLOCK + offs, found, mask=mask)
    pl.barrier(bar + pid, world)


ATOMICS: dict[str, Callable[[int, int], int]] = {
    "add": lambda a, b: a + b,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "min": min,
    "max": max,
}


@case("atomic_add", op="add", dtype=torch.float32, sem="relaxed")
@case("atomic_add", op="add", dtype=torch.int64, sem="release")
@case("atomic_add", op="add", dtype=torch.int32, sem="acq_rel")
@case("atomic_and", op="and", dtype=torch.int32, sem="acq_rel")
@case("atomic_or", op="or", dtype=torch.int64, sem="acquire")
@case("atomic_xor", op="xor", dtype=torch.int32, sem="relaxed")
@case("atomic_min", op="min", dtype=torch.int32, sem="acq_rel")
@case("atomic_max", op="max", dtype=torch.int64, sem="release")
def atomics(world: Any, op: str, dtype: torch.dtype, sem: str, n: int = 13, block: int = 16) -> None:
    start, values = 0b101100, [0b111001 >> r for r in range(world.size)]
    x, bar = pkt.empty(block, dtype=dtype), pkt.signals(PROGRAMS)
    old = local(world, PROGRAMS, world.size, block, dtype=dtype)
    wanted = start
    for value in values:
        for _ in range(PROGRAMS):
            wanted = ATOMICS[op](wanted, value)
    for _ in range(LAUNCHES):
        put_in(x, torch.full((block,), start), world)
        value = float(values[world.rank]) if dtype.is_floating_point else values[world.rank]
        atomics_kernel[(PROGRAMS,)](x, old, value, bar, n, world.device, op, sem, block)
        world.barrier()
        same(world, x, [wanted] * n + [start] * (block - n))
        if op == "add":  # each update finds another sum
            firsts = [r[:, :, 0].flatten().tolist() for r in gather(world, old)]
            mine = [
                firsts[r][p * world.size + (world.rank - r - 1) % world.size]
                for r in range(world.size)
                for p in range(PROGRAMS)
            ]
            assert len(set(mine)) == len(mine), mine
            assert min(mine) == start


@case("atomic_xchg")
def exchange_values(world: Any, block: int = 16) -> None:
    """What goes in comes out, once, or stays."""
    x, bar = pkt.empty(block, dtype=torch.int32), pkt.signals(PROGRAMS)
    old = local(world, PROGRAMS, world.size, block)
    put_in(x, torch.full((block,), 99), world)
    atomics_kernel[(PROGRAMS,)](x, old, world.rank + 1, bar, block, world.device, "xchg", "acq_rel", block)
    world.barrier()
    found = gather(world, old)
    here = [
        found[r][p, (world.rank - r - 1) % world.size, 0].item() for r in range(world.size) for p in range(PROGRAMS)
    ]
    assert sorted([*here, x[0].item()]) == sorted([99, *(r + 1 for r in range(world.size) for _ in range(PROGRAMS))])
    world.barrier()


def gather(world: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """Every rank's `x`, on the host."""
    world.synchronize()
    return [torch.tensor(values) for values in world.all_gather_object(x.cpu().tolist())]


@triton.jit
def compare_and_swap_kernel(x, out, bar, world):
    rank = tl.cast(world.rank, tl.int32)
    for r in tl.static_range(world.size):
        tl.store(out + r, pl.atomic_cas(x, 0, rank + 1, r, world))
    pl.barrier(bar, world)
    # nobody's value is 77: nothing is swapped
    tl.store(out + world.size, pl.atomic_cas(x, 77, 5, world.rank, world, sem="relaxed"))
    pl.barrier(bar, world)


@case("atomic_cas")
def compare_and_swap(world: Any) -> None:
    """On each rank's cell one rank wins; the others find the winner's value."""
    x, bar, out = pkt.zeros(1, dtype=torch.int32), pkt.signals(1), local(world, world.size + 1)
    compare_and_swap_kernel[(1,)](x, out, bar, world.device)
    found = gather(world, out)
    for r in range(world.size):
        saw = [int(found[q][r]) for q in range(world.size)]
        (winner,) = (q for q in range(world.size) if saw[q] == 0)
        assert all(saw[q] == winner + 1 for q in range(world.size) if q != winner), saw
        assert int(found[r][world.size]) == winner + 1
    same(world, x, [int(found[world.rank][world.size])])


@triton.jit
def lock_kernel(lock, cell, n, world):
    for _ in range(n):
        taken = 1
        while taken != 0:
            taken = pl.atomic_cas(lock, 0, 1, 0, world)
        pl.store(cell, pl.load(cell, 0, world) + 1, 0, world)
        pl.atomic_xchg(lock, 0, 0, world, sem="release")


@case("atomic_cas", "atomic_xchg")
def lock(world: Any, n: int = 3) -> None:
    """A lock on rank 0 around a plain counter there: system scope, or increments are lost."""
    guard, cell = pkt.zeros(1, dtype=torch.int32), pkt.zeros(1, dtype=torch.int64)
    lock_kernel[(PROGRAMS,)](guard, cell, n, world.device)
    world.synchronize()
    world.barrier()
    same(world, cell, [n * PROGRAMS * world.size if world.rank == 0 else 0])


# -- signals and waits -------------------------------------------------------------------------------------------------
@triton.jit
def signals_kernel(flags, out, first, step, world, ALL: tl.constexpr):
    """Each rank sets a counter of the next to `first`, then adds `step`, and waits for both."""
    to = (world.rank + 1) % world.size
    if ALL:
        pl.signal_all(flags, world, first)
        tl.store(out, pl.wait(flags, first * world.size, world))
        pl.signal_all(flags, world, step)
        tl.store(out + 1, pl.wait(flags, (first + step) * world.size, world))
    else:
        pl.signal(flags, to, world, first, "set")
        tl.store(out, pl.wait(flags, first, world, "eq"))
        pl.signal(flags + 1, (world.rank + world.size - 1) % world.size, world)  # it may add now
        pl.wait(flags + 1, 1, world)
        pl.signal(flags, to, world, step)
        tl.store(out + 1, pl.wait(flags, first + step, world))


@case("signal", "wait", first=5, step=3)
@case("signal", "wait", first=2**31 - 2, step=4)
def signals(world: Any, first: int, step: int) -> None:
    """The second wraps: 2^31 + 2 is at least 2^31 - 2."""
    flags, out = pkt.signals(2), local(world, 2)
    signals_kernel[(1,)](flags, out, first, step, world.device, False)
    same(world, out, [first, (first + step + 2**31) % 2**32 - 2**31])


@case("signal_all", "wait", first=3, step=4)
def signals_to_all(world: Any, first: int, step: int) -> None:
    flags, out = pkt.signals(2), local(world, 2)
    signals_kernel[(1,)](flags, out, first, step, world.device, True)
    world.synchronize()
    found = out.tolist()
    assert first * world.size <= found[0] <= (first + step) * world.size
    assert found[1] == (first + step) * world.size
    world.barrier()


@triton.jit
def set_all_kernel(flags, out, value, world):
    if tl.cast(world.rank, tl.int32) == 0:
        pl.signal_all(flags, world, value, "set")
    tl.store(out, pl.wait(flags, value, world, "eq"))


@case("signal_all", "wait")
def set_on_all(world: Any) -> None:
    flags, out = pkt.signals(1), local(world, 1)
    for value in (9, -4):
        set_all_kernel[(1,)](flags, out, value, world.device)
        same(world, out, [value])


@triton.jit
def comparisons_kernel(flags, out, start, world):
    """Every comparison, each on a counter that begins at `start` and is changed by the rank before."""
    to = (world.rank + 1) % world.size
    pl.signal(flags, to, world, 2)
    tl.store(out, pl.wait(flags, start + 2, world, "ge"))
    pl.signal(flags + 1, to, world, 1)
    tl.store(out + 1, pl.wait(flags + 1, start, world, "gt"))
    pl.signal(flags + 2, to, world, -3)
    tl.store(out + 2, pl.wait(flags + 2, start - 3, world, "le"))
    pl.signal(flags + 3, to, world, -1)
    tl.store(out + 3, pl.wait(flags + 3, start, world, "lt"))
    pl.signal(flags + 4, to, world, 17)
    tl.store(out + 4, pl.wait(flags + 4, start + 17, world, "eq"))
    pl.signal(flags + 5, to, world, 4)
    tl.store(out + 5, pl.wait(flags + 5, start, world, "ne"))
    tl.store(out + 6, pl.test(flags, start + 2, world).to(tl.int32))
    tl.store(out + 7, pl.test(flags, start + 3, world).to(tl.int32))
    tl.store(out + 8, pl.test(flags + 1, start + 1, world, "gt").to(tl.int32))
    tl.store(out + 9, pl.test(flags + 2, start - 3, world, "le").to(tl.int32))
    tl.store(out + 10, pl.test(flags + 3, start - 1, world, "lt").to(tl.int32))
    tl.store(out + 11, pl.test(flags + 4, start + 17, world, "eq").to(tl.int32))
    tl.store(out + 12, pl.test(flags + 5, start + 4, world, "ne").to(tl.int32))


@case("wait", "test", "signal", start=0)
@case("wait", "test", "signal", start=2**31 - 1)
@case("wait", "test", "signal", start=-(2**31))
def comparisons(world: Any, start: int) -> None:
    flags, out = pkt.signals(6), local(world, 13)
    put_in(flags, torch.full((6,), start, dtype=torch.int32), world)
    comparisons_kernel[(1,)](flags, out, start, world.device)
    wanted = [(start + d + 2**31) % 2**32 - 2**31 for d in (2, 1, -3, -1, 17, 4)]
    same(world, out, [*wanted, 1, 0, 0, 1, 0, 1, 0])


@triton.jit
def many_waiters_kernel(flags, x, out, world):
    """Program 0 publishes to every program of every rank at once; the others only look and wait."""
    pid = tl.program_id(0)
    rank = tl.cast(world.rank, tl.int32)
    if pid == 0:
        for r in tl.static_range(world.size):
            pl.store(x + rank, rank + 50, r, world)
        pl.signal_all(flags, world)
    pl.wait(flags, world.size, world)
    for r in tl.static_range(world.size):
        tl.store(out + pid * world.size + r, tl.load(x + r))


@case("signal_all", "wait", "store")
def many_waiters(world: Any) -> None:
    flags, x = pkt.signals(1), pkt.zeros(world.size, dtype=torch.int32)
    out = local(world, PROGRAMS, world.size)
    many_waiters_kernel[(PROGRAMS,)](flags, x, out, world.device)
    same(world, out, torch.arange(50, 50 + world.size).expand(PROGRAMS, world.size))


# -- barriers, fences, epochs ------------------------------------------------------------------------------------------
@triton.jit
def barrier_kernel(x, out, bar, first, rounds, world, KIND: tl.constexpr):
    """Each round every program writes where another one reads behind the barrier: the next rank's program of this
    index ("barrier"), this rank's next program ("grid_barrier"), the next rank's next program ("world_barrier")."""
    pid = tl.program_id(0)
    n = tl.num_programs(0)
    rank = tl.cast(world.rank, tl.int32)
    wrong = 0
    for i in range(first, first + rounds):
        value = i * 100 + rank * 10 + pid
        if KIND == "barrier":
            pl.store(x + pid, value, (world.rank + 1) % world.size, world)
            pl.barrier(bar + pid, world)
            seen = tl.load(x + pid)
            wrong += (seen != i * 100 + (rank + world.size - 1) % world.size * 10 + pid).to(tl.int32)
            pl.barrier(bar + pid, world)
        elif KIND == "grid_barrier":
            tl.store(x + (pid + 1) % n, value)
            pl.grid_barrier(bar, world)
            seen = tl.load(x + pid)
            wrong += (seen != i * 100 + rank * 10 + (pid + n - 1) % n).to(tl.int32)
            pl.grid_barrier(bar, world)
        else:
            pl.store(x + (pid + 1) % n, value, (world.rank + 1) % world.size, world)
            pl.world_barrier(bar, world)
            seen = tl.load(x + pid)
            wrong += (seen != i * 100 + (rank + world.size - 1) % world.size * 10 + (pid + n - 1) % n).to(tl.int32)
            pl.world_barrier(bar, world)
    tl.store(out + pid, wrong)


@case("barrier", kind="barrier")
@case("grid_barrier", kind="grid_barrier")
@case("world_barrier", kind="world_barrier")
def barriers(world: Any, kind: str, rounds: int = 3) -> None:
    x, bar, out = pkt.empty(PROGRAMS, dtype=torch.int32), pkt.signals(PROGRAMS), local(world, PROGRAMS)
    if kind == "world_barrier":
        bar = pkt.signals(2)
    world.barrier()
    for launch in range(LAUNCHES):
        barrier_kernel[(PROGRAMS,)](
            x, out, bar, launch * rounds, rounds, world.device, kind, launch_cooperative_grid=True
        )
        same(world, out, [0] * PROGRAMS)


@triton.jit
def uneven_kernel(x, out, bar, world):
    """Grids of different size meet: rank r has r + 1 programs."""
    pid = tl.program_id(0)
    rank = tl.cast(world.rank, tl.int32)
    for r in tl.static_range(world.size):
        pl.store(x + rank * world.size + pid, rank * 10 + pid, r, world)
    pl.world_barrier(bar, world)
    for r in tl.static_range(world.size):
        for p in tl.static_range(r + 1):
            tl.store(out + (pid * world.size + r) * world.size + p, tl.load(x + r * world.size + p))
    pl.world_barrier(bar, world)


@case("world_barrier")
def uneven_grids(world: Any) -> None:
    n = world.size
    x, bar = pkt.full((n, n), -1, dtype=torch.int32), pkt.signals(2)
    out = local(world, world.rank + 1, n, n)
    for _ in range(LAUNCHES):
        uneven_kernel[(world.rank + 1,)](x, out, bar, world.device, launch_cooperative_grid=True)
        wanted = [[r * 10 + p if p <= r else -1 for p in range(n)] for r in range(n)]
        same(world, out, [wanted] * (world.rank + 1))


@triton.jit
def by_hand_kernel(x, flags, out, bar, epoch, world, HOW: tl.constexpr, BLOCK: tl.constexpr):
    """A protocol of relaxed atomics and fences."""
    offs = tl.arange(0, BLOCK)
    to = (world.rank + 1) % world.size
    rank = tl.cast(world.rank, tl.int32)
    if HOW == "quiet":
        rows = tl.make_tensor_descriptor(pl.peer(x, to, world), [1, BLOCK], [BLOCK, 1], [1, BLOCK])
        rows.store([0, 0], tl.reshape(offs + rank * 100 + epoch, [1, BLOCK]))
        pl.quiet()
    else:
        pl.store(x + offs, offs + rank * 100 + epoch, to, world)
        pl.fence()  # in every thread: each is ordered, then all have met
        tl.debug_barrier()
    pl.atomic_add(flags, 1, to, world, sem="relaxed")
    pl.wait(flags, epoch, world)
    tl.store(out + offs, tl.load(x + offs))
    pl.barrier(bar, world)


@case("fence", how="fence")
@case("quiet", how="quiet")
def by_hand(world: Any, how: str, block: int = 32) -> None:
    x, flags, bar = pkt.zeros(block, dtype=torch.int32), pkt.signals(1), pkt.signals(1)
    out = local(world, block)
    for epoch in range(1, LAUNCHES + 2):
        by_hand_kernel[(1,)](x, flags, out, bar, epoch, world.device, how, block)
        same(world, out, torch.arange(block) + (world.rank - 1) % world.size * 100 + epoch)


@triton.jit
def flagged_kernel(flags, slots, x, out, n, world, TOGETHER: tl.constexpr, BLOCK: tl.constexpr):
    """Everybody's x, (n, 3), a block at a time, in words of the half of the slots that the epoch's parity says."""
    launch = pl.epoch(flags, world)
    half = slots + (launch & 1) * world.size * n * 4
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offs < n
    at = x + 3 * offs
    values = (tl.load(at, mask=inside), tl.load(at + 1, mask=inside), tl.load(at + 2, mask=inside))
    for i in tl.static_range(1, world.size + 1):
        peer = (world.rank + i) % world.size
        pl.put_flagged(half + (world.rank * n + offs) * 4, values, launch, peer, world, mask=inside)
    if TOGETHER:
        parts = pl.take_flagged_all(half + 4 * offs, 4 * n, launch, world, mask=inside)
    for r in tl.static_range(world.size):
        if TOGETHER:
            a, b, c = parts[r]
        else:
            a, b, c = pl.take_flagged(half + (r * n + offs) * 4, launch, world, mask=inside)
        at = out + (r * n + offs) * 3
        tl.store(at, a, mask=inside)
        tl.store(at + 1, b, mask=inside)
        tl.store(at + 2, c, mask=inside)


@case("put_flagged", "take_flagged", "epoch", together=False)
@case("put_flagged", "take_flagged_all", "epoch", together=True)
def flagged(world: Any, together: bool, n: int = 41, block: int = 16) -> None:
    slots, flags = pkt.zeros(2, world.size, n, 4, dtype=torch.int32), pkt.signals(1)
    x, out = local(world, n, 3), local(world, world.size, n, 3)
    counted = torch.arange(3 * n).view(n, 3)
    for launch in range(LAUNCHES + 2):
        x.copy_(counted - 100 * world.rank + 1000 * launch)
        grid = (triton.cdiv(n, block),)
        flagged_kernel[grid](flags, slots, x, out, n, world.device, together, block, launch_cooperative_grid=True)
        same(world, out, torch.stack([counted - 100 * r + 1000 * launch for r in range(world.size)]))


@triton.jit
def epoch_kernel(flags, x, out, seed, world):
    """Each launch leaves a value with every rank, in the half of the buffer that its epoch's parity says."""
    pid = tl.program_id(0)
    n = tl.num_programs(0)
    rank = tl.cast(world.rank, tl.int32)
    epoch = pl.epoch(flags, world)
    half = x + (epoch & 1) * world.size * n  # not %: an epoch that has wrapped is negative
    for r in tl.static_range(world.size):
        pl.store(half + rank * n + pid, seed * 10 + rank + pid, r, world)
    pl.signal_all(flags + pid, world)
    pl.wait(flags + pid, epoch * world.size, world)
    total = 0
    for r in tl.static_range(world.size):
        total += tl.load(half + r * n + pid)
    tl.store(out + pid, total)
    tl.store(out + n + pid, epoch)


@case("epoch", "signal_all", "wait", start=0)
@case("epoch", "signal_all", "wait", start=2**31 - 3)
def epochs(world: Any, start: int) -> None:
    """Counters that no host resets, also where they wrap; they begin where `start` launches would have left them."""
    flags, x = pkt.signals(PROGRAMS), pkt.empty(2, world.size, PROGRAMS, dtype=torch.int32)
    out = local(world, 2, PROGRAMS)
    if start:
        header = world.backend.view(world.rank, flags._allocation.block.offset, 8).view(torch.int64)
        header.fill_(start << 32)
        flags.fill_((start * world.size + 2**31) % 2**32 - 2**31)
    world.barrier()
    for launch in range(4):
        epoch_kernel[(PROGRAMS,)](flags, x, out, launch + 1, world.device)
        total = sum((launch + 1) * 10 + r for r in range(world.size))
        epoch = (start + launch + 1 + 2**31) % 2**32 - 2**31
        same(world, out, [[total + world.size * p for p in range(PROGRAMS)], [epoch] * PROGRAMS])


# -- in-switch reductions ----------------------------------------------------------------------------------------------
@triton.jit
def multimem_kernel(x, y, z, bar, n, world, OP: tl.constexpr, BLOCK: tl.constexpr):
    """Rank r reduces the blocks of program r, r + size, ...; all ranks get the result, and its sum again in z."""
    pid = tl.program_id(0)
    offs = pid * BLOCK + tl.arange(0, BLOCK)
    pl.barrier(bar + pid, world)
    if pid % world.size == tl.cast(world.rank, tl.int32):
        v = pl.multimem_load_reduce(x + offs, world, OP, mask=offs < n)
        pl.multimem_store(y + offs, v, world, mask=offs < n)
    pl.multimem_reduce_add(z + offs, tl.load(x + offs), world, mask=offs < n)
    pl.barrier(bar + pid, world)


REDUCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "add": lambda x: x.sum(0),
    "min": lambda x: x.amin(0),
    "max": lambda x: x.amax(0),
}
MULTIMEM = ("multimem_load_reduce", "multimem_store", "multimem_reduce_add")


@case(*MULTIMEM, op="add", dtype=torch.bfloat16)
@case(*MULTIMEM, op="max", dtype=torch.bfloat16)
@case(*MULTIMEM, op="min", dtype=torch.float16)
@case(*MULTIMEM, op="add", dtype=torch.float32)
@case(*MULTIMEM, op="max", dtype=torch.float32)
@case(*MULTIMEM, op="min", dtype=torch.int32)
@case(*MULTIMEM, op="add", dtype=torch.int64)
def multimem(world: Any, op: str, dtype: torch.dtype, block: int = 1024) -> None:
    """Blocks of 1024: below a group of 16 bytes for each thread the addition does not use the switch."""
    programs = world.size + 1
    total = programs * block
    n = total - 16  # whole runs of 16 bytes
    x, y, z = (pkt.empty(total, dtype=dtype) for _ in range(3))
    bar = pkt.signals(programs)
    for launch in range(LAUNCHES):
        inputs = torch.stack([(torch.arange(total) * 3 + 5 * r + launch) % 9 for r in range(world.size)]).double()
        y.fill_(-1)
        z.fill_(2)
        put_in(x, inputs[world.rank], world)
        multimem_kernel[(programs,)](x, y, z, bar, n, world.device, op, block)
        wanted = REDUCTIONS[op](inputs)
        wanted[n:] = -1
        same(world, y, wanted)
        wanted = inputs.sum(0) + 2
        wanted[n:] = 2
        same(world, z, wanted)


# -- tiles -------------------------------------------------------------------------------------------------------------
def layout(x: torch.Tensor, tma: bool = True) -> pl.Layout:
    """A symmetric tensor (b, d, r, c) as kernels take it."""
    b, d, r, c = x.shape
    return pl.Layout(x, b, d, r, c, tl.constexpr(tma))


@triton.jit
def tile_kernel(x, y, bar, flags, epoch, world, HOW: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """My tile (b, d, pid, 1) of x into y, or added to it: of the next rank, or of all; published with tile.signal."""
    pid = tl.program_id(0)
    to = (world.rank + 1) % world.size
    rows = pid * R + tl.arange(0, R)
    ptrs = x.ptr + (1 * x.d + 1) * x.r * x.c + rows[:, None] * x.c + C + tl.arange(0, C)[None, :]
    tile = tl.load(ptrs, mask=(rows < x.r)[:, None] & (C + tl.arange(0, C) < x.c)[None, :], other=0)
    coord = (1, 1, pid, 1)
    pl.tile.barrier(flags, (0, 0, 2, pid), world)  # before overwrite
    if HOW == "store":
        pl.tile.store_async(y, tile, coord, world, to)
        pl.tile.signal(flags, (0, 0, 0, pid), to, world)
        pl.tile.wait(flags, (0, 0, 0, pid), epoch, world)
    elif HOW == "add":
        pl.tile.store_add_async(y, tile, coord, world, to)
        pl.tile.signal(flags, (0, 0, 0, pid), to, world, 2)
        pl.tile.wait(flags, (0, 0, 0, pid), 2 * epoch, world)
    elif HOW == "store_all":
        if tl.cast(world.rank, tl.int32) == world.size - 1:
            pl.tile.store_async(y, tile, coord, world)
            pl.tile.signal_all(flags, (0, 0, 1, pid), world)
        pl.tile.wait(flags, (0, 0, 1, pid), epoch, world)
    else:
        pl.tile.store_add_async(y, tile, coord, world)
        pl.tile.signal_all(flags, (0, 0, 1, pid), world, 3)
        pl.tile.wait(flags, (0, 0, 1, pid), 3 * world.size * epoch, world)
    pl.tile.barrier(flags, (0, 0, 2, pid), world)


TILE_SYNC = ("tile.signal", "tile.signal_all", "tile.wait", "tile.barrier")


@case("tile.store_async", *TILE_SYNC, how="store", dtype=torch.float32, tma=True)
@case("tile.store_async", *TILE_SYNC, how="store", dtype=torch.bfloat16, tma=False)
@case("tile.store_async", *TILE_SYNC, how="store_all", dtype=torch.bfloat16, tma=True)
@case("tile.store_async", *TILE_SYNC, how="store_all", dtype=torch.float32, tma=False)
@case("tile.store_add_async", *TILE_SYNC, how="add", dtype=torch.bfloat16, tma=True)
@case("tile.store_add_async", *TILE_SYNC, how="add", dtype=torch.float32, tma=False)
@case("tile.store_add_async", *TILE_SYNC, how="add_all", dtype=torch.float32, tma=True)
def tiles(world: Any, how: str, dtype: torch.dtype, tma: bool, rows: int = 16, cols: int = 32) -> None:
    """The last tile row and column are cut; without TMA rows begin anywhere."""
    shape = (2, 2, PROGRAMS * rows - 3, 2 * cols - (8 if tma else 3))
    x, y, flags = pkt.empty(shape, dtype=dtype), pkt.empty(shape, dtype=dtype), pkt.signals(3 * 4)
    bar = layout(flags.view(1, 1, 3, 4), tma=False)
    size, count = torch.Size(shape), torch.Size(shape).numel()
    for launch in range(LAUNCHES):
        inputs = [((torch.arange(count) * 3 + 5 * r + launch) % 9).reshape(size) for r in range(world.size)]
        y.fill_(1)
        put_in(x, inputs[world.rank], world)
        tile_kernel[(PROGRAMS,)](layout(x, tma), layout(y, tma), bar, bar, launch + 1, world.device, how, rows, cols)
        before = inputs[(world.rank - 1) % world.size]
        result = {"store": before, "add": before + 1, "store_all": inputs[-1], "add_all": sum(inputs) + 1}[how]
        wanted = torch.ones(shape)
        wanted[1, 1, :, cols:] = result[1, 1, :, cols:]
        same(world, y, wanted)


@triton.jit
def tile_reduce_kernel(x, y, bar, world, ALL: tl.constexpr, OP: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    pid = tl.program_id(0)
    pl.tile.barrier(bar, (0, 0, 0, pid), world)
    if ALL:
        if pid % world.size == tl.cast(world.rank, tl.int32):
            pl.tile.all_reduce(x, (0, 1, pid, 1), world, R, C, OP)
    else:
        pl.tile.reduce(y, (0, 0, pid, 0), x, (0, 1, pid, 1), world, R, C, OP)
    pl.tile.barrier(bar, (0, 0, 0, pid), world)


@case("tile.reduce", every=False, op="add", dtype=torch.bfloat16, tma=True)
@case("tile.reduce", every=False, op="max", dtype=torch.float32, tma=False)
@case("tile.all_reduce", every=True, op="add", dtype=torch.float32, tma=True)
@case("tile.all_reduce", every=True, op="min", dtype=torch.bfloat16, tma=True)
@case("tile.all_reduce", every=True, op="add", dtype=torch.float16, tma=False)
def tile_reductions(
    world: Any, every: bool, op: str, dtype: torch.dtype, tma: bool, rows: int = 16, cols: int = 32
) -> None:
    programs = world.size
    shape = (1, 2, programs * rows - 2, 2 * cols - (0 if tma else 1))
    x, y = pkt.empty(shape, dtype=dtype), local(world, 1, 1, shape[2], shape[3] - cols, dtype=dtype)
    flags = pkt.signals(programs)
    count = torch.Size(shape).numel()
    for launch in range(LAUNCHES):
        values = [(torch.arange(count) * 3 + 5 * r + launch) % 9 for r in range(world.size)]
        inputs = torch.stack(values).reshape(world.size, *shape).double()
        put_in(x, inputs[world.rank], world)
        bar = layout(flags.view(1, 1, 1, programs), tma=False)
        tile_reduce_kernel[(programs,)](layout(x, tma), layout(y, tma), bar, world.device, every, op, rows, cols)
        result = REDUCTIONS[op](inputs)[0, 1, :, cols:]
        if every:
            wanted = inputs[world.rank].clone()
            wanted[0, 1, :, cols:] = result
            same(world, x, wanted)
        else:
            same(world, y, result[None, None])


# -- OpenSHMEM names ---------------------------------------------------------------------------------------------------
@triton.jit
def shmem_kernel(x, y, out, sig, counters, seed, world, HOW: tl.constexpr, N: tl.constexpr):
    """My x into the next PE's y, or the next PE's x into mine; in blocks smaller than the whole."""
    pe = pl.shmem.my_pe(world)
    to = (pe + 1) % pl.shmem.n_pes(world)
    if HOW == "putmem":
        pl.shmem.putmem(y, x, N * 4, to, world, BLOCK=16)
        pl.shmem.barrier_all(counters, world)
    elif HOW == "putmem_nbi":
        pl.shmem.putmem_nbi(y, x, N * 4, to, world, BLOCK=16)
        pl.shmem.quiet()
        pl.shmem.signal_op(sig, seed, pl.shmem.SIGNAL_SET, to, world)
        tl.store(out + N, pl.shmem.signal_wait_until(sig, pl.shmem.CMP_EQ, seed, world))
    elif HOW == "getmem":
        pl.shmem.getmem(y, x, N * 4, to, world, BLOCK=16)
    elif HOW == "getmem_nbi":
        pl.shmem.getmem_nbi(y, x, N * 4, to, world, BLOCK=16)
        pl.shmem.quiet()
        tl.debug_barrier()
    elif HOW == "putmem_signal":
        pl.shmem.putmem_signal(y, x, N * 4, sig, 2, pl.shmem.SIGNAL_ADD, to, world, BLOCK=16)
        tl.store(out + N, pl.shmem.signal_wait_until(sig, pl.shmem.CMP_GE, 2 * seed, world))
    elif HOW == "putmem_signal_nbi":
        pl.shmem.putmem_signal_nbi(y, x, N * 4, sig, seed, pl.shmem.SIGNAL_SET, to, world, BLOCK=16)
        tl.store(out + N, pl.shmem.signal_wait_until(sig, pl.shmem.CMP_NE, seed - 1, world))
    elif HOW == "int_p":
        for i in range(N):
            pl.shmem.int_p(y + i, pe * 100 + seed + i, to, world)
        pl.shmem.fence()
        pl.shmem.sync_all(counters, world)
    elif HOW == "remote_ptr":
        offs = tl.arange(0, N)
        tl.store(pl.shmem.remote_ptr(y, to, world) + offs, tl.load(x + offs))
        pl.shmem.sync_all(counters, world)
    else:
        pl.shmem.broadcast(y, x, N * 4, pl.shmem.n_pes(world) - 1, counters, world, BLOCK=16)
    tl.store(out + tl.arange(0, N), tl.load(y + tl.arange(0, N)))
    pl.shmem.sync_all(counters + 1, world)  # before overwrite


SHMEM = {
    "putmem": (-1, ("putmem", "barrier_all")),
    "putmem_nbi": (-1, ("putmem_nbi", "quiet", "signal_op", "signal_wait_until")),
    "getmem": (1, ("getmem",)),
    "getmem_nbi": (1, ("getmem_nbi", "quiet")),
    "putmem_signal": (-1, ("putmem_signal", "signal_wait_until")),
    "putmem_signal_nbi": (-1, ("putmem_signal_nbi", "signal_wait_until")),
    "int_p": (-1, ("int_p", "fence", "sync_all")),
    "remote_ptr": (-1, ("remote_ptr", "sync_all")),
    "broadcast": (None, ("broadcast",)),
}


def each_shmem(fn: Callable[..., None]) -> Callable[..., None]:
    for how, (_, names) in SHMEM.items():
        case(*(f"shmem.{name}" for name in (*names, "my_pe", "n_pes")), how=how)(fn)
    return fn


@each_shmem
def shmem(world: Any, how: str, n: int = 32) -> None:
    x, y = pkt.empty(n, dtype=torch.int32), pkt.empty(n, dtype=torch.int32)
    sig, counters, out = pkt.signals(1), pkt.signals(3), local(world, n + 1)
    distance = SHMEM[how][0]
    for seed in range(1, LAUNCHES + 2):
        put_in(x, torch.arange(n) + world.rank * 100 + seed, world)
        shmem_kernel[(1,)](x, y, out, sig, counters, seed, world.device, how, n)
        source = world.size - 1 if distance is None else (world.rank + distance) % world.size
        same(world, out[:n], torch.arange(n) + source * 100 + seed)


# -- orders and the template -------------------------------------------------------------------------------------------
@triton.jit
def order_kernel(out, n, m, world, GROUP: tl.constexpr):
    t = tl.program_id(0)
    row, col = pl.order.supergroup(t, n, m, GROUP)
    tl.store(out + 6 * t, row)
    tl.store(out + 6 * t + 1, col)
    tl.store(out + 6 * t + 2, pl.order.own_first(t, n * m, world))
    tl.store(out + 6 * t + 3, pl.order.own_last(t, n * m, world))
    rank, index = pl.order.peers_interleaved(t, n * m // world.size, world)
    tl.store(out + 6 * t + 4, rank)
    tl.store(out + 6 * t + 5, index)


@case("order.supergroup", "order.own_first", "order.own_last", "order.peers_interleaved")
def orders(world: Any, rows: int = 7, group: int = 3) -> None:
    """Each order takes every tile once, beginning where it says."""
    cols, rank = 2 * world.size, world.rank
    n = rows * cols
    out = local(world, n, 6)
    order_kernel[(n,)](out, rows, cols, world.device, group)
    world.synchronize()
    found = out.cpu()
    assert sorted(map(tuple, found[:, :2].tolist())) == [(i, j) for i in range(rows) for j in range(cols)]
    assert found[:4, 0].tolist() == [0, 1, 2, 0]  # a group's rows, column by column
    assert sorted(found[:, 2].tolist()) == sorted(found[:, 3].tolist()) == list(range(n))
    assert found[0, 2] == rank * n // world.size
    assert found[-1, 3] == ((rank + 1) * n // world.size - 1) % n
    per = n // world.size
    assert sorted(map(tuple, found[:, 4:].tolist())) == [(r, i) for r in range(world.size) for i in range(per)]
    assert found[0, 4] == rank
    assert world.size == 1 or found[per, 4] == (rank + 1) % world.size


@triton.jit
def _square(task, x, y, flags, n, world):
    v = tl.load(x + task)
    pl.store(y + tl.cast(world.rank, tl.int32) * n + task, v * v, world.rank, world)
    pl.signal(flags + task, world.rank, world)


@triton.jit
def _send(task, x, y, flags, n, world):
    at = y + tl.cast(world.rank, tl.int32) * n + task
    epoch = tl.load(x + n)
    pl.wait(flags + task, epoch, world)
    v = tl.load(at)
    for i in tl.static_range(1, world.size):
        pl.store(at, v, (world.rank + i) % world.size, world)


@triton.jit
def lcsc_kernel(x, y, flags, queue, bar, n, num_comm_sms, world):
    """Compute tasks square, communicate tasks send the squares round."""
    epoch = pl.epoch(flags, world)
    pl.lcsc(_square, _send, (x, y, flags, n, world), n, n, queue, epoch, num_comm_sms)
    pl.world_barrier(bar, world)


@case("lcsc", "epoch", comm=0)
@case("lcsc", "epoch", comm=2)
def lcsc(world: Any, comm: int, n: int = 9) -> None:
    x, y = local(world, n + 1), pkt.empty(world.size, n, dtype=torch.int32)
    flags, bar, queue = pkt.signals(n), pkt.signals(2), pkt.signals(1)
    for launch in range(LAUNCHES + 1):
        y.fill_(-1)
        x[:n] = torch.arange(n) + world.rank + launch
        x[n] = launch + 1
        world.barrier()
        lcsc_kernel[(4,)](x, y, flags, queue, bar, n, comm, world.device, launch_cooperative_grid=True)
        same(world, y, torch.stack([(torch.arange(n) + r + launch) ** 2 for r in range(world.size)]))
