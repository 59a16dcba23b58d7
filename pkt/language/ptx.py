"""All inline PTX of pkt, and the choice between compiled and simulated code.

A primitive is a Python function that Triton takes for a builtin. Compiled, it emits the assembly below. Run by the
simulator, whose builder has an attribute `pkt`, it calls the method of the same name there. Everything else in
pkt.language is plain Triton over these primitives.

Inline assembly runs in every thread of the program: what must happen once (an atomic on a scalar) is left to
`tl.atomic_*`, which Triton executes in one thread.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

from triton.language import core

from .world import (
    CMP_ABORTED,
    CMP_CODES,
    MAX_RECORDS,
    RECORD_WORDS,
    STATUS_ABORT,
    STATUS_DEADLINE,
    STATUS_FIRST_RECORD,
    STATUS_RECORDS,
)

WAIT_MARKER = "// pkt.wait"
SIGNAL_MARKER = "// pkt.signal"

POLLS_PER_CHECK = 1024
"""Polls between two looks at the abort word and the clock: about a millisecond, so a poll costs nothing more."""


def primitive(fn: Callable) -> Callable:
    """Mark `fn` as a Triton builtin that has a second meaning in the simulator.

    Triton's code generator supplies `_semantic`; interpreted code does not, and gets that of the interpreter that runs.
    """

    @functools.wraps(fn)
    def call(*args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
        if _semantic is None:
            from triton.runtime import interpreter

            _semantic = interpreter.interpreter_semantic
        args = tuple(core._unwrap_if_constexpr(a) for a in args)
        kwargs = {k: core._unwrap_if_constexpr(v) for k, v in kwargs.items()}
        return fn(*args, **kwargs, _semantic=_semantic)

    setattr(call, core.TRITON_BUILTIN, True)
    return call


def simulator(semantic: Any) -> Any:
    """The simulator's side of the primitives, or None in compiled code."""
    machine = getattr(semantic.builder, "pkt", None)
    if machine is None:
        from triton.runtime.interpreter import InterpreterBuilder

        if isinstance(semantic.builder, InterpreterBuilder):
            from pkt.errors import Unsupported

            raise Unsupported(
                "pkt's device functions run in a compiled kernel or in pkt's simulator, not in Triton's interpreter and "
                "not on the host: start the program with pkt.launch(fn, ranks=..., device='cpu')"
            )
    return machine


def capability(semantic: Any) -> int:
    """Compute capability of the target, 90 for sm_90."""
    arch = getattr(semantic.builder.options, "arch", None)
    digits = re.search(r"\d+", str(arch))
    return int(digits.group()) if digits else 90


@primitive
def threads_to_agree(_semantic=None):
    """Threads among which a value read by each may differ: 32 * num_warps; 1 in the simulator, where a program is one
    thread, and in Gluon, where a block needs a layout (there a found value is this thread's own)."""
    if simulator(_semantic) is not None or "gluon" in type(_semantic).__module__:
        return core.constexpr(1)
    return core.constexpr(32 * _semantic.builder.options.num_warps)


def _asm(text: str, constraints: str, args: list, dtype: Any, semantic: Any) -> Any:
    """One inline assembly with side effects, an element at a time."""
    return core.inline_asm_elementwise(text, constraints, args, dtype, False, 1, _semantic=semantic)


# --------------------------------------------------------------------------------------------------------- sync
# What the spin tests, on `d` = found - wanted as a signed number: right across a wrap of the counter.
_HOLDS = {
    "ge": "sub.s32 d, $0, $2; setp.ge.s32 p, d, 0;",
    "gt": "sub.s32 d, $0, $2; setp.gt.s32 p, d, 0;",
    "le": "sub.s32 d, $0, $2; setp.le.s32 p, d, 0;",
    "lt": "sub.s32 d, $0, $2; setp.lt.s32 p, d, 0;",
    "eq": "setp.eq.s32 p, $0, $2;",
    "ne": "setp.ne.s32 p, $0, $2;",
    "flip": "xor.b32 d, $0, $2; setp.lt.s32 p, d, 0;",
}

