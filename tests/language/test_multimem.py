"""Multimem functions: one instruction for 16 bytes, the ISA's operations and types, masks, and the loop over ranks
without a switch."""

import re

import pytest
import triton
import triton.language as tl

import pkt.language as pl
from pkt.language.inspect import device_world

from .compiled import ARCHS, compiled, count, instructions, reasons

SWITCH = device_world(0, 4, multicast=True)
NO_SWITCH = device_world(0, 4)
THREADS = 128
ITEMSIZE = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8, "i32": 4, "u32": 4, "i64": 8, "u64": 8, "fp8e4nv": 1, "i8": 1}

VECTORS = {"bf16": "v4.bf16x2", "fp16": "v4.f16x2", "fp32": "v4.f32"}
LOADS = [
    ("bf16", "add", "add.acc::f32.v4.bf16x2"),
    ("bf16", "min", "min.v4.bf16x2"),
    ("bf16", "max", "max.v4.bf16x2"),
    ("fp16", "add", "add.acc::f32.v4.f16x2"),
    ("fp16", "min", "min.v4.f16x2"),
    ("fp16", "max", "max.v4.f16x2"),
    ("fp32", "add", "add.v4.f32"),
    ("fp64", "add", "add.f64"),
    *[("i32", op, f"{op}.s32") for op in ("add", "min", "max")],
    *[("u32", op, f"{op}.u32") for op in ("add", "min", "max")],
    ("i64", "add", "add.u64"),
    ("i64", "min", "min.s64"),
    ("i64", "max", "max.s64"),
    *[("u64", op, f"{op}.u64") for op in ("add", "min", "max")],
]
ADDS = [
    ("bf16", "add.v4.bf16x2"),
    ("fp16", "add.v4.f16x2"),
    ("fp32", "add.v4.f32"),
    ("fp64", "add.f64"),
    ("i32", "add.s32"),
    ("u32", "add.u32"),
    ("i64", "add.u64"),
    ("u64", "add.u64"),
]


@triton.jit
def load_kernel(x, y, n, world, B: tl.constexpr, OP: tl.constexpr, MASK: tl.constexpr):
    o = tl.program_id(0) * B + tl.arange(0, B)
    if MASK:
        tl.store(y + o, pl.multimem_load_reduce(x + o, world, OP, o < n), mask=o < n)
    else:
        tl.store(y + o, pl.multimem_load_reduce(x + o, world, OP))


@triton.jit
def store_kernel(x, y, n, world, B: tl.constexpr, MASK: tl.constexpr):
    o = tl.program_id(0) * B + tl.arange(0, B)
    if MASK:
        pl.multimem_store(x + o, tl.load(y + o, mask=o < n), world, o < n)
    else:
        pl.multimem_store(x + o, tl.load(y + o), world)


@triton.jit
def add_kernel(x, y, n, world, B: tl.constexpr, MASK: tl.constexpr):
    o = tl.program_id(0) * B + tl.arange(0, B)
    if MASK:
        pl.multimem_reduce_add(x + o, tl.load(y + o, mask=o < n), world, o < n)
    else:
        pl.multimem_reduce_add(x + o, tl.load(y + o), world)


@triton.jit
def matrix_kernel(x, y, world, R: tl.constexpr, C: tl.constexpr, STRIDE: tl.constexpr):
    o = tl.arange(0, R)[:, None] * STRIDE + tl.arange(0, C)[None, :]
    v = pl.multimem_load_reduce(x + o, world)
    pl.multimem_store(y + o, v, world)


@triton.jit
def sum_kernel(x, y, world, R: tl.constexpr, C: tl.constexpr):
    v = tl.sum(tl.load(y + tl.arange(0, R)[:, None] * C + tl.arange(0, C)[None, :]), 1)
    pl.multimem_reduce_add(x + tl.arange(0, R), v, world)


@triton.jit
def dot_kernel(x, a, world, B: tl.constexpr):
    o = tl.arange(0, B)[:, None] * B + tl.arange(0, B)[None, :]
    v = tl.load(a + o)
    pl.multimem_reduce_add(x + o, tl.dot(v, v).to(tl.bfloat16), world)


@triton.jit
def scalar_kernel(x, world):
    pl.multimem_reduce_add(x, 1, world)
    pl.multimem_store(x + 1, 2, world)
    tl.store(x + 2, pl.multimem_load_reduce(x + 3, world))


def groups(dtype, elements):
    return elements * ITEMSIZE[dtype] // 16


