"""A barrier before a reduction that is told that no access came before it, so it releases none. See docs/found.md."""

import torch
import triton
import triton.language as tl

import pkt
import pkt.language as pl


@triton.jit
def meet(pads, world, SEND: tl.constexpr, WAIT: tl.constexpr):
    """Set a pad to 1 on every rank, then take every rank's 1 from my own pads."""
    for r in tl.static_range(world.size):
        while pl.atomic_cas(pads + world.rank, 0, 1, r, world, sem=SEND) != 0:
            pass
    for r in tl.static_range(world.size):
        while pl.atomic_cas(pads + r, 1, 0, world.rank, world, sem=WAIT) != 1:
            pass


@triton.jit
def reduce(
    part,  # int32 (N,) on every rank: its part of the sum
    pads,  # int32 (size,) on every rank
    out,  # int32 (N,) of this rank
    world,
    MENDED: tl.constexpr,
    N: tl.constexpr,
):
    i = tl.arange(0, N)
    tl.store(part + i, i + world.rank)
    if MENDED:
        meet(pads, world, "release", "acquire")
    else:
        meet(pads, world, "relaxed", "acquire")
    total = tl.zeros((N,), tl.int32)
    for r in tl.static_range(world.size):
        total += pl.load(part + i, r, world)
    tl.store(out + i, total)
    meet(pads, world, "release", "relaxed")


def main(world, mended):
    part, pads = pkt.zeros(8, dtype=torch.int32), pkt.zeros(2, dtype=torch.int32)
    out = torch.zeros(8, dtype=torch.int32, device=world.torch_device)
    reduce[(1,)](part, pads, out, world.device, mended, 8)
    assert out.tolist() == list(range(1, 17, 2))


if __name__ == "__main__":
    (finding,) = pkt.simulate(main, ranks=2, seeds=20, args=(False,), max_findings=1).findings
    print(finding.failure)
    pkt.simulate(main, ranks=2, seeds=20, args=(True,)).check()
