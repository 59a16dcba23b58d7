"""all_gather_matmul pushed by the copy engines: C = gathered A @ B, A sharded by rows, and no SM moves data.

On a stream of its own this rank copies its shard, some row blocks at a time, into the inbox of every peer, and behind
each copy a kernel of one program signals it: counters only grow, so a captured graph replays rightly. The product is
push_kernel, which waits row block by row block and leaves an SM free for those signals. The inbox is not halved by the
parity of the launch, which the host does not know in a replay: all ranks meet in a kernel before the copies begin.
(size - 1) * m * k * itemsize bytes out of and into each rank.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

import pkt.language as pl
from pkt.runtime.factories import empty, signals
from pkt.runtime.launch import beside, cooperative_launch
from pkt.runtime.tensor import SymmetricTensor
from pkt.runtime.world import World

from . import _common, _copies
from ._matmul import Epilogue, Tiles, stored
from .all_gather_matmul import CALL, Push, push_kernel


@triton.jit
def tell_kernel(ready_ptr, peer, world):
    """Behind a copy in a stream: `peer` has it."""
    pl.signal(ready_ptr, peer, world)


class _CopySpace(NamedTuple):
    inbox: SymmetricTensor
    counters: SymmetricTensor  # ready, then the queue


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
        return _CopySpace(inbox, signals(size * groups + 1, name="all_gather_matmul.copies", world=world))

    space = world.workspace((CALL, "copy", m, k, dtype, tasks, programs, tiles.block_m, together), make)
    args = Push(
        a_ptr=None, b_ptr=None, bias_ptr=None, out_ptr=None, inbox_ptr=space.inbox, ready_ptr=space.counters,
        queue_ptr=space.counters[-1:], m=m, N=N, k=k, ld=k, num_comm_sms=0, together=together,
        COPIED=tl.constexpr(True), COLUMNS=tl.constexpr(False), TMA=tl.constexpr(_common.aligned(a, rows, out)),
        TRANSPOSED=tl.constexpr(transposed), EPILOGUE=tl.constexpr(epilogue), BLOCK_M=tl.constexpr(tiles.block_m),
        BLOCK_N=tl.constexpr(tiles.block_n), BLOCK_K=tl.constexpr(tiles.block_k),
        CHUNK=tl.constexpr(triton.cdiv(k, tiles.block_k) * tiles.block_k), GROUP=tl.constexpr(tiles.group),
    )  # fmt: skip
    step, inbox, shard = together * tiles.block_m, _copies.layout(size, m * k)[rank], _copies.layout(m * k)

    def part(g: int, peer: int) -> tuple[list[_copies.Box], torch.Tensor]:
        """What one copy moves to `peer`, and the counter there that says so."""
        rows = slice(g * step * k, (g + 1) * step * k)
        return _copies.boxes(peer, inbox[rows], shard[rows], dtype.itemsize), space.counters[rank * groups + g :]

    # Every peer's first rows before anybody's next.
    copies = [part(g, (rank + d) % size) for g in range(groups) for d in range(1, size)]
    side, meet = _copies.Side(world), _copies.meeting(world)
    start, same = cooperative_launch(world, push_kernel, (programs,), **tiles.launch_options()), args[4:]

    def launch(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        meet()  # before overwrite: every rank's product of the launch before has been computed
        with side.behind():
            for boxes, ready in copies:
                _copies.send(world, boxes, space.inbox, a)
                beside(tell_kernel, (1,), ready, boxes[0].peer, world.device, num_warps=1)
            sent = side.mark()
        start(Push(a, b.t() if transposed else b, bias, out, *same), world.device)
        side.reach(sent)  # until then `a` may not be overwritten
        return out

    return launch