# $0 found; $1 counter; $2 wanted; $3 status page; $4 rank. The fast path is the acquire load, the comparison and the
# branch. The rest runs every POLLS_PER_CHECK polls: leave when aborted; restart the clock when the counter moved; when
# the deadline has passed write one record a program and raise the abort word of every rank. Threads of one program
# agree on the record's writer by compare-and-swap on the slot's owner word. No trap: a trap loses the CUDA context.
_WAIT = """{{
{marker}
.reg .pred p, q, late;
.reg .b32 d, n, a, last, code, prog, own, i;
.reg .b64 now, since, limit, at, off;
mov.b32 n, 0; mov.b64 since, 0; mov.b32 last, $2;
$$PKT_POLL_${{:uid}}:
ld.acquire.sys.global.b32 $0, [$1];
{holds}
@p bra $$PKT_DONE_${{:uid}};
add.u32 n, n, 1;
and.b32 a, n, {mask};
setp.ne.u32 q, a, 0;
@q bra $$PKT_POLL_${{:uid}};
mov.b32 code, {code};
ld.relaxed.sys.global.b32 a, [$3 + {abort}];
setp.eq.s32 late, a, 0;
@!late or.b32 code, code, {aborted};
@!late bra $$PKT_LEAVE_${{:uid}};
mov.u64 now, %globaltimer;
setp.eq.u64 q, since, 0;
setp.ne.or.u32 q, $0, last, q;
mov.b32 last, $0;
@q mov.b64 since, now;
ld.relaxed.sys.global.b64 limit, [$3 + {deadline}];
setp.eq.s64 q, limit, 0;
@q bra $$PKT_POLL_${{:uid}};
sub.s64 now, now, since;
setp.lt.s64 q, now, limit;
@q bra $$PKT_POLL_${{:uid}};
$$PKT_LEAVE_${{:uid}}:
mov.u32 prog, %nctaid.y; mov.u32 a, %ctaid.z; mov.u32 d, %ctaid.y; mad.lo.u32 prog, a, prog, d;
mov.u32 a, %nctaid.x; mov.u32 d, %ctaid.x; mad.lo.u32 prog, prog, a, d;
add.u32 own, prog, 1;
mov.b32 i, 0; add.s64 at, $3, {first};
$$PKT_CLAIM_${{:uid}}:
atom.relaxed.sys.global.cas.b32 a, [at + {owner}], 0, own;
setp.eq.u32 q, a, own;
@q bra $$PKT_ABORT_${{:uid}};
setp.eq.u32 q, a, 0;
@q bra $$PKT_RECORD_${{:uid}};
add.u32 i, i, 1; add.s64 at, at, {record};
setp.lt.u32 q, i, {records};
@q bra $$PKT_CLAIM_${{:uid}};
bra $$PKT_ABORT_${{:uid}};
$$PKT_RECORD_${{:uid}}:
sub.s64 off, $1, $3;
st.relaxed.sys.global.b32 [at], $4;
st.relaxed.sys.global.b32 [at + 4], prog;
st.relaxed.sys.global.b32 [at + 8], code;
st.relaxed.sys.global.b32 [at + 12], $2;
st.relaxed.sys.global.b32 [at + 16], $0;
mov.b64 {{a, d}}, off;
st.relaxed.sys.global.b32 [at + 20], a;
st.relaxed.sys.global.b32 [at + 24], d;
st.relaxed.sys.global.b32 [at + 28], 0;
st.relaxed.sys.global.b32 [at + 32], {site};
red.release.sys.global.add.u32 [$3 + {count}], 1;
$$PKT_ABORT_${{:uid}}:
@!late bra $$PKT_DONE_${{:uid}};
mov.b32 i, 0; cvt.s64.s32 off, $4; mul.lo.s64 off, off, {stride}; sub.s64 at, $3, off;
$$PKT_RAISE_${{:uid}}:
st.relaxed.sys.global.b32 [at + {abort}], 1;
add.u32 i, i, 1; add.s64 at, at, {stride};
setp.lt.u32 q, i, {size};
@q bra $$PKT_RAISE_${{:uid}};
$$PKT_DONE_${{:uid}}:
{proxy}
}}"""


