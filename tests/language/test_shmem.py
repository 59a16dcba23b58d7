"""OpenSHMEM names: they compile to the same instructions as pkt's own functions."""

import pytest
import triton
import triton.language as tl

import pkt.language as pl
from pkt.language.inspect import device_world

from .compiled import ARCHS, compiled, count, order

DRAIN = ["cp.async.bulk.wait_group", "fence.proxy.async.global", "bar.sync"]


@triton.jit
def identity_kernel(x, world):
    tl.store(x, pl.shmem.my_pe(world))
    tl.store(x + 1, pl.shmem.n_pes(world))
    pl.shmem.int_p(x + 2, 7, 3, world)
    tl.store(pl.shmem.remote_ptr(x + 3, 2, world), 1)


@triton.jit
def move_kernel(dst, src, flag, n, world, HOW: tl.constexpr):
    if HOW == "putmem":
        pl.shmem.putmem(dst, src, n, 3, world)
    elif HOW == "putmem_nbi":
        pl.shmem.putmem_nbi(dst, src, n, 3, world)
    elif HOW == "getmem":
        pl.shmem.getmem(dst, src, n, 3, world)
    elif HOW == "getmem_nbi":
        pl.shmem.getmem_nbi(dst, src, n, 3, world)
    elif HOW == "putmem_signal":
        pl.shmem.putmem_signal(dst, src, n, flag, 1, pl.shmem.SIGNAL_ADD, 3, world)
    elif HOW == "putmem_signal_nbi":
        pl.shmem.putmem_signal_nbi(dst, src, n, flag, 1, pl.shmem.SIGNAL_SET, 3, world)
    else:
        pl.shmem.broadcast(dst, src, n, 2, flag, world)


@triton.jit
def sync_kernel(flag, world, HOW: tl.constexpr):
    if HOW == "signal_op":
        pl.shmem.signal_op(flag, 4, pl.shmem.SIGNAL_ADD, 3, world)
    elif HOW == "signal_wait_until":
        pl.shmem.signal_wait_until(flag, pl.shmem.CMP_GE, 4, world)
    elif HOW == "sync_all":
        pl.shmem.sync_all(flag, world)
    elif HOW == "barrier_all":
        pl.shmem.barrier_all(flag, world)
    elif HOW == "quiet":
        pl.shmem.quiet()
    else:
        pl.shmem.fence()


@pytest.mark.parametrize("arch", ARCHS)
def test_my_pe_n_pes_and_int_p_compile_to_one_store(arch):
    k = compiled(identity_kernel, "*i32", device_world(2), arch=arch)
    assert order(k) == ["one:st.global.b32"] * 4


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("how", ["putmem", "putmem_nbi", "getmem", "getmem_nbi"])
def test_putmem_and_getmem_are_16_bytes_wide(arch, how):
    k = compiled(move_kernel, "*bf16", "*bf16", "*i32", 65536, device_world(2), HOW=how, arch=arch)
    assert count(k, r"ld\.global\.v4\.b32") == count(k, r"st\.global\.v4\.b32") == 4
    assert count(k, r"(ld|st)\.global") == 8


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("how", "atomic"), [("putmem_signal", "add.u32"), ("putmem_signal_nbi", "exch.b32")])
def test_putmem_signal_releases_once_after_the_data(arch, how, atomic):
    k = compiled(move_kernel, "*bf16", "*bf16", "*i32", 65536, device_world(2), HOW=how, arch=arch)
    ops = order(k)
    assert ops[-4:] == [*DRAIN, f"one:atomic.release.sys.{atomic}"]
    assert all(op.startswith(("ld.global", "st.global")) for op in ops[:-4])


@pytest.mark.parametrize("arch", ARCHS)
def test_broadcast_pushes_to_every_pe_then_passes_a_barrier(arch):
    k = compiled(move_kernel, "*bf16", "*bf16", "*i32", 65536, device_world(2), HOW="broadcast", arch=arch)
    ops = order(k)
    one = "one:atomic.relaxed.sys.add.u32"
    tail = [*DRAIN, "fence.acq_rel.sys", one, one, one, one, "pkt.wait", "bar.sync"]
    assert ops[-len(tail) :] == tail
    assert count(k, r"st\.global\.v4\.b32") == 4 * 4


@pytest.mark.parametrize("arch", ARCHS)
def test_sync_names_compile_to_pkts_functions(arch):
    def ops(how):
        return order(compiled(sync_kernel, "*i32", device_world(2), HOW=how, arch=arch))

    assert ops("signal_op") == [*DRAIN, "one:atomic.release.sys.add.u32"]
    assert ops("signal_wait_until") == ["pkt.wait", "bar.sync"]
    assert ops("sync_all") == ops("barrier_all")
    assert ops("sync_all")[-2:] == ["pkt.wait", "bar.sync"]
    assert ops("fence") == ["fence.acq_rel.sys"]
    assert ops("quiet")[:2] == DRAIN[:2]
