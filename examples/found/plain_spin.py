"""A receiver that spins on a plain load: nothing orders its later loads. See docs/found.md."""

import torch
import triton
import triton.language as tl

import pkt
import pkt.language as pl


@triton.jit
def push(
    box,  # int32 (N,) on every rank
    flag,  # int32 (1,) on every rank
    out,  # int32 (N,) of this rank
    world,
    MENDED: tl.constexpr,
    N: tl.constexpr,
):
    i = tl.arange(0, N)
    rank = tl.cast(world.rank, tl.int32)
    other = 1 - rank
    pl.store(box + i, i + other, other, world)
    pl.atomic_add(flag, 1, other, world, sem="release")
    if MENDED:
        while pl.load_acquire(flag, rank, world) == 0:
            pass
    else:
        while tl.load(flag) == 0:
            pass
    tl.store(out + i, tl.load(box + i))


def main(world, mended):
    box, flag = pkt.zeros(8, dtype=torch.int32), pkt.zeros(1, dtype=torch.int32)
    out = torch.zeros(8, dtype=torch.int32, device=world.torch_device)
    push[(1,)](box, flag, out, world.device, mended, 8)
    assert out.tolist() == list(range(world.rank, world.rank + 8))


if __name__ == "__main__":
    (finding,) = pkt.simulate(main, ranks=2, seeds=20, args=(False,), max_findings=1).findings
    print(finding.failure)
    pkt.simulate(main, ranks=2, seeds=20, args=(True,)).check()
