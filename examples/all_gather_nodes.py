"""All-gather over several nodes: rank r ends with every rank's x (n,), in rank order.

    python examples/all_gather_nodes.py     2 nodes of 4 ranks in the simulator, with no GPU

Each rank puts its own x into the `out` of the ranks with its local_rank on the other nodes (its rail), and passes what
arrives there to the ranks of its node while the network carries the next part. A rank sends (nodes - 1) * n elements
over the network, and nodes * (node_size - 1) * n within its node. A shard crosses the network once for each node, and
not once for each rank. After Triton-distributed's two-dimensional push (all_gather_push_2d).

On GPUs the kernel has run on two nodes of one rank each, in benchmarks/far.py; on more only in the simulator.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

import pkt
import pkt.language as pl


@triton.jit
def all_gather_kernel(
    x_ptr,  # (n,) this rank's
    out_ptr,  # (ranks, n) on every rank; its rail stores over the network, its node by plain stores
    far_ptr,  # int32 (nodes, programs) on every rank: the part of a node has arrived over the rail
    near_ptr,  # int32 (programs,) on every rank: counts the parts that ranks of the node have stored
    bar_ptr,  # int32 (programs,) on every rank
    n,
    world,
    node,  # the ranks of this node
    rail,  # the ranks with this local_rank
    BLOCK: tl.constexpr,
):
    pid, programs = tl.program_id(0), tl.num_programs(0)
    launch = pl.epoch(near_ptr, world)
    me, local = tl.cast(rail.rank, tl.int32), tl.cast(node.rank, tl.int32)
    share = tl.cdiv(n, programs)
    first = tl.minimum(pid * share, n)
    count = tl.minimum(n - first, share)
    nbytes = count * (x_ptr.dtype.element_ty.primitive_bitwidth // 8)
    own = out_ptr + (me * node.size + local) * n + first
    pl.barrier(bar_ptr + pid, world)  # before overwrite: everyone has read the last launch's out
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(own + at, tl.load(x_ptr + first + at, mask=at < count), mask=at < count)
    tl.debug_barrier()  # other threads of the program send what this one has stored
    for i in tl.static_range(1, rail.size):
        to = (me + i) % rail.size
        pl.put_signal(far_ptr + me * programs + pid, to, rail, dst=own, src=own, nbytes=nbytes)
    for i in range(rail.size):
        origin = (me + rail.size - i) % rail.size  # the order in which evenly loaded rails deliver; my own part first
        if i > 0:
            pl.wait(far_ptr + origin * programs + pid, launch, world)
        part = out_ptr + (origin * node.size + local) * n + first
        for j in tl.static_range(1, node.size):
            pl.put_signal(near_ptr + pid, (local + j) % node.size, node, dst=part, src=part, nbytes=nbytes)
    pl.wait(near_ptr + pid, launch * (rail.size * (node.size - 1)), world)
    pl.quiet(world)  # before overwrite: the caller may write to out, which the network reads


def all_gather(
    x: torch.Tensor, out: torch.Tensor, world: pkt.World, programs: int = 4, block: int = 1024
) -> torch.Tensor:
    """Every rank's x (n,) into the symmetric `out` (ranks, n). Collective; x may be any tensor of out's dtype."""
    far = world.keep(("all_gather_nodes.far", programs), lambda: pkt.signals(world.nodes * programs))
    near = world.keep(("all_gather_nodes.near", programs), lambda: pkt.signals(programs))
    bar = world.keep(("all_gather_nodes.bar", programs), lambda: pkt.signals(programs))
    devices = world.device, world.on_node.device, world.rail.device
    all_gather_kernel[(programs,)](x, out, far, near, bar, x.numel(), *devices, block)
    return out


def main(world: pkt.World, n: int = 100, launches: int = 2, programs: int = 4) -> None:
    """Gather, change x and out, and gather again."""
    out = pkt.empty((world.size, n))
    for launch in range(launches):
        shards = torch.arange(world.size * n, dtype=torch.float32).reshape(world.size, n) + launch
        found = all_gather(shards[world.rank].clone(), out, world, programs, block=64)
        assert torch.equal(found.plain(), shards)
        out.fill_(-1.0)


if __name__ == "__main__":
    report: Any = pkt.simulate(main, ranks=8, node_size=4, seeds=20)
    print(report.check())
