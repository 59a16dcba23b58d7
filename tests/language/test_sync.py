"""The instructions of each synchronisation function: their order, their scopes and the threads that execute them."""

import re

import pytest
import triton
import triton.language as tl

import pkt.language as pl
from pkt.language.inspect import count_markers, device_world

from .compiled import ARCHS, compiled, count, order, reasons, waits

RANKS = (0, 1, 2, 16)  # Triton compiles 1 as a constant, and 16 as a multiple of 16
DRAIN = ["cp.async.bulk.wait_group", "fence.proxy.async.global"]
ADD = "u32"


@triton.jit
def signal_kernel(flags, dst, world, OP: tl.constexpr):
    pl.signal(flags + 3, dst, world, 5, OP)


@triton.jit
def put_signal_kernel(flags, x, y, n, dst, world):
    pl.put_signal(flags + 3, dst, world, 5, dst=y, src=x, nbytes=n)


@triton.jit
def signal_all_kernel(flags, world):
    pl.signal_all(flags, world)


@triton.jit
def wait_kernel(flags, want, world, CMP: tl.constexpr):
    pl.wait(flags, want, world, CMP)


@triton.jit
def wait_result_kernel(flags, want, world):
    tl.store(flags + 1, pl.wait(flags, want, world))


@triton.jit
def poll_kernel(flags, want, world, CMP: tl.constexpr):
    if pl.test(flags, want, world, CMP):
        tl.store(flags + 1, 1)


@triton.jit
def barrier_kernel(flags, world):
    pl.barrier(flags, world)


@triton.jit
def grid_barrier_kernel(flags, world):
    pl.grid_barrier(flags, world)


@triton.jit
def world_barrier_kernel(flags, world):
    pl.world_barrier(flags, world)


@triton.jit
def quiet_kernel(flags, world):
    pl.quiet()


@triton.jit
def fence_kernel(flags, world):
    pl.fence()


@triton.jit
def fence_sc_kernel(flags, world):
    pl.fence(sc=True)


@triton.jit
def epoch_kernel(flags, world):
    tl.store(flags, pl.epoch(flags, world))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("rank", RANKS)
def test_signal_drains_then_releases_once(arch, rank):
    for op, atomic in (("add", "add.u32"), ("set", "exch.b32")):
        k = compiled(signal_kernel, "*int32", 3, device_world(rank), op, arch=arch)
        assert order(k) == [*DRAIN, "bar.sync", f"one:atomic.release.sys.{atomic}"]
        assert count_markers(k.asm["ttir"]) == count_markers(k.asm["ptx"]) == {"wait": 0, "signal": 1}


@pytest.mark.parametrize("arch", ARCHS)
def test_put_signal_releases_what_all_threads_have_stored(arch):
    """In a node: the data is stored, then the signal sent as `signal` does."""
    k = compiled(put_signal_kernel, "*int32", "*int32", "*int32", 4000, 1, device_world(0), arch=arch)
    copied = order(k)[: -len([*DRAIN, "bar.sync", "signal"])]
    assert any(one.startswith("st.global") for one in copied)
    assert order(k)[len(copied) :] == [*DRAIN, "bar.sync", "one:atomic.release.sys.add.u32"]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("size", [1, 2, 4, 5, 8])
