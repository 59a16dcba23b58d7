"""Calls that reach other nodes, compiled: in a world of one node nothing of them is there."""

from __future__ import annotations

import re
from typing import Any

import pytest
import triton
import triton.language as tl

import pkt.language as pl
from pkt.language import ptx
from pkt.language.inspect import device_world
from pkt.language.world import site_hash

from .compiled import ARCHS, compiled, instructions


@triton.jit
def today(x, y, flag, n, peer, world, HOW: tl.constexpr):
    """What the calls below were before there were nodes."""
    if HOW == "signal":
        ptx.drain(world)
        ptx.cta_barrier()
        tl.atomic_add(pl.peer(flag, peer, world), 1, sem="release", scope="sys")
    elif HOW == "barrier":
        before = ptx.load_relaxed(flag)
        ptx.drain(world)
        ptx.cta_barrier()
        share = tl.where(tl.cast(world.rank, tl.int32) == 0, tl.cast(0x7FFFFFFF, tl.int32) - world.size + 2, 1)
        ptx.fence()
        for i in tl.static_range(1, world.size + 1):
            to = (world.rank + i) % world.size
            tl.atomic_add(pl.peer(flag, to, world), share, sem="relaxed", scope="sys")
        ptx.wait(flag, before, "flip", world)
        ptx.cta_barrier()
    elif HOW == "order":
        ptx.fence(False)
        ptx.drain(None)
        ptx.fence()
        ptx.cta_barrier()
    else:
        target = pl.peer(y, peer, world)
        count = tl.cast(n, tl.int64) // 4
        for start in range(0, count, 1024):
            at = start + tl.arange(0, 1024)
            tl.store(target + at, tl.load(x + at, mask=at < count), mask=at < count)
        if HOW == "put_signal":
            ptx.drain(world)
            ptx.cta_barrier()
            tl.atomic_add(pl.peer(flag, peer, world), 1, sem="release", scope="sys")


@triton.jit
def calls(x, y, flag, n, peer, world, HOW: tl.constexpr):
    if HOW == "signal":
        pl.signal(flag, peer, world)
    elif HOW == "barrier":
        pl.barrier(flag, world)
    elif HOW == "order":
        pl.fence(world=world)
        pl.quiet(world)
    elif HOW == "put":
        pl.put(dst=y, src=x, nbytes=n, peer=peer, world=world)
    else:
        pl.put_signal(flag, peer, world, dst=y, src=x, nbytes=n)


def compile(kernel: Any, how: str, arch: int, world: Any) -> Any:
    return compiled(kernel, "*fp32", "*fp32", "*i32", 4096, 3, world, how, arch=arch)


HOW = ["signal", "barrier", "order", "put", "put_signal"]


def listed(kernel: Any, name: str) -> list[str]:
    """The instructions, without the kernel's name and the hash of it that a wait records."""
    lines = [" ".join(each).replace(name, "kernel") for each in instructions(kernel)]
    return [line.replace(str(site_hash(name)), "site") for line in lines]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("how", HOW)
def test_one_node_adds_no_instruction(how: str, arch: int) -> None:
    found, wanted = (listed(compile(k, how, arch, device_world(2)), k.fn.__name__) for k in (calls, today))
    assert len(found) > 3
    if how.startswith("put"):  # the compiler orders the independent ones as it likes
        found, wanted = (sorted(re.sub(r"%[a-z]+\d+", "%", line) for line in lines) for lines in (found, wanted))
    assert found == wanted


def test_a_team_of_one_node_compiles() -> None:
    """`world.on_node` has node_size 0 in a world of several nodes, too."""
    compile(calls, "signal", 90, device_world(0, 4, team=[2, 3]))