@primitive
def wait(ptr, want, cmp, world, _semantic=None):
    """Spin with `ld.acquire.sys` until `*ptr cmp want`; then order the async proxy (TMA loads) after it.

    ptr: scalar pointer to int32; want: int32; cmp: ge gt le lt eq ne (wrap-safe) or flip (the top bit differs from
    that of `want`). Returns what this thread found, which may differ between threads: `sync.wait` makes it uniform.
    """
    if cmp not in CMP_CODES:
        raise ValueError(f"cmp is one of {', '.join(c for c in CMP_CODES)}, not {cmp!r}")
    machine = simulator(_semantic)
    if machine is not None:
        return machine.wait(ptr, want, cmp, core._unwrap_if_constexpr(world.rank), world.status)
    unwrap = core._unwrap_if_constexpr
    text = _WAIT.format(
        marker=WAIT_MARKER,
        holds=_HOLDS[cmp],
        mask=POLLS_PER_CHECK - 1,
        code=CMP_CODES[cmp],
        aborted=CMP_ABORTED,
        abort=4 * STATUS_ABORT,
        deadline=4 * STATUS_DEADLINE,
        count=4 * STATUS_RECORDS,
        first=4 * STATUS_FIRST_RECORD,
        record=4 * RECORD_WORDS,
        records=MAX_RECORDS,
        owner=4 * 9,
        site=0,
        stride=unwrap(world.stride),
        size=unwrap(world.size),
        proxy="fence.proxy.async.global;" if capability(_semantic) >= 90 else "",
    )
    want = core.cast(_semantic.to_tensor(want), core.int32, _semantic=_semantic)
    rank = core.cast(_semantic.to_tensor(unwrap(world.rank)), core.int32, _semantic=_semantic)
    # "=&r": the result is written while the inputs are still needed.
    return _asm(text, "=&r,l,r,l,r", [ptr, want, world.status, rank], core.int32, _semantic)


@primitive
def load_acquire(ptr, _semantic=None):
    """`ld.acquire.sys.global.{b32,b64}` of a scalar or a block, in every thread."""
    machine = simulator(_semantic)
    if machine is not None:
        return machine.load_acquire(ptr)
    bits = ptr.dtype.element_ty.primitive_bitwidth
    if bits not in (32, 64):
        raise ValueError(f"load_acquire reads 32 or 64 bits, not {ptr.dtype.element_ty}")
    register = "r" if bits == 32 else "l"
    return _asm(
        f"ld.acquire.sys.global.b{bits} $0, [$1];", f"={register},l", [ptr], ptr.dtype.element_ty, _semantic
    )


@primitive
def fence(scope, _semantic=None):
    """`fence.acq_rel.<scope>`, in every thread; scope is "sys" or "gpu"."""
    machine = simulator(_semantic)
    if machine is not None:
        return machine.fence(scope)
    if scope not in ("sys", "gpu"):
        raise ValueError(f'scope is "sys" or "gpu", not {scope!r}')
    _asm(f"fence.acq_rel.{scope}; mov.b32 $0, 0;", "=r", [], core.int32, _semantic)
    return None


@primitive
def proxy_fence(_semantic=None):
    """`fence.proxy.async.global`: TMA accesses issued later are ordered after what has been acquired."""
    machine = simulator(_semantic)
    if machine is not None:
        return machine.proxy_fence()
    if capability(_semantic) >= 90:
        _asm("fence.proxy.async.global; mov.b32 $0, 0;", "=r", [], core.int32, _semantic)
    return None


