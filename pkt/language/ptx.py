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
import sys
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
    site_hash,
)

WAIT_MARKER = "// pkt.wait"
SIGNAL_MARKER = "// pkt.signal"

POLLS_PER_CHECK = 1024
"""Polls between two looks at the abort word and the clock: about a millisecond, so a poll costs nothing more."""
FIRST_CHECK = 64
"""Polls before the first look, so that a kernel whose waits all leave because of an abort is soon at its end."""


def _plain(x: Any) -> Any:
    """The value of a constexpr; anything else, tuples too, as it is."""
    return x.value if isinstance(x, core.constexpr) else x


def primitive(fn: Callable) -> Callable:
    """Mark `fn` as a Triton builtin that has a second meaning in the simulator.

    Triton's code generator supplies `_semantic`; interpreted code does not, and gets that of the interpreter that runs.
    """

    @functools.wraps(fn)
    def call(*args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
        if _semantic is None:
            from triton.runtime import interpreter

            _semantic = interpreter.interpreter_semantic
        args = tuple(_plain(a) for a in args)
        kwargs = {k: _plain(v) for k, v in kwargs.items()}
        return fn(*args, **kwargs, _semantic=_semantic)

    setattr(call, core.TRITON_BUILTIN, True)
    return call


def simulator(semantic: Any) -> Any:
    """The simulator's side of the primitives, or None in compiled code."""
    machine = getattr(semantic.builder, "pkt", None)
    if machine is None and type(semantic.builder).__module__ == "triton.runtime.interpreter":
        from pkt.errors import Unsupported

        raise Unsupported.here(
            "pkt's device functions",
            "called on the host or in Triton's own interpreter",
            "call them in a kernel, and run that on GPUs or with pkt.launch(fn, ranks=4, device='cpu')",
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


def _kernel_name() -> str:
    """Name of the kernel that is being compiled, "" if Triton does not tell."""
    frame = sys._getframe()
    while frame is not None:
        generator = frame.f_locals.get("self")
        if getattr(generator, "is_kernel", False) is True:
            return str(getattr(generator, "function_name", ""))
        frame = frame.f_back
    return ""


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

# $0 the result; $1 counter or word; $2 wanted; $3 status page; $4 rank; {found} what is compared, which {poll} loads.
# The fast path is that load, the comparison and the branch. The rest runs every POLLS_PER_CHECK polls: leave when
# aborted; restart the clock when the counter moved; when the deadline has passed write one record a program and raise
# the abort word of every rank. Threads of one program agree on the record's writer by compare-and-swap on the slot's
# owner word. No trap: a trap loses the CUDA context.
_SPIN = """{{
{marker}
.reg .pred p, q, late;
.reg .b32 d, n, a, last, code, prog, own, i;
.reg .b64 now, since, limit, at, off;
{before}
mov.b32 n, {first_count}; mov.b64 since, 0; mov.b32 last, $2;
$$PKT_POLL_${{:uid}}:
{poll}
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
setp.ne.or.u32 q, {found}, last, q;
mov.b32 last, {found};
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
st.relaxed.sys.global.b32 [at + 16], {found};
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
{after}
}}"""


@primitive
def wait(ptr, want, cmp, world, _semantic=None):
    """Spin with `ld.acquire.sys` until `*ptr cmp want`; then order TMA loads and multimem accesses after it.

    ptr: scalar pointer to int32; want: int32; cmp: ge gt le lt eq ne (wrap-safe) or flip (the top bit differs from
    that of `want`). Returns what this thread found, which may differ between threads: `sync.wait` makes it uniform.
    """
    if cmp not in CMP_CODES:
        raise ValueError(f"cmp is one of {', '.join(CMP_CODES)}, not {cmp!r}")
    if not ptr.type.is_ptr() or _element(ptr).name not in ("int32", "uint32"):
        raise ValueError(f"a counter is a scalar pointer to int32, not {ptr.type}")
    machine = simulator(_semantic)
    if machine is not None:
        return machine.wait(ptr, want, cmp, _plain(world.rank), world.status)
    text = _spin("ld.acquire.sys.global.b32 $0, [$1];", "$0", cmp, world, after=_proxy_fences(world, _semantic))
    # "=&r": the result is written while the inputs are still needed.
    return _asm(text, "=&r,l,r,l,r", [ptr, *_spin_arguments(want, world, _semantic)], core.int32, _semantic)


def _spin(poll: str, found: str, cmp: str, world: Any, before: str = "", after: str = "") -> str:
    """`_SPIN` around the load `poll` of `found`, with `before` in front of it and `after` behind its end."""
    return _SPIN.format(
        marker=WAIT_MARKER,
        before=before,
        poll=poll,
        found=found,
        holds=_HOLDS[cmp].replace("$0", found),
        first_count=POLLS_PER_CHECK - FIRST_CHECK,
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
        site=site_hash(_kernel_name()),
        stride=_plain(world.stride),
        size=_plain(world.size),
        after=after,
    )


def _spin_arguments(want: Any, world: Any, semantic: Any) -> list:
    """$2, $3 and $4 of `_SPIN`."""
    want = core.cast(semantic.to_tensor(want), core.int32, _semantic=semantic)
    rank = core.cast(semantic.to_tensor(_plain(world.rank)), core.int32, _semantic=semantic)
    return [want, world.status, rank]


@primitive
def load_relaxed(ptr, _semantic=None):
    """`ld.relaxed.sys.global.{b32,b64}` of a scalar or a block, in every thread."""
    machine = simulator(_semantic)
    if machine is not None:
        return machine.load_relaxed(ptr)
    bits = ptr.dtype.element_ty.primitive_bitwidth
    if bits not in (32, 64):
        raise ValueError(f"load_relaxed reads 32 or 64 bits, not {ptr.dtype.element_ty}")
    register = "r" if bits == 32 else "l"
    return _asm(f"ld.relaxed.sys.global.b{bits} $0, [$1];", f"={register},l", [ptr], ptr.dtype.element_ty, _semantic)


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
def proxy_fence(world, _semantic=None):
    """What the program accesses later by TMA (and, where `world.multicast`, through the multicast window) is ordered
    after what this thread has acquired: `fence.proxy.async.global`, `fence.proxy.alias`."""
    machine = simulator(_semantic)
    if machine is not None:
        return machine.proxy_fence()
    fences = _proxy_fences(world, _semantic)
    if fences:
        _asm(f"{fences} mov.b32 $0, 0;", "=r", [], core.int32, _semantic)
    return None


@primitive
def drain(world, pending=0, _semantic=None):
    """This thread's TMA stores have been performed, not only read from shared memory, and are, with its stores
    through the multicast window, ordered before what it does next: `cp.async.bulk.wait_group 0` and the proxy fences.
    The part of a signal that may be lost in compilation, so it carries the marker. world=None: as if
    `world.multicast`. pending: newest TMA stores (commit groups) of this thread that need not have been performed."""
    machine = simulator(_semantic)
    if machine is not None:
        return machine.drain()
    lines = [SIGNAL_MARKER]
    if capability(_semantic) >= 90:
        lines.append(f"cp.async.bulk.wait_group {pending};")
    lines.append(_proxy_fences(world, _semantic))
    lines.append("mov.b32 $0, 0;")
    _asm("\n".join(line for line in lines if line), "=r", [], core.int32, _semantic)
    return None


def _proxy_fences(world: Any, semantic: Any) -> str:
    # The async proxy is TMA's; one memory at two virtual addresses, mine and the multicast window's, is two as well.
    fences = ["fence.proxy.async.global;"] if capability(semantic) >= 90 else []
    if world is None or _plain(world.multicast):
        fences.append("fence.proxy.alias;")
    return "\n".join(fences)


@primitive
def cta_barrier(_semantic=None):
    """`bar.sync` of the program's threads; in a Gluon partition, of the partition's. `tl.debug_barrier` under a name
    that Gluon's module has too."""
    core.debug_barrier(_semantic=_semantic)
    return None


@primitive
def settle(args, _semantic=None):
    """Make the types of nested tuples those of their values, in place.

    Triton gives a function that takes a tuple in a tuple a type of the outer one without the constants of the inner
    one; a loop copies what it uses by that type, and `world.size` is None in its body.
    """
    if isinstance(args, core.tuple):
        for value in args.values:
            if isinstance(value, core.tuple):
                settle(value, _semantic=_semantic)
        args.type = core.tuple_type([value.type for value in args.values], args.type.fields)
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


# ------------------------------------------------------------------------------------------------- flagged words
def _word_pointers(ptr: Any, call: str, semantic: Any) -> Any:
    """As pointers to int32: Triton refuses two pointer types, these and the status page's, in one assembly."""
    if not ptr.type.scalar.is_ptr() or _element(ptr).name not in ("int64", "uint64"):
        raise ValueError(f"{call} takes pointers to int64, not {ptr.type}")
    return core.cast(ptr, core.pointer_type(core.int32), bitcast=True, _semantic=semantic)


@primitive
def put_flagged(ptr, value, flag, mask, _semantic=None):
    """`st.relaxed.sys.global.b64` of `value` in the low and `flag` in the high half of each word, one store a word.

    ptr: scalar or block of pointers to int64; value: int32 of that shape; flag: int32 scalar; mask: bool block or None.
    """
    machine = simulator(_semantic)
    if machine is not None:
        return machine.put_flagged(ptr, value, flag, mask)
    at = _word_pointers(ptr, "put_flagged", _semantic)
    value = core.cast(_semantic.to_tensor(value), core.int32, _semantic=_semantic)
    flag = core.cast(_semantic.to_tensor(flag), core.int32, _semantic=_semantic)
    guard = _int_mask(mask, _semantic)
    text = [
        f"{{ {SIGNAL_MARKER}",
        ".reg .pred p; .reg .b64 word;",
        "setp.ne.b32 p, $4, 0;" if guard else "",
        "mov.b64 word, {$2, $3};",
        f"{'@p ' if guard else ''}st.relaxed.sys.global.b64 [$1], word;",
        "mov.b32 $0, 0; }",
    ]
    constraints = "=r,l,r,r" + ",r" * len(guard)
    _asm("\n".join(line for line in text if line), constraints, [at, value, flag, *guard], core.int32, _semantic)
    return None


@primitive
def take_flagged(ptr, flag, mask, world, _semantic=None):
    """Spin with `ld.relaxed.sys.global.b64` on each word until its high half is `flag`; returns the low halves, int32,
    0 where masked. ptr, mask: as for `put_flagged`. Leaves at the deadline as `wait` does, with whatever it found."""
    machine = simulator(_semantic)
    if machine is not None:
        return machine.take_flagged(ptr, flag, mask)
    at = _word_pointers(ptr, "take_flagged", _semantic)
    guard = _int_mask(mask, _semantic)
    before = [".reg .b32 flag; .reg .b64 word;"]
    if guard:
        before += ["mov.b32 $0, 0;", "setp.eq.b32 q, $5, 0;", "@q bra $$PKT_DONE_${:uid};"]
    poll = "ld.relaxed.sys.global.b64 word, [$1];\nmov.b64 {$0, flag}, word;"
    text = _spin(poll, "flag", "eq", world, before="\n".join(before))
    constraints = "=&r,l,r,l,r" + ",r" * len(guard)
    return _asm(text, constraints, [at, *_spin_arguments(flag, world, _semantic), *guard], core.int32, _semantic)


def _int_mask(mask: Any, semantic: Any) -> list:
    """The mask as int32 in a list, or an empty list."""
    if mask is None:
        return []
    return [core.cast(semantic.to_tensor(mask), core.int32, _semantic=semantic)]


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


@primitive
def multimem_can(ptr, what, op, world, _semantic=None):
    """Compile-time bool: whether these pointers may go through the switch. what: "load_reduce", "store", "reduce_add".

    `world.multicast`; the ISA has the form; the last dimension is whole groups of 16 bytes; and, for an addition,
    there is a group for each thread: of a smaller block several threads hold the same group, and each would add it.
    """
    dtype = _element(ptr)
    groups = _num_groups(ptr)
    form = {
        "load_reduce": (dtype.name, op) in _LOAD_REDUCE,
        "store": True,
        "reduce_add": dtype.name in _REDUCE_ADD and groups >= threads_to_agree(_semantic=_semantic).value,
    }[what]
    return core.constexpr(bool(_plain(world.multicast)) and groups > 0 and form)


def _shape(x: Any) -> list:
    return [int(_plain(n)) for n in x.shape]


def _num_groups(ptr: Any) -> int:
    """Groups of 16 bytes in a block of element pointers; 0 if it is not made of whole ones."""
    per = 128 // _element(ptr).primitive_bitwidth
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
    """Reshape to groups of 16 bytes of elements of `bits`: ([groups, 2, ..., 2], number of 2s). A split of that costs
    nothing for values loaded 16 bytes a thread, and index arithmetic is done again instead of shuffled."""
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
    return [core.cast(_first(mask, _element(ptr).primitive_bitwidth, semantic), core.int32, _semantic=semantic)]


@primitive
def multimem_load_reduce(ptr, mask, op, _semantic=None):
    """`multimem.ld_reduce.relaxed.sys.global`, one instruction for 16 bytes (vector forms) or for an element.

    ptr: block of element pointers in the multicast window, contiguous in runs of 16 bytes; mask: bool block, uniform in
    each run, or None; masked elements are 0.
    """
    machine = simulator(_semantic)
    if machine is not None:
        return machine.multimem_load_reduce(ptr, mask, op)
    dtype = _element(ptr)
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
    # "&": with more than one instruction a result is written before the address was last read
    constraints = ",".join([f"=&{kind}"] * n + ["l"] + ["r"] * len(guard))
    at = _first(ptr, dtype.primitive_bitwidth, _semantic)
    words = list(_asm("\n".join(lines), constraints, [at, *guard], (result,) * n, _semantic))
    x = _from_words(words, dtype, _semantic) if vector else _join(words, _semantic)
    return core.reshape(x, _shape(ptr), _semantic=_semantic)


def _send(instruction: str, ptr: Any, parts: list, kind: str, mask: Any, semantic: Any) -> None:
    """A store or reduction of 16 bytes: in one instruction if it is a vector form, else in one for each part."""
    n, bits = len(parts), _element(ptr).primitive_bitwidth
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
    _asm("\n".join([*lines, "mov.b32 $0, 0;"]), constraints, [at, *parts, *guard], core.int32, semantic)


@primitive
def multimem_store(ptr, value, mask, _semantic=None):
    """`multimem.st.relaxed.sys.global.v4.f32`: 16 bytes, of any element type, to every rank.

    ptr: block of element pointers in the multicast window, contiguous in runs of 16 bytes; value: block of that shape;
    mask: uniform in each run.
    """
    machine = simulator(_semantic)
    if machine is not None:
        return machine.multimem_store(ptr, value, mask)
    value = _like_pointers(value, ptr, _element(ptr), _semantic)
    _send("multimem.st.relaxed.sys.global.v4.f32", ptr, _words(value, _semantic), "r", mask, _semantic)
    return None


@primitive
def multimem_reduce_add(ptr, value, mask, _semantic=None):
    """`multimem.red.relaxed.sys.global.add`: 16 bytes (floats of 16 and 32 bits) or an element, added on every rank.
    Arguments as for `multimem_store`; there must be a group of 16 bytes for each thread (see `multimem_can`)."""
    machine = simulator(_semantic)
    if machine is not None:
        return machine.multimem_reduce_add(ptr, value, mask)
    dtype = _element(ptr)
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
    return None
