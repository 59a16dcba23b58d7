"""ParallelKittens' eight primitives: TMA for tiles to a peer, multimem for all ranks, registers where rows are not
aligned."""

import pytest
import triton
import triton.language as tl

import pkt.language as pl
from pkt.language.inspect import Pointer, count_markers, device_world

from .compiled import ARCHS, compiled, count, instructions, order

WORLD = device_world(0, 4)
SWITCH = device_world(0, 4, multicast=True)
STORE = r"cp\.async\.bulk\.tensor\.2d\.global\.shared::cta\.bulk_group"
ADD = r"cp\.reduce\.async\.bulk\.tensor\.2d\.global\.shared::cta\.add\.(tile\.)?bulk_group"


def layout(dtype="bf16", r=4096, c=4096, tma=True):
    return pl.Layout(Pointer(dtype), 2, 3, r, c, tl.constexpr(tma))


@triton.jit
def store_kernel(dst, x, world, peer, R: tl.constexpr, C: tl.constexpr, ALL: tl.constexpr, ADD: tl.constexpr):
    v = tl.load(x + tl.arange(0, R)[:, None] * C + tl.arange(0, C)[None, :])
    coord = (1, 2, tl.program_id(0), tl.program_id(1))
    if ALL:
        if ADD:
            pl.tile.store_add_async(dst, v, coord, world)
        else:
            pl.tile.store_async(dst, v, coord, world)
    else:
        if ADD:
            pl.tile.store_add_async(dst, v, coord, world, peer)
        else:
            pl.tile.store_async(dst, v, coord, world, peer)
    pl.signal(x.to(tl.pointer_type(tl.int32)), peer, world)


@triton.jit
def loop_kernel(dst, x, n, world, peer, R: tl.constexpr, C: tl.constexpr):
    v = tl.load(x + tl.arange(0, R)[:, None] * C + tl.arange(0, C)[None, :])
    for i in range(n):
        pl.tile.store_async(dst, v, (0, 0, i, 0), world, peer)


@triton.jit
def reduce_kernel(dst, src, world, R: tl.constexpr, C: tl.constexpr, OP: tl.constexpr):
    pl.tile.reduce(dst, (0, 0, 1, 2), src, (1, 2, tl.program_id(0), tl.program_id(1)), world, R, C, OP)


@triton.jit
def all_reduce_kernel(x, world, R: tl.constexpr, C: tl.constexpr):
    pl.tile.all_reduce(x, (1, 2, tl.program_id(0), tl.program_id(1)), world, R, C)


@triton.jit
def sync_kernel(bar, i, world):
    pl.tile.signal(bar, (0, 0, i, 1), 3, world)
    pl.tile.signal_all(bar, (0, 0, i, 2), world, 2)
    tl.store(bar.ptr, pl.tile.wait(bar, (0, 0, i, 1), 5, world))
    pl.tile.barrier(bar, (0, 0, i, 3), world)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("add", [False, True])
def test_a_tile_to_a_peer_goes_by_tma_and_lands_before_the_signal(arch, rank, add):
    k = compiled(store_kernel, layout(), "*bf16", device_world(rank), 3, R=64, C=64, ALL=False, ADD=add, arch=arch)
    assert count(k, ADD if add else STORE) == 1
    assert count(k, STORE if add else ADD) == 0
    assert count(k, r"st\.global|multimem") == 0
    ops = order(k)
    sent = next(i for i, op in enumerate(ops) if op.startswith(("cp.async.bulk.tensor", "cp.reduce")))
    assert ops[-4:] == [
        "cp.async.bulk.wait_group",
        "fence.proxy.async.global",
        "bar.sync",
        "one:atomic.release.sys.add.u32",
    ]
    assert sent < len(ops) - 4
    assert count_markers(k.asm["ttir"]) == count_markers(k.asm["ptx"])


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("add", [False, True])
def test_a_tile_to_every_rank_without_a_switch_is_a_tma_store_to_each(arch, add):
    k = compiled(store_kernel, layout(), "*bf16", WORLD, 3, R=64, C=64, ALL=True, ADD=add, arch=arch)
    assert count(k, ADD if add else STORE) == 4
    assert count(k, "multimem") == 0


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("add", [False, True])
def test_a_tile_to_every_rank_through_the_switch(arch, add):
    k = compiled(store_kernel, layout(), "*bf16", SWITCH, 3, R=64, C=64, ALL=True, ADD=add, arch=arch)
    # 64 x 64 bf16: 4 accesses of 16 bytes by each of 128 threads
    assert count(k, r"multimem\.red\.relaxed\.sys\.global\.add\.v4\.bf16x2") == (4 if add else 0)
    assert count(k, r"multimem\.st\.relaxed\.sys\.global\.v4\.f32") == (0 if add else 4)
    assert count(k, f"{STORE}|{ADD}") == 0


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("add", [False, True])
def test_rows_that_tma_cannot_address_go_through_registers(arch, add):
    k = compiled(store_kernel, layout(c=4095, tma=False), "*bf16", SWITCH, 3, R=64, C=64, ALL=True, ADD=add, arch=arch)
    assert count(k, f"{STORE}|{ADD}|multimem") == 0
    assert (
        count(k, r"(atom|red)\.global\.sys\.relaxed\.add\.noftz\.bf16" if add else r"st\.global\.b16")
        == 4 * 64 * 64 // 128
    )