@primitive
def drain(_semantic=None):
    """This thread's TMA stores have been performed, not only read from shared memory, and are ordered before what it
    does next: `cp.async.bulk.wait_group 0` and `fence.proxy.async.global`. The part of a signal that may be lost in
    compilation, so it carries the marker."""
    machine = simulator(_semantic)
    if machine is not None:
        return machine.drain()
    wait_group = ""
    if capability(_semantic) >= 90:
        wait_group = "cp.async.bulk.wait_group 0;\nfence.proxy.async.global;\n"
    _asm(f"{SIGNAL_MARKER}\n{wait_group}mov.b32 $0, 0;", "=r", [], core.int32, _semantic)
    return None


@primitive
def cta_barrier(_semantic=None):
    """`bar.sync` of the program's threads; in a Gluon partition, of the partition's. `tl.debug_barrier` under a name
    that Gluon's module has too."""
    core.debug_barrier(_semantic=_semantic)
    return None


@primitive
def mark(kind, _semantic=None):
    """A region of the simulator's timeline begins: "compute", "communicate" or "wait". Compiled to nothing."""
    machine = simulator(_semantic)
    if machine is not None:
        return machine.mark(kind)
    if kind not in ("compute", "communicate", "wait"):
        raise ValueError(f'kind is "compute", "communicate" or "wait", not {kind!r}')
    return None


# ----------------------------------------------------------------------------------------------------- multimem
# What the ISA has (PTX ISA 8.1, sm_90): (element type, operation) -> the instruction's operation and type. The 16-bit
# types add in fp32 and round once. Vector forms move 16 bytes; integers and fp64 have only scalar forms.
_LOAD_REDUCE = {
    ("bf16", "add"): "add.acc::f32.v4.bf16x2",
    ("bf16", "min"): "min.v4.bf16x2",
    ("bf16", "max"): "max.v4.bf16x2",
    ("fp16", "add"): "add.acc::f32.v4.f16x2",
    ("fp16", "min"): "min.v4.f16x2",
    ("fp16", "max"): "max.v4.f16x2",
    ("fp32", "add"): "add.v4.f32",
    ("fp64", "add"): "add.f64",
    ("int32", "add"): "add.s32",
    ("int32", "min"): "min.s32",
    ("int32", "max"): "max.s32",
    ("uint32", "add"): "add.u32",
    ("uint32", "min"): "min.u32",
    ("uint32", "max"): "max.u32",
    ("int64", "add"): "add.u64",
    ("int64", "min"): "min.s64",
    ("int64", "max"): "max.s64",
    ("uint64", "add"): "add.u64",
    ("uint64", "min"): "min.u64",
    ("uint64", "max"): "max.u64",
}
_REDUCE_ADD = {
    "bf16": "add.v4.bf16x2",
    "fp16": "add.v4.f16x2",
    "fp32": "add.v4.f32",
    "fp64": "add.f64",
    "int32": "add.s32",
    "uint32": "add.u32",
    "int64": "add.u64",
    "uint64": "add.u64",
}


def _element(ptr: Any) -> Any:
    return ptr.dtype.scalar.element_ty


def has_load_reduce(dtype: Any, op: str) -> bool:
    """Whether the ISA reduces this element type this way in the switch."""
    return (dtype.name, op) in _LOAD_REDUCE


def has_reduce_add(dtype: Any) -> bool:
    return dtype.name in _REDUCE_ADD


@primitive
def multimem_can(ptr, what, op, world, _semantic=None):
    """Compile-time bool: `world.multicast`, and the ISA has the form. what: "load_reduce", "store", "reduce_add"."""
    dtype = _element(ptr)
    form = {
        "load_reduce": has_load_reduce(dtype, op),
        "store": True,
        "reduce_add": has_reduce_add(dtype),
    }[what]
    return core.constexpr(bool(core._unwrap_if_constexpr(world.multicast)) and form)


def _per_group(ptr: Any) -> int:
    """Elements in 16 bytes; raises unless the block is made of whole groups."""
    bits = _element(ptr).primitive_bitwidth
    per = 128 // bits
    if not ptr.shape or int(ptr.shape[-1]) % per:
        raise ValueError(
            f"multimem takes a block whose last dimension is a multiple of {per} elements of {_element(ptr)} (16 bytes), "
            f"not of shape {[int(s) for s in ptr.shape]}"
        )
    return per


