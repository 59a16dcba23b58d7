"""Addresses and memory accesses: peer addresses are arithmetic, and accesses to them as wide as local ones."""

import re

import pytest
import triton
import triton.language as tl

import pkt.language as pl
from pkt.language.inspect import device_world

from .compiled import ARCHS, compiled, count, instructions, order, reasons

RANKS = (0, 1, 2, 16)
STRIDE = 1 << 38


@triton.jit
def store_kernel(x, y, world, B: tl.constexpr):
    o = tl.program_id(0) * B + tl.arange(0, B)
    for i in tl.static_range(1, world.size):
        pl.store(y + o, tl.load(x + o), (world.rank + i) % world.size, world)


@triton.jit
def load_kernel(x, y, n, world, B: tl.constexpr):
    o = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y + o, pl.load(x + o, (world.rank + 1) % world.size, world, mask=o < n, other=0), mask=o < n)


@triton.jit
def move_kernel(dst, src, to_rank, from_rank, world, B: tl.constexpr, HOW: tl.constexpr):
    o = tl.arange(0, B)
    if HOW == "get":
        pl.get(dst=dst + o, src=src + o, peer=from_rank, world=world)
    elif HOW == "put":
        pl.put(dst=dst + o, src=src + o, peer=to_rank, world=world)
    else:
        pl.copy(dst + o, src + o, to_rank, from_rank, world)


@triton.jit
def address_kernel(x, world):
    tl.store(pl.peer(x, 3, world), 1.0)


@triton.jit
def multicast_address_kernel(x, y, world):
    tl.store(y, pl.multicast(x, world).to(tl.int64))


@triton.jit
def atomic_kernel(x, value, world, OP: tl.constexpr, SEM: tl.constexpr):
    if OP == "add":
        pl.atomic_add(x, value, 3, world, sem=SEM)
    elif OP == "exch":
        pl.atomic_xchg(x, value, 3, world, sem=SEM)
    elif OP == "and":
        pl.atomic_and(x, value, 3, world, sem=SEM)
    elif OP == "or":
        pl.atomic_or(x, value, 3, world, sem=SEM)
    elif OP == "xor":
        pl.atomic_xor(x, value, 3, world, sem=SEM)
    elif OP == "min":
        pl.atomic_min(x, value, 3, world, sem=SEM)
    elif OP == "max":
        pl.atomic_max(x, value, 3, world, sem=SEM)
    else:
        pl.atomic_cas(x, 7, value, 3, world, sem=SEM)


@triton.jit
def ordered_kernel(x, y, world, HOW: tl.constexpr, SCOPE: tl.constexpr, B: tl.constexpr):
    offs = tl.arange(0, B) if B > 0 else 0
    if HOW == "load_acquire":
        tl.store(y + offs, pl.load_acquire(x + offs, 3, world, SCOPE))
    elif HOW == "load_relaxed":
        tl.store(y + offs, pl.load_relaxed(x + offs, 3, world, SCOPE))
    elif HOW == "store_release":
        pl.store_release(x + offs, 5, 3, world, SCOPE)
    elif HOW == "store_relaxed":
        pl.store_relaxed(x + offs, 5, 3, world, SCOPE)
    else:
        pl.atomic_add(x, 1, 3, world, sem="relaxed", scope=SCOPE)


@triton.jit
def atomic_block_kernel(x, y, n, world, B: tl.constexpr):
    o = tl.arange(0, B)
    tl.store(y + o, pl.atomic_add(x + o, 1, 3, world, mask=o < n, sem="relaxed"), mask=o < n)


@triton.jit
def pull_kernel(a, b, c, flags, K, world, B: tl.constexpr, BK: tl.constexpr, TMA: tl.constexpr):
    m = tl.arange(0, B)
    for src in range(world.size):
        pl.wait(flags + src, 1, world)
        acc = tl.zeros((B, B), tl.float32)
        if TMA:
            left = tl.make_tensor_descriptor(pl.peer(a, src, world), [B, K], [K, 1], [B, BK])
            right = tl.make_tensor_descriptor(b, [B, K], [K, 1], [B, BK])
            for k in range(0, K, BK):
                acc = tl.dot(left.load([0, k]), right.load([0, k]).T, acc)
        else:
            for k in range(0, K, BK):
                offs = m[:, None] * K + k + tl.arange(0, BK)[None, :]
                acc = tl.dot(pl.load(a + offs, src, world), tl.load(b + offs).T, acc)
        tl.store(c + src * B * B + m[:, None] * B + m[None, :], acc.to(tl.bfloat16))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("tma", [False, True])
