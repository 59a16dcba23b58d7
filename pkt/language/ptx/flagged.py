"""Words of 64 bits that carry data and its flag."""

from __future__ import annotations

from typing import Any

from triton.language import core

from .order import SIGNAL_MARKER
from .primitive import asm, element, primitive, simulator
from .spin import arguments, spin


def _pointers(ptr: Any, call: str, semantic: Any) -> Any:
    """As pointers to int32: Triton refuses two pointer types, these and the status page's, in one assembly."""
    if not ptr.type.scalar.is_ptr() or element(ptr).name not in ("int64", "uint64"):
        raise ValueError(f"{call} takes pointers to int64, not {ptr.type}")
    return core.cast(ptr, core.pointer_type(core.int32), bitcast=True, _semantic=semantic)


def _guard(mask: Any, semantic: Any) -> list:
    """The mask as int32 in a list, or an empty list."""
    if mask is None:
        return []
    return [core.cast(semantic.to_tensor(mask), core.int32, _semantic=semantic)]


@primitive
def put_flagged(ptr, value, flag, mask, _semantic=None):
    """`st.relaxed.sys.global.b64` of `value` in the low and `flag` in the high half of each word, one store a word.

    ptr: scalar or block of pointers to int64; value: int32 of that shape; flag: int32 scalar; mask: bool block or None.
    """
    machine = simulator(_semantic)
    if machine is not None:
        return machine.put_flagged(ptr, value, flag, mask)
    at = _pointers(ptr, "put_flagged", _semantic)
    value = core.cast(_semantic.to_tensor(value), core.int32, _semantic=_semantic)
    flag = core.cast(_semantic.to_tensor(flag), core.int32, _semantic=_semantic)
    guard = _guard(mask, _semantic)
    text = [
        f"{{ {SIGNAL_MARKER}",
        ".reg .pred p; .reg .b64 word;",
        "setp.ne.b32 p, $4, 0;" if guard else "",
        "mov.b64 word, {$2, $3};",
        f"{'@p ' if guard else ''}st.relaxed.sys.global.b64 [$1], word;",
        "mov.b32 $0, 0; }",
    ]
    constraints = "=r,l,r,r" + ",r" * len(guard)
    asm("\n".join(line for line in text if line), constraints, [at, value, flag, *guard], core.int32, _semantic)
    return None


@primitive
def take_flagged(ptr, stride, parts, flag, mask, world, _semantic=None):
    """Spin with `ld.relaxed.sys.global.b64` on words of `parts` parts, `stride` words apart, until the high half of
    each is `flag`; returns a tuple of the parts' low halves, int32, 0 where masked.

    ptr: to the words of the first part; mask: of each part; both as for `put_flagged`. A thread's words of all parts
    are loaded together, one flight, and again until all have the flag. Leaves at the deadline as `wait` does.
    """
    machine = simulator(_semantic)
    if machine is not None:
        return machine.take_flagged(ptr, stride, parts, flag, mask)
    stride = core.cast(_semantic.to_tensor(stride), core.int64, _semantic=_semantic)
    guard = _guard(mask, _semantic)
    inputs = [_pointers(ptr, "take_flagged", _semantic), *arguments(flag, world, _semantic), stride, *guard]
    first, want, apart, taken = f"${parts}", f"${parts + 1}", f"${parts + 4}", f"${parts + 5}"
    last, others = parts - 1, range(1, parts)
    before = [
        ".reg .b32 flag; .reg .b64 there;",
        *(f".reg .b32 flag{i}; .reg .b64 word{i}, at{i};" for i in range(parts)),
        f"mov.b64 at0, {first}; shl.b64 there, {apart}, 3;",
        *(f"add.s64 at{i}, at{i - 1}, there;" for i in others),
    ]
    if guard:
        before += [f"mov.b32 ${i}, 0;" for i in range(parts)]
        before += [f"setp.eq.b32 q, {taken}, 0;", "@q bra $$PKT_DONE_${:uid};"]
    poll = [f"ld.relaxed.sys.global.b64 word{i}, [at{i}];" for i in range(parts)]
    poll += [f"mov.b64 {{${i}, flag{i}}}, word{i};" for i in range(parts)]
    holds = [f"setp.eq.s32 p, flag0, {want};", *(f"setp.eq.and.s32 p, flag{i}, {want}, p;" for i in others)]
    look = [f"mov.b32 flag, flag{last}; mov.b64 there, at{last};"]  # the first that has not come
    for i in reversed(range(last)):
        look += [f"setp.ne.s32 q, flag{i}, {want};", f"@q mov.b32 flag, flag{i};", f"@q mov.b64 there, at{i};"]
    text = spin(
        "\n".join(poll), "\n".join(holds), "flag", "there", parts + 1, "eq", world,
        before="\n".join(before), look="\n".join(look),
    )  # fmt: skip
    constraints = ",".join(["=&r"] * parts + ["l,r,l,r,l"] + ["r"] * len(guard))
    return asm(text, constraints, inputs, (core.int32,) * parts, _semantic)
