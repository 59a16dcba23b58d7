"""A reduce-scatter by tiles of the whole matrix: a tile on the border belongs to one rank only. See docs/found.md."""

import torch
import triton
import triton.language as tl

import pkt
import pkt.language as pl


@triton.jit
def reduce_scatter(
    part,  # int32 (size * rows,) on every rank: its part of the sum
    out,  # int32 (rows,) of this rank: rows rank * rows ... of the sum
    bar,
    rows,
    world,
    MENDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tile = tl.program_id(0)
    pl.barrier(bar + tile, world)
    first = world.rank * rows
    if MENDED:  # tiles of my own rows
        i = first + tile * BLOCK + tl.arange(0, BLOCK)
        mine = tile * BLOCK < rows
    else:  # tiles of all rows, mine if their first row is
        i = tile * BLOCK + tl.arange(0, BLOCK)
        mine = (tile * BLOCK >= first) & (tile * BLOCK < first + rows)
    if mine:
        total = tl.zeros((BLOCK,), tl.int32)
        for r in tl.static_range(world.size):
            total += pl.load(part + i, r, world, mask=i < world.size * rows, other=0)
        tl.store(out + i - first, total, mask=i < first + rows)


def main(world, mended):
    rows = 6  # a tile of 4 rows straddles the ranks' border
    part, bar = pkt.full(2 * rows, 1, dtype=torch.int32), pkt.signals(3)
    out = torch.zeros(rows, dtype=torch.int32, device=world.torch_device)
    reduce_scatter[(3,)](part, out, bar, rows, world.device, mended, 4)
    world.barrier()
    assert out.tolist() == [2] * rows, f"rank {world.rank} has {out.tolist()}"


if __name__ == "__main__":
    (finding,) = pkt.simulate(main, ranks=2, seeds=20, args=(False,), max_findings=1).findings
    print(finding.failure)
    pkt.simulate(main, ranks=2, seeds=20, args=(True,)).check()
