"""Reductions and stores that the NVLink switch performs for all ranks at once."""

from __future__ import annotations

import functools
from typing import Any

from triton.language import core

from .primitive import asm, element, plain, primitive, simulated, threads_to_agree

# The forms of the ISA (PTX ISA 8.1, sm_90): (element type, operation) -> the instruction's operation and type. 16-bit
# types add in fp32 and round once. Vector forms move 16 bytes; integers and fp64 have scalar forms only.
_LOAD_REDUCE = {
    ("bf16", "add"): "add.acc::f32.v4.bf16x2", ("bf16", "min"): "min.v4.bf16x2", ("bf16", "max"): "max.v4.bf16x2",
    ("fp16", "add"): "add.acc::f32.v4.f16x2", ("fp16", "min"): "min.v4.f16x2", ("fp16", "max"): "max.v4.f16x2",
    ("fp32", "add"): "add.v4.f32", ("fp64", "add"): "add.f64",
    ("int32", "add"): "add.s32", ("int32", "min"): "min.s32", ("int32", "max"): "max.s32",
    ("uint32", "add"): "add.u32", ("uint32", "min"): "min.u32", ("uint32", "max"): "max.u32",
    ("int64", "add"): "add.u64", ("int64", "min"): "min.s64", ("int64", "max"): "max.s64",
    ("uint64", "add"): "add.u64", ("uint64", "min"): "min.u64", ("uint64", "max"): "max.u64",
}  # fmt: skip
# As the additions above, except that the switch has nothing to accumulate.
_REDUCE_ADD = {name: form.replace(".acc::f32", "") for (name, op), form in _LOAD_REDUCE.items() if op == "add"}


@primitive
def multimem_can(ptr, what, op, world, _semantic=None):
    """Compile-time bool: whether these pointers may go through the switch. what: "load_reduce", "store", "reduce_add".

    It is true if all of these hold: `world.multicast`; the ISA has the form; the last dimension is whole groups of 16
    bytes; for an addition, each thread has a group. In a smaller block several threads hold the same group, and each
    would add it.
    """
    dtype = element(ptr)
    groups = _num_groups(ptr)
    form = {
        "load_reduce": (dtype.name, op) in _LOAD_REDUCE,
        "store": True,
        "reduce_add": dtype.name in _REDUCE_ADD and groups >= threads_to_agree(_semantic=_semantic).value,
    }[what]
    return core.constexpr(bool(plain(world.multicast)) and groups > 0 and form)


def _shape(x: Any) -> list:
    return [int(plain(n)) for n in x.shape]


def _num_groups(ptr: Any) -> int:
    """Number of 16-byte groups in a block of element pointers; 0 if its last dimension is not whole groups."""
    per = 128 // element(ptr).primitive_bitwidth
    shape = _shape(ptr)
    if not shape or shape[-1] % per:
        return 0
    return functools.reduce(lambda a, b: a * b, shape) // per


def _split(x: Any, levels: int, semantic: Any) -> list:
    """[n, 2, ..., 2] -> 2^levels blocks [n], in the order of the elements."""
    if levels == 0:
        return [x]
    low, high = core.split(x, _semantic=semantic)
    pairs = zip(_split(low, levels - 1, semantic), _split(high, levels - 1, semantic))
    return [part for pair in pairs for part in pair]


def _join(parts: list, semantic: Any) -> Any:
    """Inverse of `_split`."""
    if len(parts) == 1:
        return parts[0]
    return core.join(_join(parts[0::2], semantic), _join(parts[1::2], semantic), _semantic=semantic)


