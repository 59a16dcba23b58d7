"""The functions of pkt.language called from Gluon kernels.

In Triton 3.6 and 3.9 Gluon's front end compiles @triton.jit helpers with its own semantics, so one definition serves
both languages. Functions that need a block layout (multimem, tiles) work in Triton only. In Gluon `wait` returns each
thread's own value.
"""

import pytest
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import pkt.language as pl
from pkt.language.inspect import count_markers, device_world

from .compiled import ARCHS, compiled, count, instructions, order, waits

DRAIN = ["cp.async.bulk.wait_group", "fence.proxy.async.global", "bar.sync"]


@gluon.jit
def kernel(x, flags, world, B: gl.constexpr, LAYOUT: gl.constexpr):
    epoch = pl.epoch(flags, world)
    o = gl.arange(0, B, LAYOUT)
    v = gl.load(x + o)
    peer = (world.rank + 1) % world.size
    gl.store(pl.peer(x + o, peer, world), v)
    pl.signal(flags, peer, world)
    pl.wait(flags, epoch, world)
    gl.store(x + B + o, pl.load(x + o, 3, world))


@gluon.jit
def others_kernel(flags, world):
    pl.signal_all(flags, world)
    pl.barrier(flags + 3, world)
    pl.world_barrier(flags + 4, world)
    pl.grid_barrier(flags + 6, world)
    if pl.test(flags + 8, 1, world):
        pl.quiet()
    pl.atomic_add(flags + 9, 1, 2, world)


@gluon.jit
def worker(flags, world):
    pl.wait(flags, 1, world)
    pl.signal(flags + 1, 2, world)


@gluon.jit
def idle(flags, world):
    pl.fence()


@gluon.jit
def partitions_kernel(flags, world):
    gl.warp_specialize([(idle, (flags, world)), (worker, (flags, world))], [4], [24])


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_gluon_compiles_a_push_with_a_signal(arch, rank):
    layout = gl.BlockedLayout([8], [32], [4], [0])
    k = compiled(kernel, "*bf16", "*i32", device_world(rank), B=1024, LAYOUT=layout, arch=arch)
    epoch = "one:atomic.relaxed.gpu.add.u64"
    assert order(k) == [
        epoch, epoch, "ld.global.v4.b32", "st.global.v4.b32", *DRAIN, "one:atomic.release.sys.add.u32",
        "pkt.wait", "bar.sync", "ld.global.v4.b32", "st.global.v4.b32",
    ]  # fmt: skip
    assert count_markers(k.asm["ptx"]) == {"wait": 1, "signal": 1}


@pytest.mark.parametrize("arch", ARCHS)
def test_gluon_compiles_the_other_sync_functions(arch):
    k = compiled(others_kernel, "*i32", device_world(), arch=arch)
    assert len(waits(k)) == 3
    # signal_all; barrier; world_barrier of one program, and of several
    ends = (4, 4 + 4)  # the compiler may merge the last two
    assert count(k, r"(atom|red)\.global\.sys\.relaxed\.add\.u32") - 4 - 4 in ends
    assert count_markers(k.asm["ptx"]) == {"wait": 3, "signal": 5}


@pytest.mark.parametrize("arch", ARCHS)
def test_a_gluon_partition_joins_its_own_threads(arch):
    k = compiled(partitions_kernel, "*i32", device_world(), arch=arch)
    assert count_markers(k.asm["ptx"]) == {"wait": 1, "signal": 1}
    # the barriers join the partition's 128 threads, not the kernel's 256
    barriers = [x.operands for x in instructions(k) if x.op == "bar.sync"]
    assert len(barriers) >= 2
    assert set(barriers) == {"2, 128"}
