"""A sum by atomics whose scope is one GPU, on memory to which two GPUs add. See docs/found.md."""

import torch
import triton
import triton.language as tl

import pkt
import pkt.language as pl


@triton.jit
def add_everywhere(
    x,  # int32 (N,) of this rank
    total,  # int32 (N,) on every rank: the sum of all ranks' x
    world,
    MENDED: tl.constexpr,
    N: tl.constexpr,
):
    i = tl.arange(0, N)
    value = tl.load(x + i)
    for r in tl.static_range(world.size):
        if MENDED:
            pl.atomic_add(total + i, value, r, world, sem="relaxed")  # scope "sys"
        else:
            tl.atomic_add(pl.peer(total + i, r, world), value)  # Triton's default: scope "gpu"


def main(world, mended):
    x = torch.full((8,), world.rank + 1, dtype=torch.int32, device=world.torch_device)
    total = pkt.zeros(8, dtype=torch.int32)
    add_everywhere[(1,)](x, total, world.device, mended, 8)
    world.barrier()
    assert total.tolist() == [3] * 8


if __name__ == "__main__":
    (finding,) = pkt.simulate(main, ranks=2, seeds=20, args=(False,), max_findings=1).findings
    print(finding.failure)
    pkt.simulate(main, ranks=2, seeds=20, args=(True,)).check()
