"""Words of 128 bits that carry data and its flag."""

from __future__ import annotations

from typing import Any

from triton.language import core

from .order import SIGNAL_MARKER
from .primitive import asm, element, simulated
from .spin import arguments, spin

VALUES = 3
"""Number of int32 of a word that are data; the fourth is the flag."""


def _check(ptr: Any, call: str) -> None:
    if not ptr.type.scalar.is_ptr() or element(ptr).name not in ("int32", "uint32"):
        raise ValueError(f"{call} takes pointers to int32, four of them a word, not {ptr.type}")


def _int32(x: Any, semantic: Any) -> Any:
    return core.cast(semantic.to_tensor(x), core.int32, _semantic=semantic)


def _guard(mask: Any, semantic: Any) -> list:
    """The mask as int32 in a list, or an empty list."""
    return [] if mask is None else [_int32(mask, semantic)]


@simulated
def put_flagged(ptr, values, flag, mask, _semantic=None):
    """Store three `values` and `flag` in the four quarters of each word by one `st.relaxed.sys.global.b128` a word.

    ptr: scalar or block of pointers to int32; values: a tuple of int32 of that shape; flag: int32 scalar; mask: bool
    block or None.
    """
    _check(ptr, "put_flagged")
    guard = _guard(mask, _semantic)
    inputs = [ptr, *(_int32(value, _semantic) for value in values), _int32(flag, _semantic), *guard]
    text = [
        f"{{ {SIGNAL_MARKER}",
        ".reg .pred p; .reg .b64 low, high; .reg .b128 word;",
        "setp.ne.b32 p, $6, 0;" if guard else "",
        "mov.b64 low, {$2, $3}; mov.b64 high, {$4, $5}; mov.b128 word, {low, high};",
        f"{'@p ' if guard else ''}st.relaxed.sys.global.b128 [$1], word;",
        "mov.b32 $0, 0; }",
    ]
    constraints = "=r,l,r,r,r,r" + ",r" * len(guard)
    asm("\n".join(line for line in text if line), constraints, inputs, core.int32, _semantic)


@simulated
def take_flagged(ptr, stride, parts, flag, mask, world, _semantic=None):
    """Spin on the words of `parts` parts by `ld.relaxed.sys.global.b128` until the last quarter of each is `flag`.

    Returns for each part a tuple of the other three quarters, int32, 0 where masked. ptr: to the words of the first
    part; mask: of each part; both as for `put_flagged`; stride: int32 from one part to the next. A thread loads its
    words of all parts together, in one flight, until all have the flag. Leaves at the deadline, as `wait` does.
    """
    if parts == 0:
        return core.tuple([])
    _check(ptr, "take_flagged")
    guard = _guard(mask, _semantic)
    stride = core.cast(_semantic.to_tensor(stride), core.int64, _semantic=_semantic)
    inputs = [ptr, *arguments(flag, world, _semantic), stride, *guard]
    results = VALUES * parts
    first, want, apart, taken = (f"${results + i}" for i in (0, 1, 4, 5))
    last, others = parts - 1, range(1, parts)
    before = [
        ".reg .b32 flag; .reg .b64 there;",
        *(f".reg .b32 flag{i}; .reg .b64 low{i}, high{i}, at{i}; .reg .b128 word{i};" for i in range(parts)),
        f"mov.b64 at0, {first}; shl.b64 there, {apart}, 2;",
        *(f"add.s64 at{i}, at{i - 1}, there;" for i in others),
    ]
    if guard:
        before += [f"mov.b32 ${i}, 0;" for i in range(results)]
        before += [f"setp.eq.b32 q, {taken}, 0;", "@q bra $$PKT_DONE_${:uid};"]
    poll = [f"ld.relaxed.sys.global.b128 word{i}, [at{i}];" for i in range(parts)]
    for i in range(parts):
        a, b, c = (f"${VALUES * i + j}" for j in range(VALUES))
        poll += [f"mov.b128 {{low{i}, high{i}}}, word{i};"]
        poll += [f"mov.b64 {{{a}, {b}}}, low{i};", f"mov.b64 {{{c}, flag{i}}}, high{i};"]
    holds = [f"setp.eq.s32 p, flag0, {want};", *(f"setp.eq.and.s32 p, flag{i}, {want}, p;" for i in others)]
    look = [f"mov.b32 flag, flag{last}; add.s64 there, at{last}, 12;"]  # names the first part that has not arrived
    for i in reversed(range(last)):
        look += [f"setp.ne.s32 q, flag{i}, {want};", f"@q mov.b32 flag, flag{i};", f"@q add.s64 there, at{i}, 12;"]
    text = spin(
        "\n".join(poll), "\n".join(holds), "flag", "there", results + 1, "eq", world,
        before="\n".join(before), look="\n".join(look), small=True,
    )  # fmt: skip
    constraints = ",".join(["=&r"] * results + ["l,r,l,r,l"] + ["r"] * len(guard))
    found = list(asm(text, constraints, inputs, (core.int32,) * results, _semantic))
    return core.tuple([core.tuple(found[i : i + VALUES]) for i in range(0, results, VALUES)])
