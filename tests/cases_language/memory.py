"""Address and memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

import pkt
import pkt.language as pl

from ._case import LAUNCHES, PROGRAMS, case, local, put_in, same


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
        # store to row `rank` on the rank after `other`: no other rank writes that row
        row = y + tl.cast(world.rank, tl.int32) * tl.num_programs(0) * BLOCK
        pl.store(row + offs, v, (other + 1) % world.size, world, mask=offs < n + 1)
    pl.barrier(bar + pid, world)
    for r in tl.static_range(world.size):
        at = r * tl.num_programs(0) * BLOCK + offs
        tl.store(out + at, tl.load(y + at))
    pl.barrier(bar + pid, world)


@triton.jit
def prefetch_kernel(x, out, world, N: tl.constexpr):
    offs = tl.arange(0, N)
    pl.prefetch(x + offs, mask=offs < N // 2)
    pl.prefetch(x)
    tl.store(out + offs, tl.load(x + offs))


@case("prefetch")
def prefetch(world: Any) -> None:
    x, out = pkt.empty(64, dtype=torch.int32), local(world, 64)
    put_in(x, torch.arange(64) + world.rank, world)
    prefetch_kernel[(1,)](x, out, world.device, 64)
    same(world, out, list(range(world.rank, world.rank + 64)))


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
        # the rank after `other` has other's values, from every rank
        row = (torch.arange(total) + 7 * ((world.rank - 1) % world.size) + launch) % 50
        row[n], row[n + 1 :] = 1, -1
        same(world, out, row.expand(world.size, total))


@triton.jit
def copies_kernel(x, y, out, bar, n, world, HOW: tl.constexpr, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    offs = pid * BLOCK + tl.arange(0, BLOCK)
    to = (world.rank + 1) % world.size
    if HOW == "put":
        pl.put(dst=y + offs, src=x + offs, peer=to, world=world, mask=offs < n)
    elif HOW == "get":
        pl.get(dst=y + offs, src=x + offs, peer=to, world=world, mask=offs < n)
    else:  # between two other ranks: from the next rank to the previous one
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
