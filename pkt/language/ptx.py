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

import triton
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
    # Gluon's own builtins carry the same mark and nothing else, so these work in @gluon.jit too.
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


def num_threads(semantic: Any) -> int:
    """Threads in the program, or in the simulator 1."""
    return 1 if simulator(semantic) is not None else 32 * semantic.builder.options.num_warps


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
# What the ISA has: element type, operation -> instruction suffix (PTX ISA 8.1 and later, sm_90). The 16-bit types add in
# fp32 and round once. One instruction moves 16 bytes where the ISA has a vector form, else one element.
_VECTOR_LOAD = {
    ("bf16", "add"): "add.acc::f32.v4.bf16x2",
    ("bf16", "min"): "min.v4.bf16x2",
    ("bf16", "max"): "max.v4.bf16x2",
    ("fp16", "add"): "add.acc::f32.v4.f16x2",
    ("fp16", "min"): "min.v4.f16x2",
    ("fp16", "max"): "max.v4.f16x2",
    ("fp32", "add"): "add.v4.f32",
}
_SCALAR_LOAD = {
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
    ("fp64", "add"): "add.f64",
}
