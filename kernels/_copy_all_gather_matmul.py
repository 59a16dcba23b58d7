"""all_gather_matmul pushed by the copy engines: C = gathered A @ B, A sharded by rows, and no SM moves data.

On a stream of its own this rank copies its shard, some row blocks at a time, into the inbox of every peer, and behind
each copy a kernel of one program signals it: counters only grow, so a captured graph replays rightly. The product is
push_kernel, which waits row block by row block and leaves an SM free for those signals. The inbox is not halved by the
parity of the launch, which the host does not know in a replay: all ranks meet in a kernel before the copies begin.
(size - 1) * m * k * itemsize bytes out of and into each rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl

import pkt.language as pl
from pkt.runtime.factories import empty, signals
from pkt.runtime.launch import beside, cooperative_launch
from pkt.runtime.tensor import SymmetricTensor
from pkt.runtime.world import World

from . import _common
from ._matmul import Epilogue, Tiles, stored
from .all_gather_matmul import CALL, Push, push_kernel


@triton.jit
def meet_kernel(bar_ptr, world):
    """Every rank's product of the launch before has been computed, so its inbox may be overwritten."""
    pl.barrier(bar_ptr, world)


@triton.jit
def tell_kernel(ready_ptr, peer, world):
    """Behind a copy in a stream: `peer` has it."""
    pl.signal(ready_ptr, peer, world)


@triton.jit
def copy_kernel(dst_ptr, src_ptr, n, peer, world, BLOCK: tl.constexpr):
    """In the place of a copy engine in the simulator, where a copy of torch's would escape the race detector."""
    for start in range(0, n, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        pl.store(dst_ptr + offs, tl.load(src_ptr + offs, mask=offs < n), peer, world, mask=offs < n)


class _CopySpace(NamedTuple):
    inbox: SymmetricTensor
    counters: SymmetricTensor  # ready, then the queue, then the barrier's


class _Copy(NamedTuple):
    """Rows start to end of the shard, to `peer`, and the counter that tells it."""

    peer: int
    start: int
    end: int
    target: torch.Tensor  # the peer's inbox; in the simulator mine, of which copy_kernel finds the peer's
    ready: torch.Tensor


def copy_launch(
    world: World, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, push_rows: int, tiles: Tiles, epilogue: Epilogue
) -> _common.Launch:
    """launch(a, b, out, bias), for tensors of the same facts as these, whose checks come before. push_rows: row blocks
    that one copy moves; 0: a quarter of them. Collective."""
    (m, k), N, rank, size, dtype = a.shape, b.shape[1], world.rank, world.size, a.dtype
    rows, transposed = stored(b)
    num_m, num_n = triton.cdiv(m, tiles.block_m), triton.cdiv(N, tiles.block_n)
    tasks = size * num_m * num_n
    together = min(push_rows or triton.cdiv(num_m, 4), num_m)
    groups = triton.cdiv(num_m, together)
    # One SM is left to the kernels that signal: they wait for nobody, but the product waits for them.
    programs = min(_common.num_programs(world, tasks), max(1, _common.num_programs(world, world.num_sms) - 1))

    def make() -> _CopySpace:
        inbox = empty(size, m, k, dtype=dtype, name="all_gather_matmul.copied", world=world)
        return _CopySpace(inbox, signals(size * groups + 2, name="all_gather_matmul.copies", world=world))

    space = world.workspace((CALL, "copy", m, k, dtype, tasks, programs, tiles.block_m, together), make)
    queue, bar = space.counters[-2:-1], space.counters[-1:]
    args = Push(
        a_ptr=None, b_ptr=None, bias_ptr=None, out_ptr=None, inbox_ptr=space.inbox, ready_ptr=space.counters,
        queue_ptr=queue, m=m, N=N, k=k, ld=k, num_comm_sms=0, together=together, COPIED=tl.constexpr(True),
        COLUMNS=tl.constexpr(False), TMA=tl.constexpr(_common.aligned(a, rows, out)),
        TRANSPOSED=tl.constexpr(transposed), EPILOGUE=tl.constexpr(epilogue), BLOCK_M=tl.constexpr(tiles.block_m),
        BLOCK_N=tl.constexpr(tiles.block_n), BLOCK_K=tl.constexpr(tiles.block_k),
        CHUNK=tl.constexpr(triton.cdiv(k, tiles.block_k) * tiles.block_k), GROUP=tl.constexpr(tiles.group),
    )  # fmt: skip
    step = together * tiles.block_m
    stream, mine = _side_stream(world), space.inbox[rank]

    def part(g: int, peer: int) -> _Copy:
        start, end = g * step, min(m, (g + 1) * step)
        target = mine[start:end]
        ready = space.counters[rank * groups + g :]
        return _Copy(peer, start, end, target if stream is None else target.peer(peer), ready)

    # Every peer's first rows before anybody's next.
    copies = [part(g, (rank + d) % size) for g in range(groups) for d in range(1, size)]

    def copied(copy: _Copy, source: torch.Tensor) -> None:
        if stream is not None:
            copy.target.copy_(source, non_blocking=True)
        else:
            beside(copy_kernel, (1,), copy.target, source, source.numel(), copy.peer, world.device, 1024)

    meet = cooperative_launch(world, meet_kernel, (1,), num_warps=1)
    start, same = cooperative_launch(world, push_kernel, (programs,), **tiles.launch_options()), args[4:]

    def launch(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        source = a.plain() if isinstance(a, SymmetricTensor) else a
        meet(bar, world.device)
        with _aside(stream):
            for copy in copies:
                copied(copy, source[copy.start : copy.end])
                beside(tell_kernel, (1,), copy.ready, copy.peer, world.device, num_warps=1)
        start(Push(a, b.t() if transposed else b, bias, out, *same), world.device)
        if stream is not None:  # until then `a` may not be overwritten
            torch.cuda.current_stream(world.torch_device).wait_stream(stream)
        return out

    return launch


def _side_stream(world: World) -> torch.cuda.Stream | None:
    """A stream for copies beside the product; None in the simulator, where everything is done at once."""
    if world.torch_device.type != "cuda":
        return None
    return world.workspace(("pkt.kernels", "copies"), lambda: torch.cuda.Stream(world.torch_device))


@contextlib.contextmanager
def _aside(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """What is queued inside runs on `stream`, behind what the current one has so far."""
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        yield