def test_a_loop_that_reads_a_peers_matrix_is_pipelined_like_a_local_one(arch, tma):
    k = compiled(
        pull_kernel, "*bf16", "*bf16", "*bf16", "*i32", 4096, device_world(2), B=128, BK=64, TMA=tma,
        arch=arch, num_warps=8, num_stages=3,
    )  # fmt: skip
    # two operands, each in the two prologue stages and in the loop; sm_100 peels one iteration
    loads = 2 * (3 if arch == 90 else 4)
    if tma:
        assert count(k, r"cp\.async\.bulk\.tensor\.2d\.shared") == loads
    else:
        copies = [x for x in instructions(k) if x.op == "cp.async.cg.shared.global"]
        assert len(copies) == loads * (128 * 64 * 2 // 16) // 256
        assert all(", 0x10, " in x.operands + ", " for x in copies)
        assert count(k, r"ld\.global") == 0


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("dtype", ["bf16", "fp32", "fp8e4nv", "i32", "fp64"])
def test_stores_to_peers_are_16_bytes_wide(arch, rank, dtype):
    k = compiled(store_kernel, "*" + dtype, "*" + dtype, device_world(rank), B=4096, arch=arch)
    stores = [x.op for x in instructions(k) if x.op.startswith("st.global")]
    assert set(stores) <= {"st.global.v4.b32", "st.global.v2.b64"}
    itemsize = {"bf16": 2, "fp32": 4, "fp8e4nv": 1, "i32": 4, "fp64": 8}[dtype]
    assert len(stores) == 3 * 4096 * itemsize // (16 * 128)  # three peers, 128 threads, 16 bytes each
    # addresses are arithmetic: the only loads are those of the data, once a block
    loads = [x.op for x in instructions(k) if x.op.startswith("ld.global")]
    assert set(loads) == {op.replace("st", "ld") for op in stores}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("rank", RANKS)
def test_masked_loads_from_peers_are_16_bytes_wide(arch, rank):
    # 4096 is a multiple of 16, so a run of 16 bytes is inside or outside as a whole
    k = compiled(load_kernel, "*bf16", "*bf16", 4096, device_world(rank), B=2048, arch=arch)
    assert count(k, r"ld\.global\.v4\.b32") == 2
    assert count(k, r"st\.global\.v4\.b32") == 2
    assert count(k, r"(ld|st)\.global") == 4


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("how", ["get", "put", "copy"])
def test_copies_move_16_bytes_at_a_time_through_registers(arch, how):
    k = compiled(move_kernel, "*bf16", "*bf16", 2, 3, device_world(1), B=1024, HOW=how, arch=arch)
    assert order(k) == ["ld.global.v4.b32", "st.global.v4.b32"]
    # put and get compute one remote address, copy computes two
    assert count(k, r"(shl|mul\.lo|mad\.lo)\.[bsu]64") == (2 if how == "copy" else 1)


@triton.jit
def unnamed_kernel(dst, src, world, HOW: tl.constexpr):
    if HOW == "put":
        pl.put(dst, src, 1, world)
    elif HOW == "get":
        pl.get(dst, src, 1, world)
    else:
        pl.put(1, world, dst=dst)


@pytest.mark.parametrize("how", ["put", "get", "put without src"])
def test_pointers_without_names_are_refused(how):
    with pytest.raises(triton.CompilationError) as caught:
        compiled(unnamed_kernel, "*fp32", "*fp32", device_world(), how)
    assert f"name the pointers: pl.{how[:3]}(dst=, src=, peer=, world=)" in reasons(caught.value)


@triton.jit
def prefetch_kernel(x, n, B: tl.constexpr, MASKED: tl.constexpr):
    o = tl.arange(0, B)
    if MASKED:
        pl.prefetch(x + 64 * o, mask=o < n)
    else:
        pl.prefetch(x + 64 * o)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("masked", [True, False])
def test_prefetch_asks_once_for_each_line_and_loads_nothing(arch, masked):
    k = compiled(prefetch_kernel, "*bf16", 300, B=512, MASKED=masked, arch=arch)
    found = [x for x in instructions(k) if x.op == "prefetch.global.L2"]
    assert len(found) == 512 // 128  # 128 threads
    assert count(k, r"ld\.") == count(k, r"ld\.param")


def test_the_distance_is_a_multiple_of_the_stride():
    # from rank 1 to rank 3, both constant: the address is the pointer plus 2 strides
    k = compiled(address_kernel, "*fp32", device_world(1))
    assert re.search(rf"add\.s64\s+%rd\d+, %rd\d+, {2 * STRIDE};", k.asm["ptx"])
    # rank 2 is a run-time value: (3 - rank) * 2^36 elements of 4 bytes, with no multiplication and no load
    k = compiled(address_kernel, "*fp32", device_world(2))
    assert any(x.op == "sub.s64" and f", {3 * STRIDE // 4}, " in x.operands for x in instructions(k))
    assert count(k, r"mul|mad|ld\.global|ld\.const") == 0


@pytest.mark.parametrize("size", [2, 4, 5])
def test_the_multicast_window_lies_behind_the_last_rank(size):
    k = compiled(multicast_address_kernel, "*fp32", "*i64", device_world(1, size, multicast=True))
    added = [x.operands.split(", ")[-1] for x in instructions(k) if x.op == "add.s64"]
    assert added == [str((size - 1) * STRIDE)]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("sem", ["relaxed", "acquire", "release", "acq_rel"])
@pytest.mark.parametrize(
    ("op", "suffix"),
    [
        ("add", "add.u32"),
        ("exch", "exch.b32"),
        ("and", "and.b32"),
        ("or", "or.b32"),
        ("xor", "xor.b32"),
        ("min", "min.s32"),
        ("max", "max.s32"),
        ("cas", "cas.b32"),
    ],
)
def test_a_scalar_atomic_runs_once_at_system_scope_behind_a_barrier(arch, sem, op, suffix):
    k = compiled(atomic_kernel, "*i32", 5, device_world(), op, sem, arch=arch)
    before = ["bar.sync"] if sem in ("release", "acq_rel") else []
    ops = order(k)
    # Triton 3.9 adds a barrier after an acquire, which does no harm
    assert ops[: len(before) + 1] == [*before, f"one:atomic.{sem}.sys.{suffix}"]
    assert set(ops[len(before) + 1 :]) <= {"bar.sync"}


@triton.jit
def cas_kernel(x, y, n, world, B: tl.constexpr):
    o = tl.arange(0, B) if B > 0 else 0
    tl.store(y + o, pl.atomic_cas(x + o, n, 1, 3, world, sem="relaxed"))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("dtype", "bits"), [("i32", 32), ("i64", 64), ("u64", 64), ("fp32", 32), ("fp16", 16)])
