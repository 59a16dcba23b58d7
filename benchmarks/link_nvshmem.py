"""Compare element-wise loads from a peer: NVSHMEM's device functions, called as torch calls them, and pkt's loads.

    python -m benchmarks.link_nvshmem --ranks 2

Each access gives the index of the next one, so only one is in flight. Every rank reads its successor's table.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language import core

import pkt
from benchmarks import _harness
from benchmarks import link_kernels as kernels
from benchmarks._process_group import ENVIRONMENT, prepare
from pkt.progress import steps

LINES, WORDS = 1 << 19, 32  # lines of 128 bytes: more than the caches hold
STEPS, REPEATS = 4000, 20


@core.extern
def int_g(source, pe, _semantic=None):
    """`nvshmem_int_g`: one int32 from rank `pe`."""
    types = {(core.dtype("int64"), core.dtype("int32")): ("nvshmem_int_g", core.dtype("int32"))}
    return core.extern_elementwise("", "", [source, pe], types, is_pure=False, _semantic=_semantic)


@core.extern
def getmem(target, source, nbytes, pe, _semantic=None):
    """`nvshmem_getmem`: bytes from rank `pe`."""
    word = core.dtype("int64")
    types = {(word, word, word, core.dtype("int32")): ("nvshmem_getmem", core.dtype("int32"))}
    return core.extern_elementwise("", "", [target, source, nbytes, pe], types, is_pure=False, _semantic=_semantic)


@triton.jit(do_not_specialize=["steps", "pe"])
def chase_g(table, out, steps, pe):
    """As link_kernels.chase_kernel, with `nvshmem_int_g`."""
    at = 0
    for _ in range(steps):
        at = int_g((table + at).to(tl.int64), pe)
    tl.store(out, at)


@triton.jit(do_not_specialize=["steps", "pe"])
def chase_getmem(table, out, steps, pe):
    """As link_kernels.chase_kernel, with `nvshmem_getmem` into a word of memory."""
    at = 0
    for _ in range(steps):
        getmem(out.to(tl.int64), (table + at).to(tl.int64), tl.full((), 4, tl.int64), pe)
        at = tl.load(out, volatile=True)


def measure(world: pkt.World) -> dict[str, list[float]]:
    """Microseconds of an access in each repeat, by function."""
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symm_mem
    from torch.distributed._symmetric_memory._nvshmem_triton import requires_nvshmem

    prepare(world)
    symm_mem.set_backend("NVSHMEM")
    device, peer = world.torch_device, (world.rank + 1) % world.size
    generator = torch.Generator(device=device).manual_seed(7)
    way = torch.randperm(LINES - 1, generator=generator, device=device).int() + 1
    way = torch.cat([torch.zeros_like(way[:1]), way])  # a cycle through all lines, from line 0
    theirs = symm_mem.empty(LINES * WORDS, dtype=torch.int32, device=device)
    symm_mem.rendezvous(theirs, dist.group.WORLD)  # type: ignore[arg-type]
    ours = pkt.empty(LINES * WORDS, dtype=torch.int32, name="table")
    for table in (theirs, ours.plain()):
        table.view(LINES, WORDS)[way.long(), 0] = way.roll(-1) * WORDS
    out = torch.full((1,), -1, dtype=torch.int32, device=device)
    wanted = int(way[STEPS % LINES]) * WORDS
    element, memory = requires_nvshmem(chase_g), requires_nvshmem(chase_getmem)

    def ours_chase() -> Any:
        return kernels.chase_kernel[(1,)](ours, out, STEPS, peer, world.device, False, num_warps=1)

    runs = {
        "pkt.language.load": ours_chase,
        "nvshmem_int_g": lambda: element[(1,)](theirs, out, STEPS, peer, num_warps=1),
        "nvshmem_getmem": lambda: memory[(1,)](theirs, out, STEPS, peer, num_warps=1),
    }
    found: dict[str, list[float]] = {}
    for name, run in steps(runs.items(), "transfers", None if world.rank == 0 else False):
        world.barrier()
        for _ in range(3):
            out.fill_(-1)
            run()
            world.synchronize()
            assert out.item() == wanted, f"{name}: ended at {out.item()}, not {wanted}"
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(REPEATS)]
        for begin, end in events:
            begin.record()
            run()
            end.record()
        world.synchronize()
        found[name] = [1e3 * begin.elapsed_time(end) / STEPS for begin, end in events]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    ranks = parser.parse_args().ranks
    os.environ.update(ENVIRONMENT)
    from benchmarks.link_nvshmem import measure as importable  # workers cannot import it from __main__

    found = pkt.launch(importable, ranks, "cuda", heap="1GiB", multicast=False)
    rows = [
        _harness.row(f"{name}, a peer's memory", [max(taken) for taken in zip(*(rank[name] for rank in found))], "us")
        for name in found[0]
    ]
    _harness.write("link_nvshmem", rows, ranks=ranks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
