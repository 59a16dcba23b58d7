"""Load-reduce, store and reduce-add in the switch (NVLS), or with the same meaning by a loop over the ranks.

Pointers are blocks of element pointers into my own heap, contiguous in runs of 16 bytes that begin at multiples of
16 bytes. Masks are uniform in each run. Each function is a loop over the ranks where

- `world.multicast` is false,
- the ISA has no such form (fp32 min, say),
- the pointers are a scalar, or a block whose last dimension is less than 16 bytes,
- an addition has fewer than 16 bytes for each thread.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import address, ptx

_ADD = tl.constexpr("add")


@triton.jit
def _wide(x):
    # 16-bit floats and fp8 accumulate in fp32, as the switch does
    if x.dtype.is_floating() and x.dtype.primitive_bitwidth < 32:
        x = x.to(tl.float32)
    return x


@triton.jit
def multimem_load_reduce(ptr, world, op: tl.constexpr = _ADD, mask=None):
    """The reduction over all ranks of the elements at `ptr`, a block of the element type; 0 where the mask is false.

    op: "add" (16-bit floats accumulate in fp32 and round once), "min", "max".
    `multimem.ld_reduce.relaxed.sys.global.<op>`, 16 bytes an instruction for bf16, fp16 and fp32, an element for
    integers and fp64. Relaxed: published data is visible after `wait`.
    """
    if ptx.multimem_can(ptr, "load_reduce", op, world):
        return ptx.multimem_load_reduce(address.multicast(ptr, world), mask, op)
    else:
        return _load_reduce_by_rank(ptr, world, op, mask)


@triton.jit
def _load_reduce_by_rank(ptr, world, op: tl.constexpr, mask):
    ptx.near_only("a reduction over all ranks' memory", world)
    acc = _wide(_load_or_zero(address.of_rank(ptr, 0, world), mask))
    for r in tl.static_range(1, world.size):
        x = _wide(_load_or_zero(address.of_rank(ptr, r, world), mask))
        if op == "add":
            acc += x
        elif op == "min":
            acc = tl.minimum(acc, x)
        else:
            tl.static_assert(op == "max", 'op is "add", "min" or "max"')
            acc = tl.maximum(acc, x)
    return acc.to(ptr.dtype.scalar.element_ty)


@triton.jit
def _load_or_zero(ptr, mask):
    if mask is None:
        return tl.load(ptr)
    else:
        return tl.load(ptr, mask=mask, other=0)


@triton.jit
def multimem_store(ptr, value, world, mask=None):
    """Store `value` to `ptr` on all ranks: `multimem.st.relaxed.sys.global.v4.f32`, 16 bytes an instruction for every
    element type. Visible there after a `signal`."""
    if ptx.multimem_can(ptr, "store", "", world):
        ptx.multimem_store(address.multicast(ptr, world), value, mask)
    else:
        ptx.near_only("a store to all ranks' memory", world)
        for i in tl.static_range(1, world.size + 1):
            tl.store(address.of_rank(ptr, (world.rank + i) % world.size, world), value, mask=mask)


@triton.jit
def multimem_reduce_add(ptr, value, world, mask=None):
    """Add `value` to `ptr` on all ranks, each element atomically, in no fixed order:
    `multimem.red.relaxed.sys.global.add`, 16 bytes an instruction for bf16, fp16 and fp32, an element for integers and
    fp64."""
    if ptx.multimem_can(ptr, "reduce_add", "add", world):
        ptx.multimem_reduce_add(address.multicast(ptr, world), value, mask)
    else:
        ptx.near_only("an addition to all ranks' memory", world)
        for i in tl.static_range(1, world.size + 1):
            tl.atomic_add(
                address.of_rank(ptr, (world.rank + i) % world.size, world), value, mask=mask, sem="relaxed", scope="sys"
            )
