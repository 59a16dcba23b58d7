"""A message whose flag is stored in the sender's own memory, while the receiver polls its own. See docs/found.md."""

import torch
import triton
import triton.language as tl

import pkt
import pkt.language as pl


@triton.jit
def message(
    box,  # int32 (N,) on every rank; rank 0 stores into rank 1's
    flag,  # int32 (1,) on every rank; rank 1 polls its own
    out,  # int32 (N,) of this rank
    world,
    MENDED: tl.constexpr,
    N: tl.constexpr,
):
    i = tl.arange(0, N)
    if tl.cast(world.rank, tl.int32) == 0:
        pl.store(box + i, i + 1, 1, world)
        if MENDED:
            pl.store_release(flag, 1, 1, world)  # in rank 1's memory, after the data
        else:
            tl.store(flag, 1)
    else:
        if MENDED:
            while pl.load_acquire(flag, 1, world) == 0:
                pass
        else:
            while tl.load(flag) == 0:
                pass
        tl.store(out + i, tl.load(box + i))


def main(world, mended):
    box, flag = pkt.zeros(8, dtype=torch.int32), pkt.zeros(1, dtype=torch.int32)
    out = torch.zeros(8, dtype=torch.int32, device=world.torch_device)
    message[(1,)](box, flag, out, world.device, mended, 8)
    assert world.rank == 0 or out.tolist() == list(range(1, 9))


if __name__ == "__main__":
    (finding,) = pkt.simulate(main, ranks=2, seeds=20, args=(False,), max_findings=1).findings
    print(finding.failure)
    pkt.simulate(main, ranks=2, seeds=20, args=(True,)).check()