def _halves(x: Any, semantic: Any) -> tuple:
    return core.split(x, _semantic=semantic)


def _first_of_groups(x: Any, per: int, semantic: Any) -> Any:
    """Element 0 of each group of `per`: reshape and split, so that index arithmetic is redone instead of shuffled."""
    groups = x.numel.value // per if hasattr(x.numel, "value") else int(x.numel) // per
    levels = per.bit_length() - 1
    x = core.reshape(x, [groups] + [2] * levels, _semantic=semantic)
    for _ in range(levels):
        x = _halves(x, semantic)[0]
    return x


def _registers(x: Any, semantic: Any) -> list:
    """A block of n elements of 8 to 64 bits -> four blocks of uint32, register k of each 16-byte group."""
    bits = x.dtype.scalar.primitive_bitwidth
    per = 128 // bits
    groups = int(x.numel) // per
    levels = per.bit_length() - 1
    word = {8: core.uint8, 16: core.uint16, 32: core.uint32, 64: core.uint64}[bits]
    x = core.cast(x, word, bitcast=True, _semantic=semantic)
    x = core.reshape(x, [groups] + [2] * levels, _semantic=semantic)
    if bits == 64:
        low, high = _halves(x, semantic)
        words = []
        for part in (low, high):
            words.append(core.cast(part, core.uint32, _semantic=semantic))
            words.append(core.cast(part.__rshift__(32, _semantic=semantic), core.uint32, _semantic=semantic))
        return words
    while bits < 32:
        low, high = (core.cast(half, core.uint32, _semantic=semantic) for half in _halves(x, semantic))
        x = high.__lshift__(bits, _semantic=semantic).__or__(low, _semantic=semantic)
        bits *= 2
    even, odd = _halves(x, semantic)
    r0, r2 = _halves(even, semantic)
    r1, r3 = _halves(odd, semantic)
    return [r0, r1, r2, r3]


def _from_registers(words: tuple, dtype: Any, shape: list, semantic: Any) -> Any:
    """Inverse of `_registers` for elements of 16 and 32 bits."""
    r0, r1, r2, r3 = words
    even = core.join(r0, r2, _semantic=semantic)
    odd = core.join(r1, r3, _semantic=semantic)
    x = core.join(even, odd, _semantic=semantic)
    if dtype.primitive_bitwidth == 16:
        low = core.cast(x, core.uint16, _semantic=semantic)
        high = core.cast(x.__rshift__(16, _semantic=semantic), core.uint16, _semantic=semantic)
        x = core.join(low, high, _semantic=semantic)
    x = core.reshape(x, shape, _semantic=semantic)
    return core.cast(x, dtype, bitcast=True, _semantic=semantic)


def _predicate(mask: Any, ptr: Any, per: int, semantic: Any) -> tuple:
    """The mask of each group as int32, or nothing."""
    if mask is None:
        return ()
    mask = semantic.to_tensor(mask)
    if not mask.type.is_block() or [int(s) for s in mask.shape] != [int(s) for s in ptr.shape]:
        mask, _ = core.broadcast(mask, ptr, _semantic=semantic)
    mask = core.cast(mask, core.int32, _semantic=semantic)
    return (mask if per == 1 else _first_of_groups(mask, per, semantic),)