@pytest.mark.parametrize("arch", ARCHS)
def test_registers_are_stored_16_bytes_wide_where_rows_allow(arch):
    k = compiled(store_kernel, layout(tma=False), "*bf16", WORLD, 3, R=64, C=64, ALL=False, ADD=False, arch=arch)
    assert count(k, r"st\.global\.v4\.b32") == 4


@pytest.mark.parametrize("arch", ARCHS)
def test_the_descriptor_of_one_matrix_is_made_before_the_loop(arch):
    k = compiled(loop_kernel, layout(), "*bf16", 7, WORLD, 3, R=64, C=64, arch=arch)
    ops = [x.op for x in instructions(k)]
    made = [i for i, op in enumerate(ops) if op.startswith("tensormap.replace")]
    sent = [i for i, op in enumerate(ops) if op.startswith("cp.async.bulk.tensor")]
    backward = [i for i, op in enumerate(ops) if op == "bra" and i > sent[0]]
    assert len(made) in (11, 13)  # Triton 3.9, 3.6
    assert made[-1] < sent[0] < backward[-1]
    assert len(sent) == 1


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("op", ["add", "min", "max"])
def test_tile_reduce_reads_through_the_switch(arch, op):
    k = compiled(reduce_kernel, layout(), layout(), SWITCH, R=64, C=64, OP=op, arch=arch)
    form = {"add": "add.acc::f32.v4.bf16x2", "min": "min.v4.bf16x2", "max": "max.v4.bf16x2"}[op]
    assert count(k, "multimem.ld_reduce.relaxed.sys.global." + form) == 4
    assert count(k, r"st\.global\.v4\.b32") == 4
    assert count(k, r"shfl|(ld|st)\.shared|stmatrix") == 0
    k = compiled(reduce_kernel, layout(), layout(), WORLD, R=64, C=64, OP=op, arch=arch)
    assert count(k, "multimem") == 0
    assert count(k, r"ld\.global\.v4\.b32") == 4 * 4


@pytest.mark.parametrize("arch", ARCHS)
def test_tile_all_reduce_reads_and_writes_every_rank_once(arch):
    k = compiled(all_reduce_kernel, layout(), SWITCH, R=64, C=64, arch=arch)
    assert count(k, r"multimem\.ld_reduce") == count(k, r"multimem\.st") == 4
    assert count(k, r"(ld|st)\.global|shfl|(ld|st)\.shared") == 0
    k = compiled(all_reduce_kernel, layout(), WORLD, R=64, C=64, arch=arch)
    assert count(k, r"ld\.global\.v4\.b32") == count(k, r"st\.global\.v4\.b32") == 4 * 4


@pytest.mark.parametrize("arch", ARCHS)
def test_signals_and_waits_take_elements_of_a_layout(arch):
    k = compiled(sync_kernel, pl.Layout(Pointer("int32"), 1, 1, 64, 8, tl.constexpr(False)), 5, WORLD, arch=arch)
    drain = ["cp.async.bulk.wait_group", "fence.proxy.async.global", "bar.sync"]
    one = "one:atomic.relaxed.sys.add.u32"
    ops = order(k)
    expected = [*drain, "one:atomic.release.sys.add.u32", *drain, "fence.acq_rel.sys", one, one, one, one, "pkt.wait"]
    assert ops[: len(expected)] == expected
    tail = [*drain, "fence.acq_rel.sys", one, one, one, one, "pkt.wait", "bar.sync"]
    assert ops[-len(tail) :] == tail
    assert count_markers(k.asm["ptx"]) == {"wait": 2, "signal": 3}
