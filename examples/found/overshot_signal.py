"""A signal set to the number of the call and compared for equality: a fast rank overshoots it. See docs/found.md."""

import torch
import triton
import triton.language as tl

import pkt
import pkt.language as pl


@triton.jit
def pull(
    buffer,  # int32 (2, N) on every rank: two halves, used in turn
    flags,  # int32 (size,) on every rank: the last call that each rank has published
    out,  # int32 (size, N) of this rank
    call,
    world,
    MENDED: tl.constexpr,
    N: tl.constexpr,
):
    i = tl.arange(0, N)
    half = buffer + (call % 2) * N
    tl.store(half + i, i + call + world.rank)
    for r in tl.static_range(world.size):
        pl.signal(flags + world.rank, r, world, call, op="set")
    for r in tl.static_range(world.size):
        if MENDED:
            pl.wait(flags + r, call, world, "ge")
        else:
            pl.wait(flags + r, call, world, "eq")
        tl.store(out + r * N + i, pl.load(half + i, r, world))


def main(world, mended):
    buffer, flags = pkt.zeros(2, 8, dtype=torch.int32), pkt.signals(2)
    out = torch.zeros(2, 8, dtype=torch.int32, device=world.torch_device)
    for call in range(1, 4):
        pull[(1,)](buffer, flags, out, call, world.device, mended, 8)
        assert out[:, 0].tolist() == [call, call + 1]


if __name__ == "__main__":
    (finding,) = pkt.simulate(main, ranks=2, seeds=20, args=(False,), max_findings=1).findings
    print(finding.failure)
    pkt.simulate(main, ranks=2, seeds=20, args=(True,)).check()