def instructions_of(dtype, form, elements):
    """Number of instructions that a block takes in each of 128 threads: one for 16 bytes, or one for an element."""
    per_thread = max(1, groups(dtype, elements) // THREADS)
    return per_thread * (1 if ".v4." in form or form == "st" else 16 // ITEMSIZE[dtype])


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize(("dtype", "op", "form"), LOADS)
def test_load_reduce_compiles_to_the_forms_of_the_isa(arch, mask, dtype, op, form):
    k = compiled(load_kernel, "*" + dtype, "*" + dtype, 8192, SWITCH, B=4096, OP=op, MASK=mask, arch=arch)
    found = [x for x in instructions(k) if x.op.startswith("multimem")]
    assert {x.op for x in found} == {f"multimem.ld_reduce.relaxed.sys.global.{form}"}
    assert len(found) == instructions_of(dtype, form, 4096)
    assert all(bool(x.guard) == mask for x in found)
    # the result is stored 16 bytes at a time, with no shuffle and not through shared memory
    assert count(k, r"st\.global\.(v4\.b32|v2\.b64)") == groups(dtype, 4096) // THREADS
    assert count(k, r"shfl|(ld|st)\.shared|stmatrix") == 0


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("dtype", list(ITEMSIZE))
def test_store_moves_16_bytes_of_any_type(arch, mask, dtype):
    k = compiled(store_kernel, "*" + dtype, "*" + dtype, 8192, SWITCH, B=4096, MASK=mask, arch=arch)
    found = [x for x in instructions(k) if x.op.startswith("multimem")]
    assert {x.op for x in found} == {"multimem.st.relaxed.sys.global.v4.f32"}
    assert len(found) == instructions_of(dtype, "st", 4096)
    assert all(bool(x.guard) == mask for x in found)
    assert count(k, r"ld\.global\.(v4\.b32|v2\.b64)") == groups(dtype, 4096) // THREADS
    assert count(k, r"shfl|(ld|st)\.shared|stmatrix") == 0
    assert count(k, r"st\.global") == 0


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize(("dtype", "form"), ADDS)
def test_reduce_add_compiles_to_the_forms_of_the_isa(arch, mask, dtype, form):
    k = compiled(add_kernel, "*" + dtype, "*" + dtype, 8192, SWITCH, B=4096, MASK=mask, arch=arch)
    found = [x for x in instructions(k) if x.op.startswith("multimem")]
    assert {x.op for x in found} == {f"multimem.red.relaxed.sys.global.{form}"}
    assert len(found) == instructions_of(dtype, form, 4096)
    assert all(bool(x.guard) == mask for x in found)
    assert count(k, r"shfl|(ld|st)\.shared|stmatrix") == 0


@pytest.mark.parametrize("arch", ARCHS)
def test_a_tile_of_a_matrix_uses_the_switch(arch):
    k = compiled(matrix_kernel, "*bf16", "*bf16", SWITCH, R=64, C=128, STRIDE=4096, arch=arch)
    assert count(k, r"multimem\.ld_reduce") == count(k, r"multimem\.st") == 64 * 128 * 2 // 16 // THREADS
    assert count(k, r"shfl|(ld|st)\.shared|stmatrix") == 0


def holders(ttgir):
    """For each multimem.red: (elements of the block, elements that its layout gives to all threads together).

    The two are equal if no element is held twice. Fails for layouts that are neither blocked nor linear.
    """
    aliases = dict(re.findall(r"^(#\w+) = (#ttg\.\w+<.*>)$", ttgir, re.M))
    result = []
    for line in ttgir.splitlines():
        if "inline_asm" not in line or "multimem.red" not in line:
            continue
        shape, layout = re.search(r"tensor<([\dx]+)x!tt\.ptr<\w+>, (#\w+)>", line).groups()
        elements = 1
        for n in shape.split("x"):
            elements *= int(n)
        text = aliases[layout]
        if "#ttg.linear" in text:
            bases = re.findall(r"\[(?:\d+(?:, )?)+\]", text)
            zero = [b for b in bases if not re.search(r"[1-9]", b)]
            held = elements * 2 ** len(zero)
        else:
            assert "#ttg.blocked" in text, text
            held = 1
            for name in ("sizePerThread", "threadsPerWarp", "warpsPerCTA"):
                for n in re.search(rf"{name} = \[([\d, ]+)\]", text)[1].split(","):
                    held *= int(n)
            held = max(held, elements)
        result.append((elements, held))
    return result


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("num_warps", [1, 4, 8])
@pytest.mark.parametrize("source", ["load", "sum", "dot"])
def test_each_group_is_added_by_one_thread(arch, num_warps, source):
    if source == "load":
        k = compiled(add_kernel, "*bf16", "*bf16", 1, SWITCH, B=2048, MASK=True, arch=arch, num_warps=num_warps)
    elif source == "sum":
        k = compiled(sum_kernel, "*fp32", "*fp32", SWITCH, R=1024, C=16, arch=arch, num_warps=num_warps)
    else:
        k = compiled(dot_kernel, "*bf16", "*bf16", SWITCH, B=64, arch=arch, num_warps=num_warps)
    found = holders(k.asm["ttgir"])
    assert found
    assert all(elements == held for elements, held in found)


@pytest.mark.parametrize("arch", ARCHS)
def test_a_block_below_16_bytes_a_thread_adds_rank_by_rank(arch):
    # 64 groups for 128 threads: two threads hold each group, and both would add it
    k = compiled(add_kernel, "*bf16", "*bf16", 1, SWITCH, B=512, MASK=False, arch=arch)
    assert count(k, "multimem") == 0
    assert count(k, r"(atom|red)\.global\.sys\.relaxed\.add") > 0
    # several threads may do the same load or store
    assert count(compiled(store_kernel, "*bf16", "*bf16", 1, SWITCH, B=512, MASK=False, arch=arch), "multimem") == 1


@triton.jit
def short_rows_kernel(x, y, ld, world, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    o = tl.arange(0, ROWS)[:, None] * ld + tl.arange(0, COLUMNS)[None, :]
    tl.store(y + o, pl.multimem_load_reduce(x + o, world, "add"))


@pytest.mark.parametrize("arch", ARCHS)
def test_rows_below_16_bytes_go_rank_by_rank(arch):
    for columns, through_the_switch in ((4, False), (8, True)):
        k = compiled(short_rows_kernel, "*bf16", "*bf16", 64, SWITCH, ROWS=64, COLUMNS=columns, arch=arch)
        assert bool(count(k, "multimem")) == through_the_switch


@pytest.mark.parametrize("arch", ARCHS)
def test_scalars_go_rank_by_rank(arch):
    k = compiled(scalar_kernel, "*i32", SWITCH, arch=arch)
    assert count(k, "multimem") == 0
    assert count(k, r"(atom|red)\.global\.sys\.relaxed\.add\.u32") == 4
    assert count(k, r"st\.global") == 4 + 1
    assert count(k, r"ld\.global") == 4


@pytest.mark.parametrize("arch", ARCHS)
def test_without_a_switch_each_form_is_a_loop_over_ranks(arch):
    k = compiled(load_kernel, "*bf16", "*bf16", 1, NO_SWITCH, B=1024, OP="add", MASK=False, arch=arch)
    assert count(k, "multimem") == 0
    assert count(k, r"ld\.global\.v4\.b32") == 4
    # in fp32: 8 elements a thread, 3 additions each; sm_100 adds two at a time
    assert count(k, r"add(\.rn)?\.f32") + 2 * count(k, r"add(\.rn)?\.f32x2") == 3 * 8
    assert count(k, r"add(\.rn)?\.bf16|fma\.rn\.bf16") == 0
    assert (
        count(compiled(store_kernel, "*bf16", "*bf16", 1, NO_SWITCH, B=1024, MASK=False, arch=arch), r"st\.global\.v4")
        == 4
    )
    k = compiled(add_kernel, "*fp32", "*fp32", 1, NO_SWITCH, B=128, MASK=False, arch=arch)
    assert count(k, r"(atom|red)\.global\.sys\.relaxed\.add\.f32") == 4


@pytest.mark.parametrize("op", ["min", "max"])
def test_a_form_that_the_isa_lacks_is_a_loop_over_ranks(op):
    k = compiled(load_kernel, "*fp32", "*fp32", 1, SWITCH, B=1024, OP=op, MASK=False)
    assert count(k, "multimem") == 0
    assert count(k, r"ld\.global\.v4\.b32") == 8


def test_an_unknown_operation_is_refused_by_name():
    with pytest.raises(triton.CompilationError) as caught:
        compiled(load_kernel, "*bf16", "*bf16", 1, SWITCH, B=1024, OP="mean", MASK=False)
    assert '"add", "min" or "max"' in reasons(caught.value)