def test_atomic_cas_casts_numbers_to_the_type_of_the_elements(arch, dtype, bits):
    k = compiled(cas_kernel, "*" + dtype, "*" + dtype, 7, device_world(), 0, arch=arch)
    assert count(k, rf"atom\.global\.(relaxed\.sys|sys\.relaxed)\.cas\.b{bits}") == 1
    k = compiled(cas_kernel, "*" + dtype, "*" + dtype, 7, device_world(), 512, arch=arch)
    assert count(k, rf"atom\.global\.(relaxed\.sys|sys\.relaxed)\.cas\.b{bits}") == 512 // 128


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("scope", ["sys", "gpu"])
@pytest.mark.parametrize("dtype", ["i32", "fp64"])
def test_ordered_loads_and_stores_of_a_scalar_happen_once(arch, scope, dtype):
    def ops(how):
        found = order(compiled(ordered_kernel, "*" + dtype, "*" + dtype, device_world(), how, scope, 0, arch=arch))
        return [op for op in found if not op.startswith("one:st.global")]  # the result

    bits = {"i32": 32, "fp64": 64}[dtype]
    # Triton turns the addition of 0 into a load
    for how, sem, after in (("load_acquire", "acquire", ["bar.sync"]), ("load_relaxed", "relaxed", [])):
        access, *rest = ops(how)
        assert access in (f"one:ld.global.{scope}.{sem}.b{bits}", f"one:atomic.{sem}.{scope}.add.u{bits}")
        assert rest == after
    assert ops("store_release") == ["bar.sync", f"one:atomic.release.{scope}.exch.b{bits}"]
    assert ops("store_relaxed") == [f"one:atomic.relaxed.{scope}.exch.b{bits}"]
    assert ops("atomic_add") == [f"one:atomic.relaxed.{scope}.add.{'u32' if bits == 32 else 'f64'}"]


@pytest.mark.parametrize("arch", ARCHS)
def test_ordered_blocks_access_each_element_once(arch):
    for how, access in (("load_acquire", "acquire.add.u32"), ("store_release", "release.exch.b32")):
        k = compiled(ordered_kernel, "*i32", "*i32", device_world(), how, "sys", 512, arch=arch)
        assert count(k, rf"(atom|red|ld)\.global\.sys\.({access})") == 512 // 128


def test_elements_of_16_bits_have_no_ordered_loads():
    with pytest.raises(triton.CompilationError) as caught:
        compiled(ordered_kernel, "*bf16", "*bf16", device_world(), "load_acquire", "sys", 0)
    assert "32 or 64 bits" in reasons(caught.value)


@pytest.mark.parametrize("arch", ARCHS)
def test_a_block_of_atomics_compiles_to_one_atomic_an_element(arch):
    k = compiled(atomic_block_kernel, "*i32", "*i32", 100, device_world(), B=512, arch=arch)
    assert count(k, r"(atom|red)\.global\.sys\.relaxed\.add\.u32") == 4