@primitive
def multimem_load_reduce(ptr, mask, op, _semantic=None):
    """`multimem.ld_reduce.relaxed.sys.global`: one instruction for 16 bytes (vector forms) or for an element.

    ptr: block of element pointers in the multicast window, contiguous in runs of 16 bytes; mask: bool block, uniform in
    each run, or None; masked elements are 0.
    """
    machine = simulator(_semantic)
    if machine is not None:
        return machine.multimem_load_reduce(ptr, mask, op)
    dtype = _element(ptr)
    form = _LOAD_REDUCE[(dtype.name, op)]
    per = _per_group(ptr) if ".v4." in form else 1
    at = _first_of_groups(ptr, per, _semantic) if per > 1 else ptr
    guard = _predicate(mask, ptr, per, _semantic)
    outputs = 4 if per > 1 else 1
    kind = "r" if per > 1 else {32: "r", 64: "l"}[dtype.primitive_bitwidth]
    if dtype.name == "fp64":
        kind = "d"
    target = "{$0, $1, $2, $3}" if per > 1 else "$0"
    load = f"multimem.ld_reduce.relaxed.sys.global.{form} {target}, [${outputs}];"
    if guard:
        zero = "".join(f"mov.b{64 if kind in 'ld' else 32} ${i}, 0; " for i in range(outputs))
        load = f"{{ .reg .pred p; setp.ne.b32 p, ${outputs + 1}, 0; {zero}@p {load} }}"
    constraints = ",".join([("=&" if guard else "=") + kind] * outputs + ["l"] + ["r"] * len(guard))
    result = core.uint32 if per > 1 else dtype
    out = _asm(load, constraints, [at, *guard], (result,) * outputs, _semantic)
    if per == 1:
        return out[0]
    return _from_registers(out, dtype, list(ptr.shape), _semantic)


def _send(instruction: str, at: Any, words: list, kind: str, guard: tuple, semantic: Any) -> None:
    n = len(words)
    source = "{" + ", ".join(f"${i + 2}" for i in range(n)) + "}" if n > 1 else "$2"
    text = f"{instruction} [$1], {source};"
    if guard:
        text = f"{{ .reg .pred p; setp.ne.b32 p, ${n + 2}, 0; @p {text} }}"
    constraints = ",".join(["=r", "l"] + [kind] * n + ["r"] * len(guard))
    _asm(text + " mov.b32 $0, 0;", constraints, [at, *words, *guard], core.int32, semantic)


@primitive
def multimem_store(ptr, value, mask, _semantic=None):
    """`multimem.st.relaxed.sys.global.v4.f32`: 16 bytes, of any element type, to every rank.

    ptr: block of element pointers in the multicast window, contiguous in runs of 16 bytes; value: block of that shape;
    mask: uniform in each run.
    """
    machine = simulator(_semantic)
    if machine is not None:
        return machine.multimem_store(ptr, value, mask)
    per = _per_group(ptr)
    value = _as_element(value, ptr, _semantic)
    at = _first_of_groups(ptr, per, _semantic)
    guard = _predicate(mask, ptr, per, _semantic)
    _send("multimem.st.relaxed.sys.global.v4.f32", at, _registers(value, _semantic), "r", guard, _semantic)
    return None


@primitive
def multimem_reduce_add(ptr, value, mask, _semantic=None):
    """`multimem.red.relaxed.sys.global.add`: 16 bytes (floats of 16 and 32 bits) or an element, added on every rank."""
    machine = simulator(_semantic)
    if machine is not None:
        return machine.multimem_reduce_add(ptr, value, mask)
    dtype = _element(ptr)
    form = _REDUCE_ADD[dtype.name]
    value = _as_element(value, ptr, _semantic)
    instruction = f"multimem.red.relaxed.sys.global.{form}"
    if ".v4." in form:
        per = _per_group(ptr)
        at, words, kind = _first_of_groups(ptr, per, _semantic), _registers(value, _semantic), "r"
    else:
        per, at, words = 1, ptr, [value]
        kind = "d" if dtype.name == "fp64" else {32: "r", 64: "l"}[dtype.primitive_bitwidth]
    guard = _predicate(mask, ptr, per, _semantic)
    _send(instruction, at, words, kind, guard, _semantic)
    return None


def _as_element(value: Any, ptr: Any, semantic: Any) -> Any:
    value = core.cast(semantic.to_tensor(value), _element(ptr), _semantic=semantic)
    if not value.type.is_block() or [int(s) for s in value.shape] != [int(s) for s in ptr.shape]:
        value, _ = core.broadcast(value, ptr, _semantic=semantic)
    return value