def test_signal_all_fences_once(arch, size):
    k = compiled(signal_all_kernel, "*int32", device_world(0, size), arch=arch)
    assert order(k) == [*DRAIN, "bar.sync", "fence.acq_rel.sys"] + ["one:atomic.relaxed.sys.add.u32"] * size


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("rank", RANKS)
def test_wait_acquires_in_a_spin_and_then_joins_the_threads(arch, rank):
    k = compiled(wait_kernel, "*int32", 7, device_world(rank), "ge", arch=arch)
    assert order(k) == ["pkt.wait", "bar.sync"]
    assert count_markers(k.asm["ttir"]) == count_markers(k.asm["ptx"]) == {"wait": 1, "signal": 0}
    (block,) = waits(k)
    ops = [x.op for x in block]
    assert ops.count("ld.acquire.sys.global.b32") == 1
    assert ops[-1] == "fence.proxy.async.global"
    # the fast path: load, compare, leave
    start = ops.index("ld.acquire.sys.global.b32")
    assert ops[start : start + 4] == ["ld.acquire.sys.global.b32", "sub.s32", "setp.ge.s32", "bra"]
    assert "trap" not in ops
    assert "exit" not in ops


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    ("cmp", "holds"),
    [
        ("ge", ["sub.s32", "setp.ge.s32"]),
        ("gt", ["sub.s32", "setp.gt.s32"]),
        ("le", ["sub.s32", "setp.le.s32"]),
        ("lt", ["sub.s32", "setp.lt.s32"]),
        ("eq", ["setp.eq.s32"]),
        ("ne", ["setp.ne.s32"]),
    ],
)
def test_each_comparison_is_of_the_signed_difference(arch, cmp, holds):
    (block,) = waits(compiled(wait_kernel, "*int32", 7, device_world(), cmp, arch=arch))
    ops = [x.op for x in block]
    start = ops.index("ld.acquire.sys.global.b32") + 1
    assert ops[start : start + len(holds)] == holds


def test_an_unknown_comparison_is_refused_by_name():
    with pytest.raises(triton.CompilationError) as caught:
        compiled(wait_kernel, "*int32", 7, device_world(), "about")
    assert "ge, gt, le, lt, eq, ne" in reasons(caught.value)


@triton.jit
def block_kernel(flags, world):
    pl.wait(flags + tl.arange(0, 16), 1, world)


@pytest.mark.parametrize(
    ("kernel", "args"), [(wait_kernel, ("*fp32", 7)), (wait_kernel, ("*i16", 7)), (block_kernel, ("*i32",))]
)
def test_a_counter_of_another_type_is_refused(kernel, args):
    with pytest.raises(triton.CompilationError) as caught:
        compiled(kernel, *args, device_world(), *(["ge"] if kernel is wait_kernel else []))
    assert "scalar pointer to int32" in reasons(caught.value)


@pytest.mark.parametrize("arch", ARCHS)
def test_multicast_worlds_fence_the_multicast_address_too(arch):
    world = device_world(multicast=True)
    k = compiled(signal_kernel, "*int32", 3, world, "add", arch=arch)
    assert order(k) == [*DRAIN, "fence.proxy.alias", "bar.sync", "one:atomic.release.sys.add.u32"]
    (block,) = waits(compiled(wait_kernel, "*int32", 7, world, "ge", arch=arch))
    assert [x.op for x in block][-2:] == ["fence.proxy.async.global", "fence.proxy.alias"]


@pytest.mark.parametrize("arch", ARCHS)
def test_threads_agree_on_the_value_found_only_where_it_is_used(arch):
    unused = compiled(wait_kernel, "*int32", 7, device_world(), "ge", arch=arch)
    used = compiled(wait_result_kernel, "*int32", 7, device_world(), arch=arch)
    assert count(unused, "shfl") == 0
    assert count(unused, r"[ls][dt]\.shared") == 0
    # a maximum over 32 lanes, then over the 4 warps through shared memory
    assert count(used, r"shfl|redux") >= 1
    assert count(used, r"st\.shared") >= 1


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("cmp", ["ge", "gt", "le", "lt", "eq", "ne"])
def test_pl_test_reads_once_in_one_thread(arch, cmp):
    k = compiled(poll_kernel, "*int32", 7, device_world(), cmp, arch=arch)
    ops = order(k)
    # Triton turns the addition of 0 into a load
    assert ops[0] in ("one:atomic.acquire.sys.add.u32", "one:ld.global.sys.acquire.b32")
    assert ops[1] == "fence.proxy.async.global"
    assert all(op.startswith("one:st.global") for op in ops[2:])
    assert count(k, "bra") <= 2  # no spin: forward branches at most
    assert count_markers(k.asm["ptx"]) == {"wait": 0, "signal": 0}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2), (1, 3), (2, 4), (0, 8)])