def _grouped(x: Any, bits: int, semantic: Any) -> tuple:
    """Reshape to groups of 16 bytes of elements of `bits`: ([groups, 2, ..., 2], number of 2s). Splitting the result is
    free for values loaded 16 bytes a thread, and the compiler recomputes index arithmetic instead of shuffling it."""
    levels = (128 // bits).bit_length() - 1
    groups = functools.reduce(lambda a, b: a * b, _shape(x)) >> levels
    return core.reshape(x, [groups] + [2] * levels, _semantic=semantic), levels


def _first(x: Any, bits: int, semantic: Any) -> Any:
    """The first element of each group."""
    x, levels = _grouped(x, bits, semantic)
    for _ in range(levels):
        x = core.split(x, _semantic=semantic)[0]
    return x


def _words(x: Any, semantic: Any) -> list:
    """A block -> its four blocks of uint32 [groups], one for each register of a group."""
    bits = x.dtype.scalar.primitive_bitwidth
    x = core.cast(x, core.get_int_dtype(bits, False), bitcast=True, _semantic=semantic)
    x, levels = _grouped(x, bits, semantic)
    if bits == 64:
        words = []
        for part in _split(x, 1, semantic):
            words.append(core.cast(part, core.uint32, _semantic=semantic))
            words.append(core.cast(part.__rshift__(32, _semantic=semantic), core.uint32, _semantic=semantic))
        return words
    while bits < 32:
        low, high = (core.cast(half, core.uint32, _semantic=semantic) for half in core.split(x, _semantic=semantic))
        x = high.__lshift__(bits, _semantic=semantic).__or__(low, _semantic=semantic)
        bits, levels = 2 * bits, levels - 1
    return _split(x, levels, semantic)


def _from_words(words: list, dtype: Any, semantic: Any) -> Any:
    """Four uint32 blocks -> elements of 16 or 32 bits, [groups, 2, ...]; inverse of `_words`."""
    x = _join(words, semantic)
    if dtype.primitive_bitwidth == 16:
        low = core.cast(x, core.uint16, _semantic=semantic)
        high = core.cast(x.__rshift__(16, _semantic=semantic), core.uint16, _semantic=semantic)
        x = core.join(low, high, _semantic=semantic)
    return core.cast(x, dtype, bitcast=True, _semantic=semantic)


def _like_pointers(x: Any, ptr: Any, dtype: Any, semantic: Any) -> Any:
    x = core.cast(semantic.to_tensor(x), dtype, _semantic=semantic)
    if not x.type.is_block() or _shape(x) != _shape(ptr):
        x, _ = core.broadcast(x, ptr, _semantic=semantic)
    return x


def _guard(mask: Any, ptr: Any, semantic: Any) -> list:
    """The mask of each group as int32 in a list, or an empty list."""
    if mask is None:
        return []
    mask = _like_pointers(mask, ptr, core.int1, semantic)
    return [core.cast(_first(mask, element(ptr).primitive_bitwidth, semantic), core.int32, _semantic=semantic)]


@simulated
def multimem_load_reduce(ptr, mask, op, _semantic=None):
    """Reduce by `multimem.ld_reduce.relaxed.sys.global`, one instruction for 16 bytes (vector forms) or an element.

    ptr: block of element pointers in the multicast window, contiguous in runs of 16 bytes; mask: bool block, uniform in
    each run, or None; masked elements are 0.
    """
    dtype = element(ptr)
    form = _LOAD_REDUCE[(dtype.name, op)]
    vector = ".v4." in form
    size = 4 if vector else dtype.primitive_bitwidth // 8
    n = 16 // size
    kind = "d" if dtype.name == "fp64" else {4: "r", 8: "l"}[size]
    result = core.uint32 if vector else dtype
    guard = _guard(mask, ptr, _semantic)
    predicate = "@p " if guard else ""
    load = f"multimem.ld_reduce.relaxed.sys.global.{form}"
    if vector:
        lines = [f"{predicate}{load} {{$0, $1, $2, $3}}, [$4];"]
    else:
        lines = [f"{predicate}{load} ${i}, [${n} + {size * i}];" for i in range(n)]
    if guard:
        zeros = [f"mov.b{8 * size} ${i}, 0;" for i in range(n)]
        lines = ["{ .reg .pred p;", f"setp.ne.b32 p, ${n + 1}, 0;", *zeros, *lines, "}"]
    # "&": with several instructions a result is written before the last read of the address
    constraints = ",".join([f"=&{kind}"] * n + ["l"] + ["r"] * len(guard))
    at = _first(ptr, dtype.primitive_bitwidth, _semantic)
    words = list(asm("\n".join(lines), constraints, [at, *guard], (result,) * n, _semantic))
    x = _from_words(words, dtype, _semantic) if vector else _join(words, _semantic)
    return core.reshape(x, _shape(ptr), _semantic=_semantic)


def _send(instruction: str, ptr: Any, parts: list, kind: str, mask: Any, semantic: Any) -> None:
    """Store or reduce 16 bytes, by one instruction if it is a vector form, else by one for each part."""
    n, bits = len(parts), element(ptr).primitive_bitwidth
    guard = _guard(mask, ptr, semantic)
    predicate = "@p " if guard else ""
    if ".v4." in instruction:
        lines = [f"{predicate}{instruction} [$1], {{$2, $3, $4, $5}};"]
    else:
        lines = [f"{predicate}{instruction} [$1 + {16 // n * i}], ${i + 2};" for i in range(n)]
    if guard:
        lines = ["{ .reg .pred p;", f"setp.ne.b32 p, ${n + 2}, 0;", *lines, "}"]
    constraints = ",".join(["=r", "l"] + [kind] * n + ["r"] * len(guard))
    at = _first(ptr, bits, semantic)
    asm("\n".join([*lines, "mov.b32 $0, 0;"]), constraints, [at, *parts, *guard], core.int32, semantic)


@simulated
def multimem_store(ptr, value, mask, _semantic=None):
    """Store 16 bytes, of any element type, to every rank: `multimem.st.relaxed.sys.global.v4.f32`.

    ptr: block of element pointers in the multicast window, contiguous in runs of 16 bytes; value: block of that shape;
    mask: uniform in each run.
    """
    value = _like_pointers(value, ptr, element(ptr), _semantic)
    _send("multimem.st.relaxed.sys.global.v4.f32", ptr, _words(value, _semantic), "r", mask, _semantic)


@simulated
def multimem_reduce_add(ptr, value, mask, _semantic=None):
    """Add 16 bytes (floats of 16 and 32 bits) or an element on every rank: `multimem.red.relaxed.sys.global.add`.

    Arguments as for `multimem_store`. Each thread must have a group of 16 bytes (see `multimem_can`)."""
    dtype = element(ptr)
    form = _REDUCE_ADD[dtype.name]
    value = _like_pointers(value, ptr, dtype, _semantic)
    if ".v4." in form:
        parts, kind = _words(value, _semantic), "r"
    else:
        # as bits: Triton 3.6 refuses a float64 beside a pointer; untyped registers suit every type of instruction
        bits = dtype.primitive_bitwidth
        value = core.cast(value, core.get_int_dtype(bits, False), bitcast=True, _semantic=_semantic)
        parts = _split(*_grouped(value, bits, _semantic), _semantic)
        kind = {32: "r", 64: "l"}[bits]
    _send(f"multimem.red.relaxed.sys.global.{form}", ptr, parts, kind, mask, _semantic)
