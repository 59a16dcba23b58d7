"""all_gather_matmul pushed by the copy engines: C = gathered A @ B, A sharded by rows, and no SM moves data.

On a stream of its own this rank copies its shard, some row blocks at a time, into the inbox of every peer, and behind
each copy the number of the launch. The product is push_kernel, which waits for it row block by row block. The inbox is
not halved by the parity of the launch, which the host does not know in a replay: all ranks meet in a kernel before the
copies begin. (size - 1) * m * k * itemsize bytes out of and into each rank.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pkt.runtime.launch.launch import cooperative_launch
from pkt.runtime.world import World

from ..shared import common as _common
from ..shared import copies as _copies
from ..shared.tile_product import Epilogue, Tiles, stored
from .plain import Push, push_kernel


def copy_launch(
    world: World, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, push_rows: int, tiles: Tiles, epilogue: Epilogue
) -> _common.Launch:
    """launch(a, b, out, bias), for tensors of the same facts as these, whose checks come before. push_rows: row blocks
    that one copy moves; 0: a quarter of them. Collective."""
    (m, k), N, size, dtype = a.shape, b.shape[1], world.size, a.dtype
    rows, transposed = stored(b)
    num_m, num_n = triton.cdiv(m, tiles.block_m), triton.cdiv(N, tiles.block_n)
    tasks = size * num_m * num_n
    together = min(push_rows or triton.cdiv(num_m, 4), num_m)
    programs = _common.num_programs(world, tasks)
    copies = _copies.gathering(world, m, k, dtype, together * tiles.block_m)
    args = Push(
        a_ptr=None, b_ptr=None, bias_ptr=None, out_ptr=None, inbox_ptr=copies.inbox, ready_ptr=copies.counters,
        queue_ptr=None, m=m, N=N, k=k, ld=k, num_comm_sms=0, together=together,
        COPIED=tl.constexpr(True), COLUMNS=tl.constexpr(False), TMA=tl.constexpr(_common.aligned(a, rows, out)),
        TRANSPOSED=tl.constexpr(transposed), EPILOGUE=tl.constexpr(epilogue), BLOCK_M=tl.constexpr(tiles.block_m),
        BLOCK_N=tl.constexpr(tiles.block_n), BLOCK_K=tl.constexpr(tiles.block_k),
        CHUNK=tl.constexpr(triton.cdiv(k, tiles.block_k) * tiles.block_k), GROUP=tl.constexpr(tiles.group),
    )  # fmt: skip
    start, same = cooperative_launch(world, push_kernel, (programs,), **tiles.launch_options()), args[4:]

    def launch(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        join = copies.begin(a)
        start(Push(a, b.t() if transposed else b, bias, out, *same), world.device)
        join()
        return out

    return launch
