"""A product's tiles, of which the compiler is told that none has the index 0. See docs/found.md."""

import torch
import triton
import triton.language as tl

import pkt
import pkt.language as pl


@triton.jit
def scatter(
    x,  # int32 (tiles * N,) of this rank
    out,  # int32 (size, tiles * N) on every rank; this rank stores into row `rank` of each
    tiles,
    world,
    MENDED: tl.constexpr,
    N: tl.constexpr,
):
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        if MENDED:
            tl.assume(tile >= 0)
        else:
            tl.assume(tile > 0)
        i = tile * N + tl.arange(0, N)
        row = tl.cast(world.rank, tl.int32) * tiles * N
        for r in tl.static_range(world.size):
            pl.store(out + row + i, tl.load(x + i), r, world)


def main(world, mended):
    x, out = torch.arange(32, dtype=torch.int32, device=world.torch_device), pkt.zeros(2, 32, dtype=torch.int32)
    scatter[(2,)](x, out, 4, world.device, mended, 8)
    world.barrier()
    assert torch.equal(out.plain(), x.expand(2, 32))


if __name__ == "__main__":
    (finding,) = pkt.simulate(main, ranks=2, seeds=20, args=(False,), max_findings=1).findings
    print(finding.failure)
    pkt.simulate(main, ranks=2, seeds=20, args=(True,)).check()