def test_barrier_reads_its_counter_then_fences_once_then_arrives_everywhere(arch, rank, size):
    k = compiled(barrier_kernel, "*int32", device_world(rank, size), arch=arch)
    one = "one:atomic.relaxed.sys.add.u32"
    read = "ld.relaxed.sys.global.b32"
    assert order(k) == [read, *DRAIN, "bar.sync", "fence.acq_rel.sys"] + [one] * size + ["pkt.wait", "bar.sync"]
    (block,) = waits(k)
    ops = [x.op for x in block]
    start = ops.index("ld.acquire.sys.global.b32")
    assert ops[start + 1 : start + 3] == ["xor.b32", "setp.lt.s32"]


@pytest.mark.parametrize("arch", ARCHS)
def test_grid_barrier_releases_once_then_spins(arch):
    k = compiled(grid_barrier_kernel, "*int32", device_world(), arch=arch)
    assert order(k) == [*DRAIN, "bar.sync", "one:atomic.release.sys.add.u32", "pkt.wait", "bar.sync"]


@pytest.mark.parametrize("arch", ARCHS)
def test_world_barrier_arrives_at_every_rank_once_a_rank(arch):
    k = compiled(world_barrier_kernel, "*int32", device_world(0, 4), arch=arch)
    everywhere = ["fence.acq_rel.sys"] + ["one:atomic.relaxed.sys.add.u32"] * 4
    # With one program world_barrier acts as `barrier`; with more the last one arrives. Triton 3.9 merges the branches.
    ways = ["one:atomic.acq_rel.gpu.add.u32", *everywhere]
    before, after = ["ld.relaxed.sys.global.b32", *DRAIN, "bar.sync"], ["pkt.wait", "bar.sync"]
    assert order(k) in ([*before, *everywhere, *ways, *after], [*before, *ways, *after])


@pytest.mark.parametrize("arch", ARCHS)
def test_quiet_and_fence_compile_to_their_fences(arch):
    assert order(compiled(quiet_kernel, "*int32", device_world(), arch=arch)) == [
        *DRAIN,
        "fence.proxy.alias",
        "fence.acq_rel.sys",
        "bar.sync",
    ]
    assert order(compiled(fence_kernel, "*int32", device_world(), arch=arch)) == ["fence.acq_rel.sys"]
    assert order(compiled(fence_sc_kernel, "*int32", device_world(), arch=arch)) == ["fence.sc.sys"]


@pytest.mark.parametrize("arch", ARCHS)
def test_epoch_counts_an_arrival_in_one_thread(arch):
    k = compiled(epoch_kernel, "*int32", device_world(), arch=arch)
    one = "one:atomic.relaxed.gpu.add.u64"
    assert order(k) == [one, one, "one:st.global.b32"]


@pytest.mark.parametrize("arch", ARCHS)
def test_all_threads_get_the_value_farthest_ahead(arch):
    """Of the values that the threads have found: a smaller one could be of an earlier round."""
    k = compiled(wait_result_kernel, "*int32", 7, device_world(0, 2), arch=arch)
    text = k.asm["ptx"]
    assert "max.s32" in text
    assert not re.search(r"\bmin\.(?!u32 a, a,)|\.min\.|max\.u32", text)  # but that of naps


@pytest.mark.parametrize("arch", ARCHS)
def test_an_epoch_counts_programs_in_32_bits(arch):
    text = compiled(epoch_kernel, "*int32", device_world(0, 2), arch=arch).asm["ptx"]
    assert not re.search(r"cvt\.\w+\.[su](8|16)\b|cvt\.[su](8|16)\.", text)
    assert "atom.global.gpu.relaxed.add.u64" in text.replace(".gpu.global", ".global.gpu") or "add.u64" in text
