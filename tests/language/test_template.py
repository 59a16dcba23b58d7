"""LCSC: the instructions it compiles to. The tests of the simulator and of the kernels check its results."""

import pytest
import triton
import triton.language as tl

import pkt.language as pl
from pkt.language import ptx
from pkt.language.inspect import count_markers, device_world

from .compiled import ARCHS, compiled, count, instructions, order


@triton.jit
def compute(task, a, b, c, flags, M, N, K, world, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    m = task // (N // BN) * BM
    n = task % (N // BN) * BN
    offs_m = m + tl.arange(0, BM)
    offs_n = n + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        offs_k = k + tl.arange(0, BK)
        x = tl.load(a + offs_m[:, None] * K + offs_k[None, :])
        y = tl.load(b + offs_k[:, None] * N + offs_n[None, :])
        acc = tl.dot(x, y, acc)
    tl.store(c + offs_m[:, None] * N + offs_n[None, :], acc.to(tl.bfloat16))
    pl.signal(flags + task, task % world.size, world)


@triton.jit
def communicate(task, a, b, c, flags, M, N, K, world, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    pl.wait(flags + task * world.size + world.rank, world.size, world)
    pl.tile.all_reduce(pl.Layout(c, 1, 1, M, N, True), (0, 0, task, 0), world, BM, BN)


@triton.jit
def kernel(
    a, b, c, flags, queue, M, N, K, num_tasks, num_comm_tasks, num_comm_sms, world,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    epoch = pl.epoch(flags, world)
    pl.lcsc(
        compute, communicate, (a, b, c, flags, M, N, K, world, BM, BN, BK),
        num_tasks, num_comm_tasks, queue, epoch, num_comm_sms,
    )  # fmt: skip


def compile_kernel(arch, multicast=False):
    return compiled(
        kernel, "*bf16", "*bf16", "*bf16", "*i32", "*i32", 1024, 1024, 1024, 64, 16, 8,
        device_world(0, 4, multicast=multicast), BM=128, BN=128, BK=64, arch=arch, num_warps=8, num_stages=3,
    )  # fmt: skip


@pytest.mark.parametrize("arch", ARCHS)
def test_the_compute_loop_stays_pipelined(arch):
    k = compile_kernel(arch)
    # plain loads become asynchronous copies to shared memory, several stages deep
    assert count(k, r"cp\.async\.cg\.shared\.global") > 0
    assert count(k, r"cp\.async\.wait_group") >= 1
    groups = [int(x.operands) for x in instructions(k) if x.op == "cp.async.wait_group"]
    assert max(groups) >= 1  # it waits while later stages are in flight


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("multicast", [False, True])
def test_no_wait_or_signal_is_lost_and_each_claim_is_one_atomic(arch, multicast):
    k = compile_kernel(arch, multicast)
    source, final = count_markers(k.asm["ttir"]), count_markers(k.asm["ptx"])
    assert all(final[call] >= source[call] >= 1 for call in source)
    claims = [op for op in order(k) if "relaxed.gpu.add.u32" in op]
    assert claims
    assert all(op.startswith("one:") for op in claims)
    assert count(k, r"multimem\.ld_reduce") == count(k, r"multimem\.st")
    assert (count(k, r"multimem\.st") > 0) == multicast


@triton.jit
def marked(x, MARKED: tl.constexpr):
    if MARKED:
        ptx.mark("communicate")
    tl.store(x, 1)


@pytest.mark.parametrize("arch", ARCHS)
def test_marks_of_the_timeline_compile_to_nothing(arch):
    found = [instructions(compiled(marked, "*i32", MARKED=with_mark, arch=arch)) for with_mark in (False, True)]
    assert found[0] == found[1]
